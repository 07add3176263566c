"""Configs of a device and of a model."""

from __future__ import annotations

import torch


class MoENeuronConfig:
    """The config of a device that runs a mixture of experts."""

    def __init__(self, **options):
        self.tp_degree = options.pop("tp_degree", 1)
        self.torch_dtype = options.pop("torch_dtype", torch.bfloat16)
        self.cast_type = options.pop("cast_type", "config")
        self.normalize_top_k_affinities = options.pop("normalize_top_k_affinities", True)
        for name, value in options.items():
            setattr(self, name, value)


class InferenceConfig:
    """The config of a model."""

    def __init__(self, neuron_config, **values):
        self.neuron_config = neuron_config
        for name, value in values.items():
            setattr(self, name, value)

    @classmethod
    def get_neuron_config_cls(cls):
        """Return the class of the device's config."""
        return MoENeuronConfig
