"""Metrics: figures of tensors and of the noise floor.

- `tensor_statistics`: figures of one tensor
- `pair_metrics`: figures of a pair of tensors; the sums behind them; the median distance
- `noise_floor`: statistics of the golden's noise floor; averages of an error in which rounding cancels
- `error_sums`: sums of errors by token and by channel; tensors widened a part at a time, on every core
"""
