"""Goldens put at remote addresses, for everybody who ports the model.

- `publication`: a golden checked, and put with its card; README.md of a published golden: what made it, and how to
  use it
"""
