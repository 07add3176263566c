"""Noise: errors in units of what BF16 costs.

- `rho`: ρ of a site, its figures and its interval
- `squared_errors`: squared norms of token rows
- `input_error`: the error of a chained layer's input
"""
