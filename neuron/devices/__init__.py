"""What computes, and how weights get there.

- `machine`: which NeuronCores there are
- `backend`: what computes; `runtime`: a backend opened with its device
- `ranks`: which process this is, of how many that share a layer; `distributed`: their process group; `crew`: how they
  talk, and learn that one failed; `spmd`: devices of one process instead
- `weights`: a layer's weights, brought onto a device
"""
