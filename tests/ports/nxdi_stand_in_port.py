"""A whole port for the stand-in of NxDI, for the tests of its adapter: the layers of `scripts/examples`."""

from __future__ import annotations

import sys
from pathlib import Path

from neuronx_distributed.utils import cpu_mode
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))

from cached_port import DecoderLayer
from port import Norm

from minimax_tools.checkpoint.layer_tensors import LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec


class DeviceNorm(Norm):
    """The norm that a device gets."""


def norm_class():
    """Return the class of a norm, for where it is built."""
    return Norm if cpu_mode() else DeviceNorm


class Model(NeuronBaseModel):
    """The port's module."""

    layer_class = DecoderLayer

    def init_model(self, config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.layer_class(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = norm_class()(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Application(NeuronBaseForCausalLM):
    """A right port."""

    _model_cls = Model

    @classmethod
    def get_config_cls(cls):
        return InferenceConfig

    @classmethod
    def get_state_dict(cls, folder, config):
        spec, dtype = ModelSpec.from_folder(Path(folder)), config.neuron_config.torch_dtype
        weights = {}
        with CheckpointReader(Path(folder)) as reader:
            outer = ModelTensors.open(reader, spec, dtype, with_layers=False)
            weights |= {name.removeprefix("model."): outer[name] for name in outer}
            for index in range(config.num_hidden_layers):
                tensors = LayerTensors.open(reader, spec, index, dtype)
                converted = DecoderLayer.convert_state_dict(None, cls.reorder(tensors, index), config, index)
                weights |= {f"layers.{index}.{name}": tensor for name, tensor in converted.items()}
        return weights

    @classmethod
    def reorder(cls, tensors, index):
        """Return a layer's tensors as they are."""
        return tensors
