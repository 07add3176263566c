"""Stages: a decoder layer in float32 as a graph, with one function for each site.

No code is shared with transformers' layer or with a port.
B batch, S sequence, N heads, K kv heads, D head_dim, E experts, k experts per token, T tokens, Q queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from minimax_tools.model import weight_names
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.router import Router
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import MlpNames, bias_name

# Queries of one prompt whose scores (of all heads) attention holds at a time. It trades memory for speed.
_BLOCK_QUERIES = 256


class LayerValues(Protocol):
    """The sites of one layer, computed or given: what a stage reads.

    Attention reads all tokens of a prompt, so sites before `attn_context` hold all: [B,S,…] or [B,heads,S,D]. Later
    sites hold the chosen `tokens` only: [T,…].
    """

    spec: ModelSpec
    graph: LayerGraph
    attention_mask: torch.Tensor  # 1 on real tokens: int64 [B,S]
    position_ids: torch.Tensor  # int64 [B,S]
    tokens: torch.Tensor  # chosen tokens, as indices into the flattened batch of B·S tokens: int64 [T]
    # First column of S that is decoded, with cached keys and values of `base`; S if none is
    decode_start: int

    @property
    def base(self) -> LayerValues:
        """The layer whose keys and values are in the cache of decoded tokens: the golden's, or this one."""

    def __getitem__(self, site: Site, /) -> torch.Tensor:
        """Return the values of a site, float32 (experts int64)."""

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight by mm2's name relative to the layer, float32."""

    def gain(self, name: str) -> torch.Tensor:
        """Return what a norm multiplies by, float32, by its weight's name."""


Stage = Callable[[LayerValues], torch.Tensor]
# Reads a tensor of a layer by its relative name, float32.
Read = Callable[[Any, str], torch.Tensor]
# Combines gate and up of an MLP.
Combine = Callable[[ModelGraph, torch.Tensor, torch.Tensor], torch.Tensor]


def has_all_tokens(site: object) -> bool:
    """Decide whether a site holds all tokens, because attention still mixes them.

    The diagnosis also asks for its own nodes of the graph, which are no sites: they hold the chosen tokens.
    """
    return isinstance(site, Site) and site.order < Site.ATTN_CONTEXT.order


def choose_tokens(layer: LayerValues, values: torch.Tensor) -> torch.Tensor:
    """Return the values of the chosen tokens, [T,…], out of those of all, [B,S,…]."""
    return values.flatten(0, 1)[layer.tokens]


def normalise(states: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm over the last dim; over each head of it where the gain is of one head."""
    width = gain.shape[-1]
    if width < states.shape[-1]:
        return normalise(states.unflatten(-1, (-1, width)), gain, eps).flatten(-2)
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * gain


def gain_of(graph: ModelGraph, weight: torch.Tensor) -> torch.Tensor:
    """Return what a norm of the graph multiplies by, from its weight."""
    return 1.0 + weight if graph.has_gain_of_one_plus else weight


def split_heads(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reshape [B,S,heads·D] to [B,heads,S,D]."""
    heads: torch.Tensor = flat.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def frequencies(rotary_dim: int, theta: float, width: int | None = None) -> torch.Tensor:
    """Return the angle per position of each pair of the `rotary_dim` rotated dims: float32 [rotary_dim/2].

    `theta` is the base of the frequencies, `width` the divisor of their exponents: `rotary_dim` by default.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / (width or rotary_dim)
    angles: torch.Tensor = theta**-exponents
    return angles


def rotate_halves(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the first dims of [B,heads,S,D] by angles [B,S,F], dim i paired with dim i + F."""
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    width = 2 * angles.shape[-1]
    first, second = heads[..., :width].chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, heads[..., width:]), dim=-1)


