"""The example port with one mistake each, after bugs that real ports had; and changes that are no mistakes.

Every class is a target of its own; all layers have the mistake, and the tests run one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
import port


class Planted(port.DecoderLayer):
    """The port with some of its parts replaced by wrong ones."""

    attention, router, moe_class, norm = port.Attention, port.Router, port.Moe, port.Norm

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = self.attention(config)
        self.moe = self.moe_class(config)
        self.moe.router = self.router(config)
        self.post_attention_layernorm = self.norm(config.hidden_size, config.rms_norm_eps)

    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        self.spoil(state, config)
        return state

    def spoil(self, state, config):
        """Change the converted weights of a layer."""


class SlicedNorm(port.Norm):
    """A norm whose statistics cover one rank's half only."""

    def forward(self, states):
        sliced = states.float().unflatten(-1, (2, -1))
        sliced = sliced * torch.rsqrt(sliced.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * sliced.flatten(-2).to(states.dtype)


class NormPerHeadWeights(Planted):
    """QN1: norm weights averaged over the heads."""

    def spoil(self, state, config):
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            heads = state[name].view(-1, config.head_dim)
            state[name] = heads.mean(0).repeat(heads.shape[0])


class NormByHead(Planted):
    """QN1: each head normed alone, with the norm weights averaged over the heads."""

    class attention(port.Attention):  # noqa: N801 - the name of the part it replaces
        def __init__(self, config):
            super().__init__(config)
            self.q_norm = HeadNorm(self.query_width, config.rms_norm_eps, config.head_dim)
            self.k_norm = HeadNorm(self.key_width, config.rms_norm_eps, config.head_dim)


class HeadNorm(port.Norm):
    """A norm of each head [...,F], by the mean of the heads' weights."""

    def __init__(self, width, eps, head_dim):
        super().__init__(width, eps)
        self.head_dim = head_dim

    def forward(self, states):
        heads = states.float().unflatten(-1, (-1, self.head_dim))
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return self.weigh(normed).flatten(-2).to(states.dtype)

    def weigh(self, heads):
        """Multiply normed heads by the weights."""
        return heads * self.weight.view(-1, self.head_dim).float().mean(0)


class NormPerRank(Planted):
    """QN6: the variance of half the heads, without the sum over ranks."""

    class attention(port.Attention):  # noqa: N801 - the name of the part it replaces
        def __init__(self, config):
            super().__init__(config)
            self.q_norm = SlicedNorm(self.query_width, config.rms_norm_eps)
            self.k_norm = SlicedNorm(self.key_width, config.rms_norm_eps)


class KeyNormDivisor(Planted):
    """QN3: replicated keys counted eight times in the sum, once in the divisor."""

    def spoil(self, state, config):
        state["self_attn.k_norm.weight"] = state["self_attn.k_norm.weight"] * 8**-0.5


class FullRotary(Planted):
    """R1: rotary_dim ignored."""

    class attention(port.Attention):  # noqa: N801
        def frequencies(self, device):
            dims = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=device)
            return 1.0 / self.config.rope_theta ** (dims / self.config.head_dim)


class DefaultTheta(Planted):
    """R5: theta left at 10000."""

    def __init__(self, config, layer_idx):
        config.rope_theta = 10000.0
        super().__init__(config, layer_idx)


