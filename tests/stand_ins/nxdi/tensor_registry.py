"""The registry of captured tensors. Clearing it forgets the modules too, as NxD's does."""

from __future__ import annotations

import torch


class TensorRegistry:
    """Tensors of a pass, by module and point."""

    _instance = None

    @classmethod
    def get_instance(cls):
        """Return the only registry."""
        cls._instance = cls._instance or cls()
        return cls._instance

    def __init__(self):
        self.modules, self.tensors = [], {}

    def configure(self, enabled=False, modules=None, max_tensors=None, capture_inputs=False):
        """Name the modules to keep tensors of."""
        self.modules, self.tensors = list(modules), {}

    def keep(self, name, point, values):
        """Keep the first tensor of several."""
        if name in self.modules:
            tensor = next(value for value in values if isinstance(value, torch.Tensor))
            self.tensors[name, point] = tensor.clone()

    def take(self, modules):
        """Return output and input of each module, a single zero for what was not kept, and clear all."""
        taken = [
            self.tensors.get((name, point), torch.zeros(1))
            for name in modules
            for point in ("output", "input")
        ]
        self.modules, self.tensors = [], {}
        return taken
