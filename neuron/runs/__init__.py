"""A run of a port's layers, from their hidden states to the capture.

- `runner`: the run; `golden_feed`: what a golden gives it
- `executor`: its layers, one at a time; `head`: the model outside its layers
- `orders`: what the lead of several ranks tells the others; `following`: what these do; `assembly`: what all recorded,
  put together
- `footprint`: what a run takes of the host's memory, and the limits it is held to
- `bisection`: the search for wrong layers; `chain_runner`: layers one after the other; `prober`: the runs of a search,
  noted in a `journal`
"""