class InterleavedRotary(Planted):
    """R4: neighbours paired instead of halves."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            frequencies = self.frequencies(heads.device)
            angles = position_ids[:, None, :, None].float() * frequencies
            cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
            width = 2 * frequencies.shape[0]
            even, odd = heads[..., 0:width:2], heads[..., 1:width:2]
            turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
            return torch.cat((turned, heads[..., width:]), dim=-1)


class TiledKeyValueHeads(Planted):
    """A1: kv heads tiled over the query heads instead of repeated."""

    class attention(port.Attention):  # noqa: N801
        def repeat(self, heads):
            groups = self.config.num_attention_heads // self.config.num_key_value_heads
            return heads.repeat(1, groups, 1, 1)


class SlidingWindow(Planted):
    """A6: a window on a model that has none."""

    class attention(port.Attention):  # noqa: N801
        window = 24

        def attend(self, q, k, v, attention_mask):
            scores = torch.matmul(q.float(), self.repeat(k).float().transpose(-1, -2))
            scores = scores * self.config.head_dim**-0.5
            places = torch.arange(q.shape[2], device=q.device)
            seen = (places <= places[:, None]) & (places > places[:, None] - self.window)
            scores = scores.masked_fill(~(seen & attention_mask[:, None, None, :].bool()), -1e30)
            return torch.matmul(scores.softmax(-1).to(v.dtype), self.repeat(v)).transpose(1, 2).flatten(2)


class AttentionScale(Planted):
    """Scores scaled by another width than head_dim."""

    class attention(port.Attention):  # noqa: N801
        def attend(self, q, k, v, attention_mask):
            return super().attend(q * 0.9, k, v, attention_mask)


class SwappedKeyValue(Planted):
    """A2: the fused rows cut in the wrong order."""

    def spoil(self, state, config):
        sizes = (self.self_attn.query_width, self.self_attn.key_width, self.self_attn.key_width)
        q, k, v = state["self_attn.qkv_proj.weight"].split(sizes)
        state["self_attn.qkv_proj.weight"] = torch.cat((q, v, k))


class QueryWithoutScale(Planted):
    """F1: FP8 values of q_proj used without their scale; q_norm absorbs it."""

    def spoil(self, state, config):
        state["self_attn.qkv_proj.weight"][: self.self_attn.query_width] *= 64.0


class OutputProjectionNeverLoaded(Planted):
    """O1: o_proj left at zero."""

    def spoil(self, state, config):
        state["self_attn.o_proj.weight"] = torch.zeros_like(state["self_attn.o_proj.weight"])


class ResidualFromElsewhere(Planted):
    """RS1: something is added to the residual that was never computed."""

    def forward(self, hidden_states, attention_mask, position_ids):
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(hidden_states.shape, generator=generator).to(hidden_states)
        delta = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        hidden_states = hidden_states + delta + 0.02 * noise
        return hidden_states + self.moe(self.post_attention_layernorm(hidden_states))


class NormMiscompiled(Planted):
    """N3: a slice of the sum of squares counted twice."""

    class norm(port.Norm):  # noqa: N801
        def forward(self, states):
            exact = states.float()
            third = exact.shape[-1] // 3
            squares = exact.pow(2).sum(-1, keepdim=True) + exact[..., third : 2 * third].pow(2).sum(
                -1, keepdim=True
            )
            exact = exact * torch.rsqrt(squares / exact.shape[-1] + self.eps)
            return self.weight * exact.to(states.dtype)


class QuantisedGate(Planted):
    """RT4: the gate quantised, because a skip list spelt it otherwise."""

    def spoil(self, state, config):
        gate = state["moe.router.weight"]
        scale = gate.abs().amax() / 448
        state["moe.router.weight"] = (gate / scale).to(torch.float8_e4m3fn).float() * scale


class RoundedRouter(Planted):
    """Gate and correction bias rounded to BF16, as in a model that was cast to BF16 whole."""

    def spoil(self, state, config):
        for name in ("moe.router.weight", "moe.router.correction_bias"):
            state[name] = state[name].to(torch.bfloat16).to(state[name].dtype)


class SoftmaxRouter(Planted):
    """RT1: softmax instead of sigmoid."""

    class router(port.Router):  # noqa: N801
        def scores(self, logits):
            return logits.softmax(-1)


class NoCorrectionBias(Planted):
    """RB1: the correction bias dropped."""

    class router(port.Router):  # noqa: N801
        def choose(self, scores):
            return scores.topk(self.num_experts_per_tok, dim=-1).indices


class UnlikeliestExperts(Planted):
    """Experts of the lowest scores, computed and weighed as they should be: no token keeps the golden's."""

    class router(port.Router):  # noqa: N801
        def choose(self, scores):
            return scores.topk(self.num_experts_per_tok, dim=-1, largest=False).indices


