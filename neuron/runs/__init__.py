"""A run of a port's layers, from the request to the capture.

The straight path, from the top down:

- `device_request`: a run before it starts; `runner`: the run, from the first layer's input to the capture
- `executor`: runs one layer on all ranks and records its sites; `layer_run`: its input, request and result
- `resident_layer`: the one layer whose weights are in memory; `next_layer`: the layer that is read meanwhile
- `footprint`: the host memory that a run takes; `rank_assembly`: the pieces of ranks that share a layer

Beside it:

- `golden_inputs`: the values that a run takes from a golden
- `decoding`: the last tokens of each prompt, computed one at a time; `generation`: tokens that the model adds
- `head`: embedding, final norm and lm_head
- `stage_feeds`: right values in place of the port's own at some sites; `proving`: a mistake undone, and judged again
- `layer_times`: the time of a layer by phase; `stopwatch`: its measurement; `run_profile`: times and memory in a file
- `run_report`: facts about a finished run
- `bisection`: the search for wrong layers; `extent`: its end; `journal`: its finished probes in a file
"""
