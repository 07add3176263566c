"""The base of models, and of applications: classes that hold a model, read its checkpoint and cast it."""

from __future__ import annotations

import torch
from torch import nn


class NeuronBaseModel(nn.Module):
    """A model."""

    def __init__(self, config):
        super().__init__()
        self.init_model(config)


class NeuronBaseForCausalLM(nn.Module):
    """An application."""

    _model_cls = None

    def __init__(self, model_path, config):
        super().__init__()
        raise AssertionError("this plans the whole model")

    @classmethod
    def get_state_dict(cls, model_path, config):
        """Read a checkpoint."""
        raise FileNotFoundError("a folder of the author's machine")

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        """Return the state dict as it is; a port converts it here."""
        return state_dict

    def checkpoint_loader_fn(self):
        """Return the checkpoint, cast to the device's dtype."""
        tensors = self.get_state_dict(self.model_path, self.config)
        dtype = self.neuron_config.torch_dtype
        if dtype != torch.float32 and self.neuron_config.cast_type == "config":
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    tensors[name] = tensor.to(dtype)
        return tensors