class Bfloat16CorrectionBias(Planted):
    """RB5: the correction bias held in BF16."""

    class router(port.Router):  # noqa: N801
        def choose(self, scores):
            biased = scores + self.correction_bias.bfloat16().float()
            return biased.topk(self.num_experts_per_tok, dim=-1).indices


class BiasedWeights(Planted):
    """TK1: biased scores weigh the experts."""

    class router(port.Router):  # noqa: N801
        def weigh(self, scores, experts):
            return super().weigh(scores + self.correction_bias, experts)


class WeightsNotNormalised(Planted):
    """TK3: the chosen scores are not divided by their sum."""

    class router(port.Router):  # noqa: N801
        def weigh(self, scores, experts):
            return scores.gather(-1, experts)


class SwappedGateUp(Planted):
    """X1: gate and up swapped."""

    class moe_class(port.Moe):  # noqa: N801
        def activate(self, gate, up):
            return super().activate(up, gate)


class UpPlusOne(Planted):
    """X3: another model's activation."""

    class moe_class(port.Moe):  # noqa: N801
        def activate(self, gate, up):
            return functional.silu(gate) * (up + 1)


class GeluExperts(Planted):
    """X5: GELU instead of SiLU."""

    class moe_class(port.Moe):  # noqa: N801
        def activate(self, gate, up):
            return functional.gelu(gate) * up


class LocalExpertsOnly(Planted):
    """EP1: the experts of the other ranks add nothing."""

    def spoil(self, state, config):
        state["moe.down_proj"][config.num_local_experts // 4 :] = 0


class LaterRowsDiffer(Planted):
    """X7: a kernel whose result depends on the place in the batch."""

    class moe_class(port.Moe):  # noqa: N801
        factor = 1.05

        def forward(self, states):
            delta = super().forward(states)
            delta[1:] = delta[1:] * self.factor
            return delta


class LaterRowsDouble(LaterRowsDiffer):
    """X7, by far: each token is wrong by itself beyond doubt."""

    class moe_class(LaterRowsDiffer.moe_class):  # noqa: N801
        factor = 2


class NanInOneRow(Planted):
    """EP5: a corrupted payload."""

    class moe_class(port.Moe):  # noqa: N801
        def forward(self, states):
            delta = super().forward(states)
            delta[0, 3, 5] = float("nan")
            return delta


class ShiftedPositions(Planted):
    """R7, no mistake in what a layer gives: rotary embedding is relative. Its rotated q and k do differ."""

    sites = {name: path for name, path in port.DecoderLayer.sites.items() if not name.endswith("rope")}

    def forward(self, hidden_states, attention_mask, position_ids):
        return super().forward(hidden_states, attention_mask, position_ids + 3)


class GarbageInPadding(Planted):
    """P3, no mistake: padded rows are nobody's business."""

    class moe_class(port.Moe):  # noqa: N801
        def forward(self, states):
            delta = super().forward(states)
            delta[1, -1] = 1000.0
            return delta


class Bfloat16Weights(Planted):
    """TK5, a tolerance: routing weights rounded to BF16, as other implementations do."""

    class router(port.Router):  # noqa: N801
        def weigh(self, scores, experts):
            return super().weigh(scores, experts).bfloat16().float()


class BlackBox(nn.Module):
    """A mistaken port that shows nothing but its output."""

    mistake: type[Planted]
    sites: dict[str, str] = {}

    def __init__(self, config, layer_idx):
        super().__init__()
        self.inner = self.mistake(config, layer_idx)

    def convert_state_dict(self, tensors, config, layer_idx):
        state = self.inner.convert_state_dict(tensors, config, layer_idx)
        return {f"inner.{name}": tensor for name, tensor in state.items()}

    def forward(self, *inputs):
        return self.inner(*inputs)


class BlackBoxSwappedGateUp(BlackBox):
    """X1, seen from outside."""

    mistake = SwappedGateUp


class BlackBoxTiledKeyValueHeads(BlackBox):
    """A1, seen from outside."""

    mistake = TiledKeyValueHeads


class BlackBoxNoCorrectionBias(BlackBox):
    """RB1, seen from outside."""

    mistake = NoCorrectionBias


class BlackBoxClean(BlackBox):
    """The port as it is, seen from outside."""

    mistake = port.DecoderLayer


class UpClampedAlone(Planted):
    """Another model's clamp, on up alone."""

    class moe_class(port.Moe):  # noqa: N801
        def activate(self, gate, up):
            return super().activate(gate, up.clamp(max=1.0))


class UpClampedOnBothSides(Planted):
    """Another model's clamp of up, on both sides."""

    class moe_class(port.Moe):  # noqa: N801
        def activate(self, gate, up):
            return super().activate(gate, up.clamp(min=-0.7, max=0.7))


class ExchangedExperts(Planted):
    """Two experts under each other's number."""

    def spoil(self, state, config):
        for name in ("moe.gate_up_proj", "moe.down_proj"):
            state[name][[5, 6]] = state[name][[6, 5]]


class KeyNormOfQuery(Planted):
    """The key norm bound to the query norm's weight."""

    def spoil(self, state, config):
        width = state["self_attn.k_norm.weight"].numel()
        state["self_attn.k_norm.weight"] = state["self_attn.q_norm.weight"][:width].clone()


class ContextNotTransposed(Planted):
    """Heads and tokens of the context as attention leaves them."""

    class attention(port.Attention):  # noqa: N801
        def attend(self, q, k, v, attention_mask):
            context = super().attend(q, k, v, attention_mask)
            return context.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2).reshape(context.shape)


