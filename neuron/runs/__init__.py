"""A run of a port's layers, from the request to the capture.

The straight path, from the top down:

- `port_setup`: what a port needs to run
- `device_request`: a run before it starts, and the values that it takes from a golden
- `runner`: the run, from the first layer's input to the capture; embedding, final norm and lm_head
- `executor`: runs one layer on all ranks, records its sites and its times, and joins the pieces of ranks
- `layer_run`: a layer's input, request, result and times; right values in place of the port's own at some sites
- `resident_layer`: the one layer whose weights are in memory, the layer that is read meanwhile, and the memory of both

Beside it:

- `generation`: the last tokens of each prompt, computed one at a time; tokens that the model adds
- `proving`: a mistake undone, and judged again
- `run_profile`: times and memory in a file; facts about a finished run
- `bisection`: the search for wrong layers, and its finished probes in a file
"""
