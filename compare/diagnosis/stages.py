"""Stages: MiniMax-M2's decoder layer in float32, a function for each node; mistakes are variations of them.

B batch, S sequence, H hidden, N heads, K kv heads, D head_dim, E experts, k experts per token, T tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from compare.diagnosis.evaluation import Evaluation, ExpertValue, GraphNode, Stage
from compare.diagnosis.expert_pass import run_experts
from compare.judging.routing import expert_shares
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site

_BLOCK_QUERIES = 256


def normalise(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def split_heads(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B,S,heads·D] to [B,heads,S,D]."""
    heads: torch.Tensor = flat.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def frequencies(rotary_dim: int, theta: float, width: int | None = None) -> torch.Tensor:
    """Angles per position, float32 [rotary_dim/2]; `width` divides the ladder, rotary_dim by default."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / (width or rotary_dim)
    angles: torch.Tensor = theta**-exponents
    return angles


def rotate_halves(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the first dims of [B,heads,S,D] by angles [B,S,R], dim i paired with i + R."""
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    width = 2 * angles.shape[-1]
    first, second = heads[..., :width].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, heads[..., width:]), dim=-1)


def rotation_angles(evaluation: Evaluation) -> torch.Tensor:
    """The layer's own angles, [B,S,rotary_dim/2]."""
    spec = evaluation.spec
    positions = evaluation.scene.position_ids[:, :, None].float()
    return positions * frequencies(spec.rotary_dim, spec.rope_theta)


def attend(
    evaluation: Evaluation,
    *,
    scale: float = 1.0,
    is_tiled: bool = False,
    is_causal: bool = True,
    hides_padding: bool = True,
    window: int | None = None,
    is_low_precision: bool = False,
) -> torch.Tensor:
    """Attention's context at the chosen tokens: [T,N·D].

    Args:
        evaluation: The layer.
        scale: Factor on the scores beside the right one.
        is_tiled: Whether query head j reads kv head j % K.
        is_causal: Whether later keys are hidden.
        hides_padding: Whether padded keys are.
        window: How many of the latest keys a query sees; None for all.
        is_low_precision: Whether scores and softmax are rounded to BF16.
    """
    spec, scene = evaluation.spec, evaluation.scene
    length = scene.attention_mask.shape[1]
    context = torch.empty(len(evaluation.tokens), spec.query_width)
    kv_of_head = torch.arange(spec.num_attention_heads)
    groups = spec.num_attention_heads // spec.num_key_value_heads
    kv_of_head = kv_of_head % spec.num_key_value_heads if is_tiled else kv_of_head // groups
    keys_at = torch.arange(length)
    for places, row, queries_at in _query_blocks(evaluation.tokens, length):
        visible = torch.ones(len(queries_at), length, dtype=torch.bool)
        if is_causal:
            visible &= keys_at <= queries_at[:, None]
        if window is not None:
            visible &= keys_at > queries_at[:, None] - window
        if hides_padding:
            visible &= scene.attention_mask[row].bool()
        blocks = _KeyValues(evaluation, row, kv_of_head)
        scores = blocks.score(queries_at) * (scale * spec.head_dim**-0.5)
        # A finite minimum: a query that sees nothing must not become NaN.
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        shares = scores.bfloat16().softmax(-1).float() if is_low_precision else scores.softmax(-1)
        context[places] = blocks.mix(shares, queries_at)
    return context


class _KeyValues:
    """Keys and values of one prompt; decoded rows see the base's for the rows before, and their own."""

    def __init__(self, evaluation: Evaluation, row: int, kv_of_head: torch.Tensor) -> None:
        head_dim = evaluation.spec.head_dim
        self._queries = evaluation[Site.Q_ROPE][row]
        self._keys = evaluation[Site.K_ROPE][row][kv_of_head]
        self._values = split_heads(evaluation[Site.V_PROJ], head_dim)[row][kv_of_head]
        self._start = evaluation.scene.decode_start
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._start < self._keys.shape[1] and evaluation.base is not evaluation:
            base = evaluation.base
            # What is cached is the golden's; which kv head a query head reads of it is up to the layer.
            self._cached = (
                base[Site.K_ROPE][row][kv_of_head],
                split_heads(base[Site.V_PROJ], head_dim)[row][kv_of_head],
            )

    def score(self, queries_at: torch.Tensor) -> torch.Tensor:
        """[N,R,S]."""
        queries = self._queries[:, queries_at]
        scores = queries @ self._keys.transpose(-1, -2)
        if self._cached is not None:
            decoded = queries_at >= self._start
            own = scores.gather(-1, queries_at[None, :, None].expand(len(scores), -1, 1))
            cached = queries @ self._cached[0].transpose(-1, -2)
            cached = cached.scatter(-1, queries_at[None, :, None].expand(len(scores), -1, 1), own)
            scores = torch.where(decoded[None, :, None], cached, scores)
        return scores

    def mix(self, shares: torch.Tensor, queries_at: torch.Tensor) -> torch.Tensor:
        """[N,R,S] to the context [R,N·D]."""
        context = shares @ self._values
        if self._cached is not None:
            decoded = queries_at >= self._start
            index = queries_at[None, :, None].expand(len(shares), -1, 1)
            own = shares.gather(-1, index)
            cached = shares.scatter(-1, index, 0.0) @ self._cached[1] + own * self._values[:, queries_at]
            context = torch.where(decoded[None, :, None], cached, context)
        return context.transpose(0, 1).flatten(1)


