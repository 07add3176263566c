"""Goldens put at remote addresses, for everybody who ports the model.

- `publication`: a golden checked, and put with its card
"""
