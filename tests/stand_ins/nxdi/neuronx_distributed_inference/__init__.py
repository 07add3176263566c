"""A stand-in for neuronx-distributed-inference (NxDI): what `nxdi:` calls of it, behaving as NxDI 0.10 does."""