def _query_blocks(tokens: torch.Tensor, length: int) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """The tokens in blocks of one prompt each: places among the tokens, the prompt, and rows within it."""
    blocks = []
    for row in tokens.div(length, rounding_mode="floor").unique().tolist():
        places = ((tokens >= row * length) & (tokens < (row + 1) * length)).nonzero().flatten()
        blocks += [(part, row, tokens[part] - row * length) for part in places.split(_BLOCK_QUERIES)]
    return blocks


def choose_experts(choice: torch.Tensor, k: int) -> torch.Tensor:
    """The k experts of the highest scores [T,E]: int64 [T,k]."""
    return choice.topk(k, dim=-1).indices


def router_scores(evaluation: Evaluation) -> torch.Tensor:
    """The sigmoid of the router's logits, [T,E]."""
    return evaluation[Site.ROUTER_LOGITS].sigmoid()


def correction_bias(evaluation: Evaluation) -> torch.Tensor:
    """[E]."""
    return evaluation.weights.kept_value(weight_names.CORRECTION_BIAS)


def norm_stage(source: Site, weight: str) -> Stage:
    """An RMSNorm of a site."""
    return lambda at: normalise(at[source], at.weights.kept_value(weight), at.spec.rms_norm_eps)


def product_stage(source: Site, weight: str) -> Stage:
    """A projection of a site."""
    return lambda at: at[source] @ at.weights.kept_value(weight).T


def rope_stage(source: Site) -> Stage:
    """The rotation of a normed site's heads."""
    return lambda at: rotate_halves(split_heads(at[source], at.spec.head_dim), rotation_angles(at))


def _attn_residual(at: Evaluation) -> torch.Tensor:
    return at.chosen(at[Site.INPUT]) + at[Site.ATTN_DELTA]


def _router_experts(at: Evaluation) -> torch.Tensor:
    return choose_experts(router_scores(at) + correction_bias(at), at.spec.num_experts_per_tok)


def _router_weights(at: Evaluation) -> torch.Tensor:
    return expert_shares(router_scores(at), at[Site.ROUTER_EXPERTS])


def _expert_outputs(at: Evaluation) -> torch.Tensor:
    return run_experts(at.weights, [at.expert_job()])[0]


def _moe_delta(at: Evaluation) -> torch.Tensor:
    return (at[ExpertValue.EXPERT_OUTPUTS] * at[Site.ROUTER_WEIGHTS][..., None]).sum(1)


STAGES: Mapping[GraphNode, Stage] = MappingProxyType(
    {
        Site.INPUT_NORM: norm_stage(Site.INPUT, weight_names.INPUT_NORM),
        Site.Q_PROJ: product_stage(Site.INPUT_NORM, weight_names.Q_PROJ),
        Site.K_PROJ: product_stage(Site.INPUT_NORM, weight_names.K_PROJ),
        Site.V_PROJ: product_stage(Site.INPUT_NORM, weight_names.V_PROJ),
        Site.Q_NORM: norm_stage(Site.Q_PROJ, weight_names.Q_NORM),
        Site.K_NORM: norm_stage(Site.K_PROJ, weight_names.K_NORM),
        Site.Q_ROPE: rope_stage(Site.Q_NORM),
        Site.K_ROPE: rope_stage(Site.K_NORM),
        Site.ATTN_CONTEXT: attend,
        Site.ATTN_DELTA: product_stage(Site.ATTN_CONTEXT, weight_names.O_PROJ),
        Site.ATTN_RESIDUAL: _attn_residual,
        Site.POST_NORM: norm_stage(Site.ATTN_RESIDUAL, weight_names.POST_NORM),
        Site.ROUTER_LOGITS: product_stage(Site.POST_NORM, weight_names.GATE),
        Site.ROUTER_EXPERTS: _router_experts,
        Site.ROUTER_WEIGHTS: _router_weights,
        ExpertValue.EXPERT_INPUT: lambda at: at[Site.POST_NORM],
        ExpertValue.EXPERT_NUMBERS: lambda at: at[Site.ROUTER_EXPERTS],
        ExpertValue.EXPERT_OUTPUTS: _expert_outputs,
        Site.MOE_DELTA: _moe_delta,
        Site.OUTPUT: lambda at: at[Site.ATTN_RESIDUAL] + at[Site.MOE_DELTA],
    }
)
