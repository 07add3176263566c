"""A model divided among nodes, on paper: the cost of its parts, and the plan that divides them.

- `node`: machines that can hold a slice; a node and the parts of the model that it holds; ways to divide layers, by
  memory, by throughput or by hand
- `cost`: bytes, parameters and FLOPs of the model's parts; the costs of a model, computed from its tensors' shapes
- `planners`: the division of layers among nodes
- `planned_slice`: the part of a model that one node holds, with the places of its tensors
- `plan`: all slices of a model, as a value and as a file; the check that a plan is whole and matches its checkpoint

Slices are cut out, fetched and verified along a plan in `minimax_tools.slices`.
"""
