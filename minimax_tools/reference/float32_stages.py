"""Float32 stages: MiniMax-M2's decoder layer as a graph, one function for each site but what the experts add.

`Float32Layer` evaluates it for a whole layer, the diagnosis for hypotheses that replace some stages. Both run the
experts in their own way: one needs little memory, the other many results at once. No line is shared with transformers'
layer, nor with a port.
B batch, S sequence, H hidden, N heads, K kv heads, D head_dim, E experts, k experts per token, T tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

# Attention holds the scores of so many queries of one prompt, all heads.
_BLOCK_QUERIES = 256


class LayerValues(Protocol):
    """The sites of one layer, computed or given.

    Sites before `attn_context` have all rows, [B,S,…] or [B,heads,S,D]; later ones those of `tokens`, [T,…].
    """

    @property
    def spec(self) -> ModelSpec:
        """The model."""

    @property
    def attention_mask(self) -> torch.Tensor:
        """1 on real tokens: int64 [B,S]."""

    @property
    def position_ids(self) -> torch.Tensor:
        """Positions: int64 [B,S]."""

    @property
    def tokens(self) -> torch.Tensor:
        """Chosen places among all B·S: int64 [T]."""

    @property
    def decode_start(self) -> int:
        """First row that is computed from the cache of `base`; S for none."""

    @property
    def base(self) -> LayerValues:
        """The layer whose keys and values decoded rows find in the cache."""

    def __getitem__(self, site: Site, /) -> torch.Tensor:
        """Return a site's values, float32 (experts int64)."""

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight by the hub's name relative to the layer, float32."""


Stage = Callable[[LayerValues], torch.Tensor]


def has_all_rows(site: object) -> bool:
    """Decide whether a node has all rows of the batch: attention, which mixes rows, still reads it."""
    return isinstance(site, Site) and site.order < Site.ATTN_CONTEXT.order


def choose_rows(at: LayerValues, rows: torch.Tensor) -> torch.Tensor:
    """Pick the chosen tokens of [B,S,F]: [T,F]."""
    return rows.flatten(0, 1)[at.tokens]


