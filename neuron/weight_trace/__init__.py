"""Weight trace: where every element of a port's weights comes from, and whether that is right; `mm2-test weights`.

A *source tensor* is a tensor of the checkpoint's layer, a *port tensor* one that the port's module holds. In the order
of an inspection:

- `inspection`: the whole inspection of a port, on one rank or on several, and its verdict
- `report`: inspections as text and as JSON
- `trace_size`: a smaller model, or the experts that fit in memory; memory that a conversion wastes
- `source_tensors`: a layer's tensors, every element numbered; where each landed; tensors made on access
- `port_tensors`: every tensor that a port's module holds, and the traced part of a large one
- `origin_tracer`: the passes that show where each element lands
- `tensor_layout`: the rows and columns of source tensors that a port tensor holds, as text too
- `agreement`: weights that belong together lie alike and are scaled alike; a finding
- `layout_check`: findings from the layouts, and from the checkpoint's own layer in the traced port
- `repairs`: inverses of known mistakes
- `trial`: the run on generated weights that clears or proves a suspect
- `source_lines`: rows and columns of the checkpoint's layer, found in a port's tensors
- `held_check`: what a port holds of a layer, as in every run
"""
