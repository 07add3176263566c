"""Limits: figures that right ports stay below.

- `limits`: limits by site and figure; one limit, by the number of tokens and the share of false alarms; facts beside
  the figures that limits depend on
- `limits_file`: limits read from YAML
- `tolerances`: constants that options show; the file with mm2's own limits, `calibration.yaml`
- `criteria`: all limits and tolerances of a comparison, the classic ones too
"""
