"""Limits: figures that right ports stay below.

- `limit`: one limit, by the number of tokens and the share of false alarms
- `limits`: limits by site and figure
- `limits_file`: limits read from YAML
- `calibration`: the file with mm2's own, `calibration.yaml`
- `limit_context`: facts beside the figures that limits depend on
- `tolerances`: the usual tolerances of close elements
- `criteria`: all limits and tolerances of a comparison, the classic ones too
"""
