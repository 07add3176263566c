"""Metrics: figures of tensors and of the noise floor.

- `pair_metrics`: figures of one tensor and of a pair
- `pair_sums`: the sums behind them
- `noise_floor`: statistics of the golden's noise floor
- `error_structure`: averages of an error in which rounding cancels
"""