class PositionsModuloTwenty(Planted):
    """Positions that begin anew at a number which nobody would list."""

    class attention(port.Attention):  # noqa: N801
        def rotate(self, heads, position_ids):
            return super().rotate(heads, position_ids % 20)


class NoCorrectionBiasAndSwappedGateUp(NoCorrectionBias):
    """RB1 and X1 in one layer: the experts are the wrong ones, and wrong in themselves."""

    class moe_class(port.Moe):  # noqa: N801
        def activate(self, gate, up):
            return super().activate(up, gate)


class NormPerRankAndSwappedGateUp(NormPerRank, SwappedGateUp):
    """QN6 and X1: the experts are behind the attention, and wrong in themselves."""


class NormPerRankAndNoCorrectionBias(NormPerRank, NoCorrectionBias):
    """QN6 and RB1: the router is behind the attention, and wrong in itself."""


class NormPerRankAndFewerExperts(NormPerRank):
    """QN6, and half of the experts of every token."""

    class router(port.Router):  # noqa: N801
        def choose(self, scores):
            return super().choose(scores)[:, : self.num_experts_per_tok // 2]


class InterleavedAndTiled(InterleavedRotary, TiledKeyValueHeads):
    """R4 and A1, one behind the other in the attention."""

    class attention(InterleavedRotary.attention, TiledKeyValueHeads.attention):  # noqa: N801
        pass


class LoudValuesAndNoOutputProjection(OutputProjectionNeverLoaded):
    """Values of sixty times their size, and O1 behind them."""

    class attention(port.Attention):  # noqa: N801
        def __init__(self, config):
            super().__init__(config)
            self.v_proj = _Louder()


class LoudValues(Planted):
    """Values of sixty times their size: what is behind them is rounded sixty times as coarsely."""

    attention = LoudValuesAndNoOutputProjection.attention


class _Louder(nn.Module):
    def forward(self, states):
        return states * 60


class SwappedKeyValueAndOneExpertMissing(SwappedKeyValue):
    """A2, and an expert that adds nothing."""

    def spoil(self, state, config):
        super().spoil(state, config)
        state["moe.down_proj"][5] = 0


class LoudDelta(Planted):
    """A port whose attention adds fifty times too much."""

    def spoil(self, state, config):
        state["self_attn.o_proj.weight"] = state["self_attn.o_proj.weight"] * 50
