"""Noise: errors in units of what BF16 costs.

- `rho`: ρ of a site, and the error expected of a right port; the interval of ρ
- `yardstick`: noise at one site by token and channel, and the distance of a prediction in its units
- `rows`: the judged tokens of a site, with their floor; the error of a chained layer's input; squared norms of token
  rows
"""
