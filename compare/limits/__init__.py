"""Limits: figures that right ports stay below.

- `limit`: one limit, by the number of tokens and the share of false alarms
- `limits`: limits by site and figure
- `limits_file`: limits read from YAML; `calibration.yaml` holds mm2's own
- `limit_context`: facts beside the figures that limits depend on
- `criteria`: all limits and tolerances of a comparison, the classic ones too
"""
