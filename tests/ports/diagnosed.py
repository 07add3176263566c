"""The example ports with mistakes that are faint, in pairs, in sums, in a few tokens, or in decoded rows alone."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
import cached_port
import minimal_port
import planted
import port


class RoundedNorm(port.Norm):
    """A norm whose squares and mean are BF16."""

    def forward(self, states):
        return self.weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps))


class LowPrecisionNorm(planted.Planted):
    """QN10: squares and mean of the q/k norms in BF16."""

    class attention(port.Attention):  # noqa: N801 - the name of the part it replaces
        def __init__(self, config):
            super().__init__(config)
            self.q_norm = RoundedNorm(self.query_width, config.rms_norm_eps)
            self.k_norm = RoundedNorm(self.key_width, config.rms_norm_eps)


class OwnNorm(planted.HeadNorm):
    """A norm of each head alone, with the weights of that head."""

    def weigh(self, heads):
        return self.weight.view(-1, self.head_dim) * heads.to(self.weight.dtype)


class EachHeadNormedAlone(planted.Planted):
    """QN1: the q/k norms behind the split into heads, on one rank."""

    class attention(port.Attention):  # noqa: N801
        def __init__(self, config):
            super().__init__(config)
            self.q_norm = OwnNorm(self.query_width, config.rms_norm_eps, config.head_dim)
            self.k_norm = OwnNorm(self.key_width, config.rms_norm_eps, config.head_dim)


class LowPrecisionSoftmax(planted.Planted):
    """Scores and softmax in BF16."""

    class attention(port.Attention):  # noqa: N801
        def attend(self, q, k, v, attention_mask):
            scores = torch.matmul(q, self.repeat(k).transpose(-1, -2)) * self.config.head_dim**-0.5
            places = torch.arange(q.shape[2], device=q.device)
            visible = (places <= places[:, None]) & attention_mask[:, None, None, :].bool()
            scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
            return torch.matmul(scores.softmax(-1), self.repeat(v)).transpose(1, 2).flatten(2)


class LowPrecisionGate(planted.Planted):
    """RT3: the gate's product in BF16."""

    class router(port.Router):  # noqa: N801
        def logits(self, states):
            return (states.bfloat16() @ self.weight.bfloat16().T).float()


class RoundedGate(planted.Planted):
    """The gate's weight rounded to BF16 by the loader, and multiplied in float32."""

    def spoil(self, state, config):
        state["moe.router.weight"] = state["moe.router.weight"].bfloat16().float()


class LowPrecisionSum(planted.Planted):
    """X6: the sum over experts rounded after each of them."""

    class moe_class(port.Moe):  # noqa: N801
        slab = 1

        def forward(self, states):
            tokens = states.flatten(0, 1)
            _, weights, experts = self.router(tokens)
            total = torch.zeros_like(tokens)
            for number in range(self.down_proj.shape[0]):
                gate, up = torch.matmul(tokens, self.gate_up_proj[number].T).chunk(2, dim=-1)
                output = torch.matmul(self.activate(gate, up), self.down_proj[number].T)
                share = torch.where(experts == number, weights, 0.0).sum(-1, keepdim=True)
                total = (total.float() + output.float() * share).to(total.dtype)
            return total.unflatten(0, states.shape[:2])


def in_fp8(states):
    """Round states [...,C] to FP8 (e4m3), with a scale for every 128 channels."""
    groups = states.float().unflatten(-1, (-1, min(128, states.shape[-1])))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448.0
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(states.dtype)


class BlackBoxOfFp8Activations(planted.BlackBox):
    """The experts' products read activations in FP8; seen from outside."""

    class mistake(planted.Planted):  # noqa: N801
        class moe_class(port.Moe):  # noqa: N801
            def forward(self, states):
                _, weights, experts = self.router(states.flatten(0, 1))
                self.router.forward, own = lambda _: (None, weights, experts), self.router.forward
                output = super().forward(in_fp8(states))
                self.router.forward = own
                return output

            def activate(self, gate, up):
                return in_fp8(super().activate(gate, up))


class BlackBoxPair(planted.BlackBox):
    """QN6 and X1 together, seen from outside."""

    mistake = planted.NormPerRankAndSwappedGateUp


class AttentionSeesNext(port.Attention):
    """The token before each eighth sees that one, which comes later."""

    def attend(self, q, k, v, attention_mask):
        scores = torch.matmul(q.float(), self.repeat(k).float().transpose(-1, -2))
        places = torch.arange(q.shape[2], device=q.device)
        visible = places <= places[:, None] + (places % 8 == 0).long()
        visible = visible & attention_mask[:, None, None, :].bool()
        scores = scores * self.config.head_dim**-0.5
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        return torch.matmul(scores.softmax(-1).to(v.dtype), self.repeat(v)).transpose(1, 2).flatten(2)


