"""Weights on their way into a model: NxD's sharding, and NxDI's cast of a module."""

from __future__ import annotations

import warnings


def get_sharded_checkpoint(checkpoint, model, rank, tp_degree):
    """Let modules rename their weights, drop names that the model lacks, and cut divided weights for a rank."""
    for path, module in model.named_modules():
        if hasattr(module, "preshard_hook"):
            module.preshard_hook(checkpoint, f"{path}.weight")
    places = model.state_dict(keep_vars=True)
    dropped = [name for name in checkpoint if name not in places]
    warnings.warn(f"Removing redundant keys from checkpoint: {dropped}", stacklevel=1)
    for name in dropped:
        del checkpoint[name]
    for name, place in places.items():
        if getattr(place, "tensor_model_parallel", False) and name in checkpoint:
            checkpoint[name] = checkpoint[name].chunk(tp_degree, dim=place.partition_dim)[rank]


class DecoderModelInstance:
    """A model to compile."""

    def __init__(self, model_cls, config, **options):
        self.model_cls, self.config, self.options = model_cls, config, options
        self.module = None

    def load_module(self):
        """Build the model, and cast it to the device's dtype."""
        self.module = self.model_cls(self.config, **self.options).eval()
        if self.config.neuron_config.cast_type == "config":
            dtype = self.config.neuron_config.torch_dtype
            self.module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
