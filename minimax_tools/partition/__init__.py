"""A model divided among nodes, on paper: what its parts cost, and who gets which.

| module | the question it answers |
|---|---|
| `node` | which machines there are |
| `cost` | what the model's parts take: bytes, parameters, FLOPs |
| `chain` | which runs of layers fit a node |
| `planners` | who gets which layers |
| `planned_slice`, `plan`, `plan_faults` | the plan as a value and a file, and whether it is whole |

What is cut out, fetched and proved along a plan is in `minimax_tools.slices`.
"""
