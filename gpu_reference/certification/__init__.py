"""The check of a finished golden before it is trusted.

- `certifier`: all checks of one golden, and the certificate that they give; the checks of the layers against the
  model and mm2's own float32 layer; the distance of the floor's variants from the float32 twin
- `checked_capture`: a golden's tensors, with digests, NaN and noise floor checked as they are read
- `golden_checks`: the figures of one layer, and their limits; counts and worst figures that become checks
- `trust`: refusals of goldens that are incomplete, changed, or not certified
"""