def rotation_angles(layer: LayerValues, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rotation angles at positions [B,S], or at the layer's own: [B,S,rotary_dim/2]."""
    positions = layer.position_ids if positions is None else positions
    return positions[:, :, None].float() * frequencies(layer.spec.rotary_dim, layer.spec.rope_theta)


def attend(
    layer: LayerValues,
    *,
    scale: float = 1.0,
    is_tiled: bool = False,
    is_causal: bool = True,
    hides_padding: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    is_low_precision: bool = False,
) -> torch.Tensor:
    """Compute attention's context at the chosen tokens: [T,N·D].

    The defaults are the model's attention; the diagnosis tries mistakes by other values.

    Args:
        layer: The layer's values.
        scale: Additional factor on the scores, after D^-0.5.
        is_tiled: Whether query head j reads kv head j % K instead of j // (N/K).
        is_causal: Whether later keys are hidden.
        hides_padding: Whether padded keys are hidden.
        window: Number of latest keys that a query sees; None for all.
        soft_cap: Scores approach it, and none exceeds it; None for no cap.
        is_low_precision: Whether scores and softmax are rounded to BF16.
    """
    spec = layer.spec
    length = layer.attention_mask.shape[1]
    context = torch.empty(len(layer.tokens), spec.query_width)
    heads = torch.arange(spec.num_attention_heads)
    heads_per_kv = spec.num_attention_heads // spec.num_key_value_heads
    kv_of_head = heads % spec.num_key_value_heads if is_tiled else heads // heads_per_kv
    rows, columns = layer.tokens.div(length, rounding_mode="floor"), layer.tokens % length
    key_columns = torch.arange(length)
    for row in rows.unique().tolist():
        prompt = _PromptAttention(layer, row, kv_of_head)
        for block in (rows == row).nonzero().flatten().split(_BLOCK_QUERIES):
            query_columns = columns[block]
            visible = torch.ones(len(block), length, dtype=torch.bool)
            if is_causal:
                visible &= key_columns <= query_columns[:, None]
            if window is not None:
                visible &= key_columns > query_columns[:, None] - window
            if hides_padding:
                visible &= layer.attention_mask[row].bool()
            scores = prompt.score(query_columns) * (scale * spec.head_dim**-0.5)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            # A finite minimum: a query that sees nothing must not become NaN.
            scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
            shares = scores.bfloat16().softmax(-1).float() if is_low_precision else scores.softmax(-1)
            context[block] = prompt.mix(shares, query_columns)
    return context


class _PromptAttention:
    """Queries, keys and values of one prompt, as each of the N query heads reads them.

    A decoded token sees its own key and value, and the cached ones of all tokens before it.
    """

    def __init__(self, layer: LayerValues, row: int, kv_of_head: torch.Tensor) -> None:
        self._queries = layer[Site.Q_ROPE][row]
        self._keys, self._values = _read_key_values(layer, row, kv_of_head)
        self._start = layer.decode_start
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._start < self._keys.shape[1] and layer.base is not layer:
            # The cache is `base`'s, but the layer decides which kv head a query head reads.
            self._cached = _read_key_values(layer.base, row, kv_of_head)

    def score(self, query_columns: torch.Tensor) -> torch.Tensor:
        """Return the unscaled scores [N,Q,S] of the queries in these columns of S, [Q]."""
        queries = self._queries[:, query_columns]
        scores = queries @ self._keys.transpose(-1, -2)
        if self._cached is None:
            return scores
        # Each query's own column gets the score of its own key, which is not from the cache.
        diagonal = query_columns[None, :, None].expand(len(scores), -1, 1)
        cached = queries @ self._cached[0].transpose(-1, -2)
        cached = cached.scatter(-1, diagonal, scores.gather(-1, diagonal))
        return torch.where((query_columns >= self._start)[None, :, None], cached, scores)

    def mix(self, shares: torch.Tensor, query_columns: torch.Tensor) -> torch.Tensor:
        """Sum the values, weighted by their shares [N,Q,S]: the context [Q,N·D]."""
        context = shares @ self._values
        if self._cached is not None:
            diagonal = query_columns[None, :, None].expand(len(shares), -1, 1)
            # Likewise each query's own value: its share is taken out of the cached sum, and added with that value.
            latest = shares.gather(-1, diagonal) * self._values[:, query_columns]
            cached = shares.scatter(-1, diagonal, 0.0) @ self._cached[1] + latest
            context = torch.where((query_columns >= self._start)[None, :, None], cached, context)
        return context.transpose(0, 1).flatten(1)


def _read_key_values(
    layer: LayerValues, row: int, kv_of_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a prompt as every query head reads them, [N,S,D] each."""
    values = split_heads(layer[Site.V_PROJ][row : row + 1], layer.spec.head_dim)[0]
    return layer[Site.K_ROPE][row][kv_of_head], values[kv_of_head]


def choose_experts(biased_scores: torch.Tensor, k: int) -> torch.Tensor:
    """Choose the k experts of the highest scores [T,E]: int64 [T,k]."""
    return biased_scores.topk(k, dim=-1).indices


def router_of(layer: LayerValues) -> Router:
    """Return the layer's router."""
    has_bias = layer.spec.graph.has_correction_bias
    return Router(spec=layer.spec, bias=correction_bias(layer) if has_bias else None)


def router_scores(layer: LayerValues) -> torch.Tensor:
    """Return the scores that the router makes of its logits, [T,E]."""
    return router_of(layer).scores(layer[Site.ROUTER_LOGITS])


def correction_bias(layer: LayerValues) -> torch.Tensor:
    """Return the correction bias, [E], of a graph that has one."""
    return layer.weight(weight_names.CORRECTION_BIAS)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) ⊙ up."""
    return torch.nn.functional.silu(gate) * up


def activate(graph: ModelGraph, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Combine gate and up to the input of an expert's down projection."""
    if graph.swiglu_alpha is None:
        return swiglu(gate, up)
    return swiglu_oai(gate, up, alpha=graph.swiglu_alpha, limit=graph.swiglu_limit)


def swiglu_oai(
    gate: torch.Tensor, up: torch.Tensor, *, alpha: float, limit: float, added: float = 1.0
) -> torch.Tensor:
    """Combine gate and up by SwiGLU-OAI: both clamped, the gate activated, and `added` added to up."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + added)


def _own_weight(layer: LayerValues, name: str) -> torch.Tensor:
    return layer.weight(name)


def norm_stage(source: Site, weight: str) -> Stage:
    """Build the stage of an RMSNorm: its input site and its weight's name."""
    return lambda layer: normalise(layer[source], layer.gain(weight), layer.spec.rms_norm_eps)


def product_stage(source: Site, weight: str, *, read: Read = _own_weight) -> Stage:
    """Build the stage of a projection: its input site and its weight's name; `read` gives weight and bias."""

    def project(layer: LayerValues) -> torch.Tensor:
        product = layer[source] @ read(layer, weight).T
        bias = bias_name(layer.graph.model, weight)
        return product if bias is None else product + read(layer, bias)

    return project


def mlp_stage(names: MlpNames, combine: Combine = activate) -> Stage:
    """Build the stage of an MLP that every token takes, from its weights' names; `combine` makes one of gate and up."""

    def run(layer: LayerValues) -> torch.Tensor:
        states = layer[Site.POST_NORM]
        gate, up = (states @ layer.weight(name).T for name in (names.gate, names.up))
        return combine(layer.spec.graph, gate, up) @ layer.weight(names.down).T

    return run


def unrotated_heads(layer: LayerValues, rotated: Site) -> torch.Tensor:
    """Return the heads [B,heads,S,D] that RoPE rotates into q_rope or k_rope."""
    return split_heads(layer[layer.spec.graph.unrotated(rotated)], layer.spec.head_dim)


def rope_stage(rotated: Site) -> Stage:
    """Build the stage of RoPE over the heads of a projection, or of its norm where the graph has one."""
    return lambda layer: rotate_halves(unrotated_heads(layer, rotated), rotation_angles(layer))


def _choose(layer: LayerValues) -> torch.Tensor:
    return router_of(layer).choose(router_scores(layer))


# Input and weight of each norm and of each projection.
NORMS: Mapping[Site, tuple[Site, str]] = MappingProxyType(
    {
        Site.INPUT_NORM: (Site.INPUT, weight_names.INPUT_NORM),
        Site.Q_NORM: (Site.Q_PROJ, weight_names.Q_NORM),
        Site.K_NORM: (Site.K_PROJ, weight_names.K_NORM),
        Site.POST_NORM: (Site.ATTN_RESIDUAL, weight_names.POST_NORM),
    }
)
PROJECTIONS: Mapping[Site, tuple[Site, str]] = MappingProxyType(
    {
        Site.Q_PROJ: (Site.INPUT_NORM, weight_names.Q_PROJ),
        Site.K_PROJ: (Site.INPUT_NORM, weight_names.K_PROJ),
        Site.V_PROJ: (Site.INPUT_NORM, weight_names.V_PROJ),
        Site.ATTN_DELTA: (Site.ATTN_CONTEXT, weight_names.O_PROJ),
        Site.ROUTER_LOGITS: (Site.POST_NORM, weight_names.GATE),
    }
)
STAGES: Mapping[Site, Stage] = MappingProxyType(
    {
        **{site: norm_stage(source, weight) for site, (source, weight) in NORMS.items()},
        **{site: product_stage(source, weight) for site, (source, weight) in PROJECTIONS.items()},
        Site.Q_ROPE: rope_stage(Site.Q_ROPE),
        Site.K_ROPE: rope_stage(Site.K_ROPE),
        Site.ATTN_CONTEXT: attend,
        Site.ATTN_RESIDUAL: lambda layer: choose_tokens(layer, layer[Site.INPUT]) + layer[Site.ATTN_DELTA],
        Site.ROUTER_EXPERTS: _choose,
        Site.ROUTER_WEIGHTS: lambda layer: router_of(layer).shares(
            router_scores(layer), layer[Site.ROUTER_EXPERTS]
        ),
        Site.SHARED_DELTA: mlp_stage(weight_names.SHARED_MLP),
        Site.MLP_DELTA: mlp_stage(weight_names.DENSE_MLP),
        Site.OUTPUT: lambda layer: layer[Site.ATTN_RESIDUAL] + layer[layer.graph.last_delta],
    }
)
