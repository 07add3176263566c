"""The checks of a golden's layer, each on the tensors that it stored and, where it takes one, on the model.

Figures are relative distances over the real rows, in float64. B batch, S sequence, N heads, D head_dim, k experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec

# transformers' float32 layer and mm2's own add in other orders: 2e-7 to 3e-6 were measured.
REFERENCE_LIMIT = 1e-5
# Angles are float32: each is exact to 6e-8 of the position, whichever way it is computed.
ANGLE_STEP = 6e-8
# What BF16 alone costs a site of one layer, fed the same input. Up to the rotated queries and keys 0.4 % were measured,
# at hidden 256 to 3072 alike; attention's context costs up to 1.9 % (512 positions, scores rounded too) and more the
# longer a prompt is, and what comes after it may be nothing else.
_BF16_LIMIT_BEFORE_ATTENTION = 0.015
_BF16_LIMIT = 0.04
# Noise has no direction: how much larger or smaller all of a site is stays below 0.05 %. One channel may outweigh all
# others, and its few roundings cost 0.4 % at most.
SCALE_LIMIT = 0.008
# One statistic over the whole width scales all heads alike, but for the rounding to BF16, of which medians are taken.
NORM_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.02}
# A choice may differ where scores differ less than their float32 rounding.
_TIE = 2e-6
# Below this part of a tensor's largest number a quotient says nothing.
_SMALL = 1e-2


def reference_limit(site: Site, largest_position: int) -> float:
    """Up to where transformers' float32 layer and mm2's own agree at a site."""
    return REFERENCE_LIMIT + (ANGLE_STEP * largest_position if site.order >= Site.Q_ROPE.order else 0.0)


def bf16_limit(site: Site) -> float:
    """How far what BF16 gives at a site may be from its float32 layer."""
    return _BF16_LIMIT_BEFORE_ATTENTION if site.order < Site.ATTN_CONTEXT.order else _BF16_LIMIT


def scale_error(site: Site, found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> float:
    """By how much of itself `found` is larger or smaller than `expected` over the real rows; infinite if not finite."""
    exact, shown = (_rows(site, tensor)[real].double().flatten() for tensor in (expected, found))
    if not torch.isfinite(shown).all():
        return float("inf")
    square = float(exact @ exact)
    return abs(float(shown @ exact) / square - 1) if square else 0.0


def relative_distance(site: Site, found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ over the real rows; infinite where something is not finite."""
    exact, shown = (_rows(site, tensor)[real].double() for tensor in (expected, found))
    norm = float(exact.norm())
    distance = float((shown - exact).norm())
    if not torch.isfinite(shown).all():
        return float("inf")
    return distance / norm if norm else distance


def rotated_dims(normed: torch.Tensor, rotated: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Which dims of a head change by the rotary embedding, bool [D].

    In BF16 the slow ones need not, where positions are low.

    Args:
        normed: [B,S,heads·D], before.
        rotated: [B,heads,S,D], after.
        real: bool [B,S].
    """
    width = rotated.shape[-1]
    before = normed.unflatten(-1, (-1, width))[real]
    after = rotated.transpose(1, 2)[real]
    changes: torch.Tensor = (before != after).flatten(0, 1).any(dim=0)
    return changes


def is_rotated_width(changes: torch.Tensor, width: int) -> bool:
    """Whether dims that change may be the first `width`: no other does, and of the fastest pair both do."""
    return bool(changes[0] and changes[width // 2]) and not bool(changes[width:].any())


def norm_spread(projected: torch.Tensor, normed: torch.Tensor, real: torch.Tensor, *, head_dim: int) -> float:
    """How differently the heads of a token were scaled by the norm of q or k, weights aside; 0 over the whole width.

    A token's factor, over that of the first token, is one number where the sum of squares covers all heads.

    Args:
        projected: [B,S,heads·D], before the norm.
        normed: The same after it.
        real: bool [B,S].
        head_dim: D.
    """
    before, after = projected[real].double(), normed[real].double()
    if len(before) < 2:
        return 0.0
    is_large = before.abs() > _SMALL * before.abs().amax()
    factors = torch.where(is_large, after / before, torch.nan)
    relative = (factors / factors[:1]).unflatten(-1, (-1, head_dim))
    of_heads = relative.nanmedian(dim=-1).values
    middle = of_heads.nanmedian(dim=-1, keepdim=True).values
    spread = (of_heads / middle - 1).abs()
    return float(spread[spread.isfinite()].max()) if bool(spread.isfinite().any()) else 0.0


def router_faults(
    captured: Mapping[Site, torch.Tensor], bias: torch.Tensor, real: torch.Tensor, spec: ModelSpec
) -> tuple[int, float]:
    """Tokens whose experts do not follow from their logits and the float32 bias, and the largest error of a weight.

    Args:
        captured: Router logits [B,S,E], experts and weights [B,S,k].
        bias: Float32 [E].
        real: bool [B,S].
        spec: The model.
    """
    scores = captured[Site.ROUTER_LOGITS][real].double().sigmoid()
    biased = scores + bias.double()
    experts = captured[Site.ROUTER_EXPERTS][real].long()
    worst_kept = biased.gather(-1, experts).amin(dim=-1)
    others = biased.scatter(-1, experts, -torch.inf)
    wrong = others.amax(dim=-1) > worst_kept + _TIE * biased.abs().amax()
    if Site.ROUTER_WEIGHTS not in captured:
        return int(wrong.sum()), 0.0
    chosen = scores.gather(-1, experts)
    weights = chosen / chosen.sum(-1, keepdim=True)
    error = (captured[Site.ROUTER_WEIGHTS][real].double() - weights).abs().max()
    return int(wrong.sum()), float(error)


def num_nonfinite(site: Site, tensor: torch.Tensor, real: torch.Tensor) -> int:
    """How many numbers on real rows are NaN or Inf."""
    rows = _rows(site, tensor)[real]
    return int((~torch.isfinite(rows)).sum()) if rows.is_floating_point() else 0


def _rows(site: Site, tensor: torch.Tensor) -> torch.Tensor:
    """[B,S,…] of a site."""
    return tensor.transpose(1, 2).flatten(2) if site.has_heads_dim else tensor
