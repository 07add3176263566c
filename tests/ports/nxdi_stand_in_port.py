"""Whole ports for the stand-in of NxDI, right and wrong, of the layers of `scripts/examples`."""

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
from neuron.ports.nxdi_stream import add_stream_points


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


_PARTS = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm"),
    *("self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "moe", "moe.router"),
)
_LAYERS = [f"layers.{index}" for index in range(4)]
NAMES = ["embed_tokens", "norm", *_LAYERS, *(f"{layer}.{part}" for layer in _LAYERS for part in _PARTS)]


class Captured(Application):
    """The right port, whose tensors NxDI captures."""

    mm2_neuron_config = {"tensor_capture_config": {"modules_to_capture": NAMES, "capture_inputs": True}}


class Swapped(Application):
    """Gate and up exchanged in layer 2."""

    @classmethod
    def reorder(cls, tensors, index):
        """Exchange the two matrices of each expert."""
        if index == 2:
            for expert in range(8):
                gate, up = (f"block_sparse_moe.experts.{expert}.{name}.weight" for name in ("w1", "w3"))
                tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return tensors


class _ForgetfulModel(Model):
    def forward(self, input_ids, attention_mask, position_ids):
        if input_ids.shape[1] == 1:
            attention_mask = attention_mask.clone()
            attention_mask[:, 2] = 0
        return super().forward(input_ids, attention_mask, position_ids)


class Forgetful(Application):
    """The cache forgets the token at position 2 of every prompt."""

    _model_cls = _ForgetfulModel


class _LastColumnModel(Model):
    def forward(self, input_ids, attention_mask, position_ids):
        if input_ids.shape[1] > 1:
            position_ids = position_ids.clone()
            position_ids[:, -1] = position_ids.max() + 1
        return super().forward(input_ids, attention_mask, position_ids)


class LastColumn(Application):
    """The prefill's logits are those of the bucket's last column."""

    _model_cls = _LastColumnModel
    mm2_neuron_config = {"on_device_sampling_config": None}


class Contradicting(Application):
    """Options that contradict the run."""

    mm2_neuron_config = {
        "batch_size": 7,
        "seq_len": 8,
        "padding_side": "left",
        "is_continuous_batching": True,
    }


class Divided(Application):
    """A stream that ranks divide."""

    mm2_neuron_config = {"sequence_parallel_enabled": True}


class _PointedModel(Model):
    def init_model(self, config):
        super().init_model(config)
        add_stream_points(self)


class ByHand(Swapped):
    """The wrong port, with the stream's points that a porter adds."""

    _model_cls = _PointedModel
