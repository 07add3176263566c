"""Largest errors of right ports at the end of a chain, as measured; `chain_limits` makes limits of them."""

from __future__ import annotations

# Largest errors of right ports in 8,400 chains, which begin at every layer of nine synthetic models; measured by
# scripts/bench_chained_ends.py with its default settings. A line for each length, from 1 layer on. The columns are the
# fields of `ChainError`: lower quartile, median, upper quartile and ninth decile over the tokens, and massive channels.
LARGEST_ERRORS = (
    (0.640, 0.726, 0.833, 1.01, 0.714),
    (0.938, 2.39, 8.64, 23.0, 2.07),
    (3.73, 12.2, 23.0, 31.7, 4.11),
    (12.8, 24.4, 38.2, 53.6, 4.11),
    (27.8, 39.4, 53.8, 71.1, 4.11),
    (33.2, 44.9, 60.1, 83.4, 4.40),
    (38.5, 51.1, 74.7, 93.5, 7.33),
    (42.9, 58.8, 82.5, 97.7, 9.09),
)
LONGEST_CHAIN = len(LARGEST_ERRORS)
