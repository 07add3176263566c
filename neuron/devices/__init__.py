"""The device that computes, and the weights on it.

- `machine`: the NeuronCores of this machine; a device out of memory, and what to lower
- `backend`: what computes, and the choice of it
- `runtime`: a backend that is open, with its device and ranks
- `compiler`: torch.compile, which makes graphs of a layer; counts of graphs, and where they broke
- `ranks`: the ranks that share a layer; `distributed`: their store and process groups
- `spmd`: devices of one process that share a layer
- `weights`: a layer's weights, on their way to a device
"""
