"""What computes, and how weights get there.

- `machine`: which NeuronCores there are
- `backend`: what computes; `runtime`: a backend opened with its device; `distributed`: its process group
- `weights`: a layer's weights, brought onto a device
"""
