"""A whole port on neuronx-distributed-inference's own modules, for the test of its adapter; for one rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from torch import nn

from minimax_tools.checkpoint.layer_tensors import LayerTensors, ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec

sys.path.insert(0, str(Path(__file__).parent))

from nxdi_port import Config, DecoderLayer, Norm


class Model(NeuronBaseModel):
    """The port's module."""

    def setup_attr_for_model(self, config):
        self.on_device_sampling = config.neuron_config.on_device_sampling_config is not None
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets

    def init_model(self, config):
        dtype = config.neuron_config.torch_dtype
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            gather_output=not self.on_device_sampling,
            dtype=dtype,
        )


class Application(NeuronBaseForCausalLM):
    """The port."""

    _model_cls = Model

    @classmethod
    def get_config_cls(cls):
        return Config

    @classmethod
    def get_state_dict(cls, folder, config):
        spec, dtype = ModelSpec.from_folder(Path(folder)), config.neuron_config.torch_dtype
        with CheckpointReader(Path(folder)) as reader:
            outer = ModelTensors.open(reader, spec, dtype, with_layers=False)
            weights = {name.removeprefix("model."): outer[name] for name in outer}
            for index in range(config.num_hidden_layers):
                layer = _convert(LayerTensors.open(reader, spec, index, dtype), config)
                weights |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
        return weights


def _convert(tensors, config):
    moe, kept = "block_sparse_moe.", ("input_layernorm", "post_attention_layernorm")
    kept += tuple(f"self_attn.{name}" for name in ("q_norm", "k_norm", "o_proj"))
    experts = [f"{moe}experts.{expert}." for expert in range(config.num_local_experts)]
    gate_up = [torch.cat((tensors[name + "w1.weight"], tensors[name + "w3.weight"])).T for name in experts]
    return {
        **{f"{name}.weight": tensors[f"{name}.weight"] for name in kept},
        **{
            f"self_attn.qkv_proj.{name}_proj.weight": tensors[f"self_attn.{name}_proj.weight"]
            for name in "qkv"
        },
        "self_attn.rank_util.rank": torch.zeros(1, dtype=torch.int32),
        f"{moe}router.linear_router.weight": tensors[f"{moe}gate.weight"],
        f"{moe}router.e_score_correction_bias": tensors[f"{moe}e_score_correction_bias"],
        f"{moe}expert_mlps.mlp_op.gate_up_proj.weight": torch.stack(gate_up),
        f"{moe}expert_mlps.mlp_op.down_proj.weight": torch.stack(
            [tensors[name + "w2.weight"].T for name in experts]
        ),
    }
