"""Sides: the golden and the device run, and what both were computed from.

- `pairing`: captures that may be compared, and their layers
- `sides`: the pair, its batch, criteria and weights; the real tokens; the ways in which a pass may take tokens for
  others
- `captured_input`: a layer's input
- `golden_weights`: weights that the golden computed with
- `layer_floor`: a layer's noise floor as the golden kept it; checks that a golden agrees with its own floor
- `port_head`: the head's golden on the port's own last output; a layer's golden on the port's own input
"""
