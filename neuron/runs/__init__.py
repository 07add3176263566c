"""A run of a port's layers, from their hidden states to the capture.

- `device_request`: a run before it starts; `runner`: the run; `golden_feed`: what a golden gives it
- `executor`: its layers, one at a time, each fed a `layer_input` and giving a `layer_run`; `head`: what lies outside
- `decoding`: rows one at a time, from a cache; `generation`: the tokens that follow
- `orders`: what the lead of several ranks tells the others; `following`: what these do; `assembly`: what all recorded,
  put together
- `footprint`: what a run takes of the host's memory, and the limits it is held to
- `run_report`: what a run tells of itself; `stopwatch`, `layer_times`, `profiler`: where its time goes, stored as a
  `run_profile`
- `bisection`: the search for wrong layers; `chain_runner`: layers one after the other; `prober`: the runs of a search,
  noted in a `journal`
"""
