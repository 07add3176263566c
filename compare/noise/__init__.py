"""Noise: errors in units of what BF16 costs.

- `rho`: ρ of a site, and the error expected of a right port
- `rows`: the judged tokens of a site, with their floor
- `interval`: the interval of ρ
- `squared_errors`: squared norms of token rows
- `input_error`: the error of a chained layer's input
"""