class SeesNext(planted.Planted):
    """A mistake in a few tokens."""

    attention = AttentionSeesNext


class UpByExpert(planted.Planted):
    """Up projections that are off by a factor for each expert."""

    def spoil(self, state, config):
        factors = 0.8 + 0.4 * (torch.arange(config.num_local_experts) % 5) / 4
        gate, up = state["moe.gate_up_proj"].chunk(2, dim=1)
        state["moe.gate_up_proj"] = torch.cat(
            (gate, (up.float() * factors[:, None, None]).to(up.dtype)), dim=1
        )


class KeysAndTheta(planted.DefaultTheta):
    """A2 and R5 together: two mistakes of attention."""

    def convert_state_dict(self, tensors, config, layer_idx):
        tensors = tensors.copy()
        keys, values = "self_attn.k_proj.weight", "self_attn.v_proj.weight"
        tensors[keys], tensors[values] = tensors[values], tensors[keys]
        return super().convert_state_dict(tensors, config, layer_idx)


class BlackBoxOfRandomRows(planted.BlackBox):
    """O2, which nobody can name: o_proj holds random numbers; seen from outside."""

    class mistake(planted.Planted):  # noqa: N801
        def spoil(self, state, config):
            weight = state["self_attn.o_proj.weight"]
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            state["self_attn.o_proj.weight"] = (noise * weight.float().std()).to(weight.dtype)


class BlackBoxOfSmallExperts(planted.BlackBox):
    """A black box whose experts add 3 % too little, which the noise nearly covers."""

    class mistake(planted.Planted):  # noqa: N801
        class moe_class(port.Moe):  # noqa: N801
            def forward(self, states):
                return super().forward(states) * 0.97


class BlackBoxOfNan(planted.BlackBox):
    """EP5 throughout: nothing of the output is a number."""

    class mistake(planted.Planted):  # noqa: N801
        class moe_class(port.Moe):  # noqa: N801
            def forward(self, states):
                return torch.full_like(states, float("nan"))


class SwappedWhereDecoded(cached_port.DecoderLayer):
    """X1, where rows are decoded alone."""

    def forward(self, hidden_states, attention_mask, position_ids, past_key_value=None):
        own = self.moe.activate
        if past_key_value is not None:
            self.moe.activate = lambda gate, up: functional.silu(up) * gate
        try:
            return super().forward(hidden_states, attention_mask, position_ids, past_key_value)
        finally:
            self.moe.activate = own


class ResidualLost(planted.Planted):
    """The second residual add is missing."""

    def forward(self, hidden_states, attention_mask, position_ids):
        delta = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        return self.moe(self.post_attention_layernorm(hidden_states + delta))


class InputLost(planted.Planted):
    """The first residual add is missing."""

    def forward(self, hidden_states, attention_mask, position_ids):
        hidden_states = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        return hidden_states + self.moe(self.post_attention_layernorm(hidden_states))


class CopyShown(planted.GeluExperts):
    """GELU instead of SiLU, and a site that shows a copy of what the experts add."""

    sites = {**planted.Planted.sites, "moe_delta": "shown"}

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.shown = nn.Identity()

    def forward(self, hidden_states, attention_mask, position_ids):
        delta = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        hidden_states = hidden_states + delta
        experts = self.moe(self.post_attention_layernorm(hidden_states))
        self.shown(experts)
        return hidden_states + experts


class _SwappedExpert(minimal_port.Expert):
    def forward(self, states):
        return self.w2(functional.silu(self.w3(states)) * self.w1(states))


class Unconverted(minimal_port.DecoderLayer):
    """Gate and up swapped, under the hub's own names."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        for expert in self.block_sparse_moe.experts:
            expert.__class__ = _SwappedExpert


class BlackBoxWithoutResidual(planted.BlackBox):
    """The layer's input is not added to what attention gives; seen from outside."""

    mistake = InputLost


class ScaledKeys(cached_port.DecoderLayer):
    """Keys are normed to half more than they should be, in a port that decodes."""

    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        return {**state, "self_attn.k_norm.weight": state["self_attn.k_norm.weight"] * 1.5}


class ScaledKeysAndDecodedScores(ScaledKeys):
    """A port with scaled keys, whose decoded tokens also scale their scores by another width than head_dim."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        attend = self.self_attn.attend

        def attend_wrongly(q, k, v, attention_mask):
            decodes = k.shape[2] > q.shape[2]
            return attend(q * 0.5 if decodes else q, k, v, attention_mask)

        self.self_attn.attend = attend_wrongly
