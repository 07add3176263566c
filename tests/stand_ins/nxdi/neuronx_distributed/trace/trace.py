"""Checkpoints on their way into a model."""

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
