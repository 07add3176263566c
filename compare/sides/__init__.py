"""Sides: the golden and the device run, and what both were computed from.

- `opening`: both sides as a command's options name them
- `pairing`: captures that may be compared, and their layers
- `port_source`: whether a port's file has changed since its run
- `proving`: no verdict before all that was read is checked
- `sides`: the pair, its batch, criteria and weights
- `batch`: the real tokens
- `captured_input`: a layer's input
- `golden_weights`: weights that the golden computed with
- `layer_floor`: a layer's noise floor as the golden kept it
- `proven_floor`: checks that a golden agrees with its own floor
- `port_input`: a layer's golden on the port's own input
- `port_head`: the head's golden on the port's own last output
- `exchanged_tokens`: the ways in which a pass may take tokens for others
"""
