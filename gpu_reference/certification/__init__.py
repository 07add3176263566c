"""The check of a finished golden before it is trusted.

- `certifier`: all checks of one golden, and the certificate that they give
- `golden_checks`: the figures of one layer, and their limits
- `trust`: refusals of goldens that are incomplete, changed, or not certified
"""
