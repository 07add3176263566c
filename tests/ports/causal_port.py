"""A port of MiniMax-M2 with an application that converts its checkpoint, and ports that err; on one rank."""

from __future__ import annotations

import torch
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from torch import nn

from minimax_tools.reference.layer import ReferenceAttention, ReferenceNorm


def product(a, b):
    """Return a @ b of BF16 tensors, added up in float32 as devices do.

    torch's own is fifteen times slower on CPUs without BF16 instructions.
    """
    return (a.float() @ b.float()).to(a.dtype)


class Config(InferenceConfig):
    """The config of the model."""


class Projections(nn.Module):
    """q, k and v."""

    def __init__(self, config):
        super().__init__()
        query, key = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)

    def preshard_hook(self, checkpoint, prefix):
        """Take the names without `qkv_proj`, as NxDI's module does."""
        own = prefix.removesuffix("weight")
        for name in ("q_proj", "k_proj", "v_proj"):
            old = f"{own.removesuffix('qkv_proj.')}{name}.weight"
            if old in checkpoint:
                checkpoint[f"{own}{name}.weight"] = checkpoint[old]


class Output(nn.Module):
    """The module around o_proj."""

    def __init__(self, config):
        super().__init__()
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        # So does NxD mark weights that ranks divide.
        self.o_proj.weight.tensor_model_parallel, self.o_proj.weight.partition_dim = True, 1

    def forward(self, context):
        return self.o_proj(context)


class Attention(ReferenceAttention):
    """Attention with NxDI's names and mask."""

    def __init__(self, config):
        super().__init__(config)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj
        self.qkv_proj, self.o_proj = Projections(config), Output(config)
        self.norm_queries_and_keys(config)

    def norm_queries_and_keys(self, config):
        """Leave the norms as they are."""

    def normed(self, q, k):
        return self.heads(self.q_norm(q)), self.heads(self.k_norm(k))

    def forward(self, states, mask, position_ids):
        parts = self.qkv_proj
        q, k = self.normed(parts.q_proj(states), parts.k_proj(states))
        q, k = self.rotate(q, position_ids), self.rotate(k, position_ids)
        scores = q @ self.repeat(k).mT / self.config.head_dim**0.5
        weights = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1)
        context = weights.to(states.dtype) @ self.repeat(self.heads(parts.v_proj(states)))
        return self.o_proj(context.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """NxD's router, with the correction bias."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.linear_router = nn.Linear(
            config.hidden_size, config.num_local_experts, bias=False, dtype=torch.float32
        )
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(config.num_local_experts, dtype=torch.float32)
        )

    def forward(self, states):
        logits = self.linear_router(states.to(self.linear_router.weight.dtype)).flatten(0, 1)
        affinities = logits.double().sigmoid()
        chosen = (affinities + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        return logits, affinities.to(states.dtype), chosen


class ExpertWeights(nn.Module):
    """The experts' matrices."""

    def __init__(self, config):
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj, self.down_proj = nn.Module(), nn.Module()
        self.gate_up_proj.weight = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.down_proj.weight = nn.Parameter(torch.empty(experts, inner, hidden))


class Experts(nn.Module):
    """NxD's experts, each over all tokens."""

    def __init__(self, config):
        super().__init__()
        self.mlp_op = ExpertWeights(config)

    def forward(self, *, hidden_states, expert_affinities, expert_index):
        chosen = torch.zeros_like(expert_affinities).scatter(-1, expert_index, 1.0)
        weights = self.weigh(expert_affinities * chosen)
        gate, up = product(hidden_states, self.mlp_op.gate_up_proj.weight).chunk(2, dim=-1)
        outputs = product(nn.functional.silu(gate) * up, self.mlp_op.down_proj.weight)
        return torch.einsum("te,eth->th", weights.float(), outputs.float()).to(hidden_states.dtype)

    def weigh(self, affinities):
        """Return the weights of chosen experts from their affinities [T,E], 0 for the others."""
        return nn.functional.normalize(affinities, p=1.0, dim=1)


class Moe(nn.Module):
    """Router and experts."""

    def __init__(self, config):
        super().__init__()
        self.router, self.expert_mlps = Router(config), Experts(config)

    def forward(self, states):
        _, affinities, chosen = self.router(states)
        output = self.expert_mlps(
            hidden_states=states.flatten(0, 1), expert_affinities=affinities, expert_index=chosen
        )
        return (output.view(states.shape),)


class DecoderLayer(nn.Module):
    """The port."""

    attention_class = Attention

    def __init__(self, config: Config, layer_idx):
        super().__init__()
        self.self_attn = self.attention_class(config)
        self.input_layernorm = ReferenceNorm(config.hidden_size, config)
        self.post_attention_layernorm = ReferenceNorm(config.hidden_size, config)
        self.block_sparse_moe = Moe(config)

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), attention_mask, position_ids
        )
        hidden_states = hidden_states + self.block_sparse_moe(self.post_attention_layernorm(hidden_states))[0]
        return hidden_states, None


