"""Weight trace: where every element of a port's weights comes from, and whether that is right; `mm2-test weights`.

A *source tensor* is a tensor of the checkpoint's layer, a *port tensor* one that the port's module holds. In the order
of an inspection:

- `inspection`: the whole inspection of a port, and its verdict; layers whose inspections found the same
- `smaller_model`: a model of the same proportions whose layer is traced in seconds
- `trace_size`: the traced experts and the trial's dtype, as memory allows; float32 that a conversion makes, or keeps,
  beyond need
- `source_tensors`: the tensors of a checkpoint's layer, with every element numbered
- `generated_tensors`: a layer's tensors made on access
- `traced_port`: one rank's part of the port, built, loaded and run
- `shared_port`: the same on all ranks that share the port
- `port_tensors`: every tensor that a port's module holds, and the traced part of a large one
- `origin_tracer`: the passes that show where each element lands; what each pass shows of one port tensor
- `tensor_origin`: the source element of each element of a port tensor
- `layout_segment`: rows or columns, neighbours or every nth, that one source tensor fills; rows or columns of a
  source tensor in the order in which a port tensor holds them; a matrix read as such segments
- `tensor_layout`: the source tensors that a port tensor holds, as text too
- `scales`: factors by which a port multiplied its weights, and scales that it moved
- `agreement`: weights that belong together lie alike; one fault, or something that may be one
- `layout_check`: findings from the layouts; the checkpoint's own layer in the traced port
- `repairs`: inverses of known mistakes
- `trial`: the run on generated weights that clears or proves a suspect; generated weights that FP8 or INT8 hold
  exactly
- `source_lines`: rows and columns of the checkpoint's layer, as a port is given them; rows and columns of a port's
  tensors, found among those
- `held_check`: what a port holds of a layer, as in every run; where the experts' lines lie, compared with each other
- `report`: inspections as text and as JSON
"""