def normalise(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm over the last dim."""
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def split_heads(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reshape [B,S,heads·D] to [B,heads,S,D]."""
    heads: torch.Tensor = flat.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def frequencies(rotary_dim: int, theta: float, width: int | None = None) -> torch.Tensor:
    """Return the angle per position of each pair of dims: float32 [rotary_dim/2].

    Args:
        rotary_dim: Number of dims that are rotated.
        theta: Base of the frequencies.
        width: Divisor of the exponents; `rotary_dim` by default.
    """
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


def rotation_angles(at: LayerValues) -> torch.Tensor:
    """Return the layer's rotation angles, [B,S,rotary_dim/2]."""
    return at.position_ids[:, :, None].float() * frequencies(at.spec.rotary_dim, at.spec.rope_theta)


def attend(
    at: LayerValues,
    *,
    scale: float = 1.0,
    is_tiled: bool = False,
    is_causal: bool = True,
    hides_padding: bool = True,
    window: int | None = None,
    is_low_precision: bool = False,
) -> torch.Tensor:
    """Compute attention's context at the chosen tokens: [T,N·D].

    Args:
        at: The layer.
        scale: Factor on the scores beside the right one.
        is_tiled: Whether query head j reads kv head j % K.
        is_causal: Whether later keys are hidden.
        hides_padding: Whether padded keys are hidden.
        window: Number of latest keys that a query sees; None for all.
        is_low_precision: Whether scores and softmax are rounded to BF16.
    """
    spec = at.spec
    length = at.attention_mask.shape[1]
    context = torch.empty(len(at.tokens), spec.query_width)
    kv_of_head = torch.arange(spec.num_attention_heads)
    groups = spec.num_attention_heads // spec.num_key_value_heads
    kv_of_head = kv_of_head % spec.num_key_value_heads if is_tiled else kv_of_head // groups
    keys_at = torch.arange(length)
    for row in at.tokens.div(length, rounding_mode="floor").unique().tolist():
        of_row = ((at.tokens >= row * length) & (at.tokens < (row + 1) * length)).nonzero().flatten()
        prompt = _KeyValues(at, row, kv_of_head)
        for places in of_row.split(_BLOCK_QUERIES):
            queries_at = at.tokens[places] - row * length
            visible = torch.ones(len(queries_at), length, dtype=torch.bool)
            if is_causal:
                visible &= keys_at <= queries_at[:, None]
            if window is not None:
                visible &= keys_at > queries_at[:, None] - window
            if hides_padding:
                visible &= at.attention_mask[row].bool()
            scores = prompt.score(queries_at) * (scale * spec.head_dim**-0.5)
            # A finite minimum: a query that sees nothing must not become NaN.
            scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
            shares = scores.bfloat16().softmax(-1).float() if is_low_precision else scores.softmax(-1)
            context[places] = prompt.mix(shares, queries_at)
    return context


class _KeyValues:
    """Keys and values of one prompt; a decoded row sees the cached ones of the rows before it."""

    def __init__(self, at: LayerValues, row: int, kv_of_head: torch.Tensor) -> None:
        self._queries = at[Site.Q_ROPE][row]
        self._keys, self._values = _read_key_values(at, row, kv_of_head)
        self._start = at.decode_start
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._start < self._keys.shape[1] and at.base is not at:
            # The cache is the golden's; which kv head of it a query head reads is up to the layer.
            self._cached = _read_key_values(at.base, row, kv_of_head)

    def score(self, queries_at: torch.Tensor) -> torch.Tensor:
        """Return the scores of some queries [R], not scaled: [N,R,S]."""
        queries = self._queries[:, queries_at]
        scores = queries @ self._keys.transpose(-1, -2)
        if self._cached is None:
            return scores
        diagonal = queries_at[None, :, None].expand(len(scores), -1, 1)
        cached = queries @ self._cached[0].transpose(-1, -2)
        cached = cached.scatter(-1, diagonal, scores.gather(-1, diagonal))
        return torch.where((queries_at >= self._start)[None, :, None], cached, scores)

    def mix(self, shares: torch.Tensor, queries_at: torch.Tensor) -> torch.Tensor:
        """Sum the values by their shares [N,R,S]: the context, [R,N·D]."""
        context = shares @ self._values
        if self._cached is not None:
            diagonal = queries_at[None, :, None].expand(len(shares), -1, 1)
            latest = shares.gather(-1, diagonal) * self._values[:, queries_at]
            cached = shares.scatter(-1, diagonal, 0.0) @ self._cached[1] + latest
            context = torch.where((queries_at >= self._start)[None, :, None], cached, context)
        return context.transpose(0, 1).flatten(1)


def _read_key_values(
    at: LayerValues, row: int, kv_of_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a prompt as every query head reads them, [N,S,D] each."""
    values = split_heads(at[Site.V_PROJ][row : row + 1], at.spec.head_dim)[0]
    return at[Site.K_ROPE][row][kv_of_head], values[kv_of_head]


def choose_experts(choice: torch.Tensor, k: int) -> torch.Tensor:
    """Choose the k experts of the highest scores [T,E]: int64 [T,k]."""
    return choice.topk(k, dim=-1).indices


def expert_shares(scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Return each expert's [T,k] share by the router's scores [T,E]: [T,k] that sum to one."""
    chosen = scores.gather(-1, experts)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def router_scores(at: LayerValues) -> torch.Tensor:
    """Return the sigmoid of the router's logits, [T,E]."""
    return at[Site.ROUTER_LOGITS].sigmoid()


def correction_bias(at: LayerValues) -> torch.Tensor:
    """Return the correction bias, [E]."""
    return at.weight(weight_names.CORRECTION_BIAS)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Combine gate [n,I] and up [n,I] to the input of the down projection, [n,I]."""
    return torch.nn.functional.silu(gate) * up


def norm_stage(source: Site, weight: str) -> Stage:
    """Build an RMSNorm of a site."""
    return lambda at: normalise(at[source], at.weight(weight), at.spec.rms_norm_eps)


def product_stage(source: Site, weight: str) -> Stage:
    """Build a projection of a site."""
    return lambda at: at[source] @ at.weight(weight).T


def rope_stage(source: Site) -> Stage:
    """Build the rotation of a normed site's heads."""
    return lambda at: rotate_halves(split_heads(at[source], at.spec.head_dim), rotation_angles(at))


def _choose(at: LayerValues) -> torch.Tensor:
    return choose_experts(router_scores(at) + correction_bias(at), at.spec.num_experts_per_tok)


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
        **{site: norm_stage(*its) for site, its in NORMS.items()},
        **{site: product_stage(*its) for site, its in PROJECTIONS.items()},
        Site.Q_ROPE: rope_stage(Site.Q_NORM),
        Site.K_ROPE: rope_stage(Site.K_NORM),
        Site.ATTN_CONTEXT: attend,
        Site.ATTN_RESIDUAL: lambda at: choose_rows(at, at[Site.INPUT]) + at[Site.ATTN_DELTA],
        Site.ROUTER_EXPERTS: _choose,
        Site.ROUTER_WEIGHTS: lambda at: expert_shares(router_scores(at), at[Site.ROUTER_EXPERTS]),
        Site.OUTPUT: lambda at: at[Site.ATTN_RESIDUAL] + at[Site.MOE_DELTA],
    }
)