class Model(NeuronBaseModel):
    """The port's model."""

    def init_model(self, config):
        self.layers = nn.ModuleList(
            [DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        )


class ForCausalLM(NeuronBaseForCausalLM):
    """The port's application."""

    _model_cls = Model

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        print("=== a port that prints while it converts ===")  # noqa: T201 - as ports do
        for layer in range(config.num_hidden_layers):
            moe = f"layers.{layer}.block_sparse_moe."
            state_dict[f"{moe}router.linear_router.weight"] = state_dict.pop(f"{moe}gate.weight")
            state_dict[f"{moe}router.e_score_correction_bias"] = state_dict.pop(
                f"{moe}e_score_correction_bias"
            )
            attention = f"layers.{layer}.self_attn."
            state_dict[f"{attention}o_proj.o_proj.weight"] = state_dict.pop(f"{attention}o_proj.weight")
            experts = [f"{moe}experts.{expert}." for expert in range(config.num_local_experts)]
            gate, down, up = (
                torch.stack([state_dict.pop(f"{expert}{name}.weight").T for expert in experts])
                for name in ("w1", "w2", "w3")
            )
            state_dict[f"{moe}expert_mlps.mlp_op.gate_up_proj.weight"] = torch.cat((gate, up), dim=-1)
            state_dict[f"{moe}expert_mlps.mlp_op.down_proj.weight"] = down
        return state_dict


class AsDeclared(DecoderLayer):
    """The layer in the dtypes that it declares."""

    mm2_neuron_config = {"cast_type": "as-declared"}


class ByTable(DecoderLayer):
    """The layer filled by mm2's table."""

    mm2_causal_lm = None


class ByItself(AsDeclared):
    """The layer with a conversion for mm2."""

    def convert_state_dict(self, tensors, config, layer_idx):
        state_dict = {f"layers.0.{name}": tensors[name] for name in tensors}
        config.num_hidden_layers = 1
        converted = ForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)
        named = {name.removeprefix("layers.0."): tensor for name, tensor in converted.items()}
        return {
            name.replace("self_attn.", "self_attn.qkv_proj.")
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            else name: tensor
            for name, tensor in named.items()
        }


class NotNormalised(AsDeclared):
    """The layer whose experts are told not to normalise, and do not."""

    def __init__(self, config: Config, layer_idx):
        super().__init__(config, layer_idx)
        experts = self.block_sparse_moe.expert_mlps
        experts.routed_experts_mlp_config = type("Routed", (), {"normalize_top_k_affinities": False})
        experts.__class__ = UnnormalisedExperts


class UnnormalisedExperts(Experts):
    """Experts that take the affinities as weights."""

    def weigh(self, affinities):
        return affinities


def _application(name, change):
    """Make an application whose conversion is followed by `change`, and the layer that it builds."""

    def convert(state_dict, config):
        converted = ForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)
        change(converted)
        return converted

    return type(name, (ForCausalLM,), {"convert_hf_to_neuron_state_dict": staticmethod(convert)})


_MOE = "layers.0.block_sparse_moe."


def _swap_gate_up(converted):
    name = f"{_MOE}expert_mlps.mlp_op.gate_up_proj.weight"
    converted[name] = torch.cat(converted[name].chunk(2, dim=-1)[::-1], dim=-1)


def _transpose_down(converted):
    name = f"{_MOE}expert_mlps.mlp_op.down_proj.weight"
    converted[name] = converted[name].mT


def _lose_bias(converted):
    converted[f"{_MOE}e_score_correction_bias"] = converted.pop(f"{_MOE}router.e_score_correction_bias")


def _lose_output(converted):
    converted["layers.0.self_attn.o_proj.o_proj.o_proj.weight"] = converted.pop(
        "layers.0.self_attn.o_proj.o_proj.weight"
    )


class SwappedGateUp(AsDeclared):
    """The layer of an application that puts up before gate."""

    mm2_causal_lm = _application("SwappingForCausalLM", _swap_gate_up)


class LostBias(AsDeclared):
    """The layer of an application that does not rename the correction bias."""

    mm2_causal_lm = _application("LosingForCausalLM", _lose_bias)


class LostOutput(AsDeclared):
    """The layer of an application that renames o_proj twice."""

    mm2_causal_lm = _application("RenamingForCausalLM", _lose_output)


class Misfit(AsDeclared):
    """The layer of an application that does not transpose w2, as a matrix that is not square shows."""

    mm2_causal_lm = _application("UntransposingForCausalLM", _transpose_down)


class Failing(AsDeclared):
    """The layer of an application that needs what a one-layer config lacks."""

    mm2_causal_lm = _application("FailingForCausalLM", lambda converted: converted["layers.7.nothing"])


class NoApplication(DecoderLayer):
    """The layer that names no application."""

    mm2_causal_lm = Model


class HeadNorms(Attention):
    """Attention with a norm for each head, as NxDI's own attention has it: the weights averaged over the heads."""

    def norm_queries_and_keys(self, config):
        del self.q_norm, self.k_norm
        self.q_layernorm = ReferenceNorm(config.head_dim, config)
        self.k_layernorm = ReferenceNorm(config.head_dim, config)

    def normed(self, q, k):
        by_head = (states.unflatten(-1, (-1, self.config.head_dim)) for states in (q, k))
        norms = (self.q_layernorm, self.k_layernorm)
        return [norm(heads).transpose(1, 2) for norm, heads in zip(norms, by_head, strict=True)]


def _average_norms(converted):
    for name in "qk":
        weight = converted.pop(f"layers.0.self_attn.{name}_norm.weight")
        head_dim = 64
        converted[f"layers.0.self_attn.{name}_layernorm.weight"] = weight.view(-1, head_dim).mean(dim=0)


class AveragedNorms(AsDeclared):
    """The layer whose q and k are normed head by head, with the averaged weights."""

    attention_class = HeadNorms
    mm2_causal_lm = _application("AveragingForCausalLM", _average_norms)
