"""Figures that check one layer of a golden, and their limits.

Distances are relative, in float64, over the real rows. B batch, S sequence, N heads, D head_dim, E experts,
k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimax_tools.model.sites import Site

# transformers' and mm2's float32 layers add in other orders. Measured: 2e-7 to 3e-6.
REFERENCE_LIMIT = 1e-5
# A float32 angle is exact to 6e-8 of the position.
ANGLE_STEP = 6e-8
# Error of BF16 alone at a site, from the same layer input. Measured at hidden 256 to 3072: 0.4 % up to the rotated
# queries and keys, 1.9 % at attention's context (512 positions). Longer prompts cost more.
# Later sites may hold nothing but that context.
_BF16_LIMIT_BEFORE_ATTENTION = 0.015
_BF16_LIMIT = 0.04
# Noise has no direction: it scales a whole site by less than 0.05 %. One channel may outweigh all others; its few
# roundings then scale the site by 0.4 % at most.
SCALE_LIMIT = 0.008
# A norm over the whole width scales all heads alike, except for BF16 rounding, which medians reduce.
NORM_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.02}
# Scores closer than their float32 rounding may be chosen either way.
_TIE = 2e-6
# Quotients of values below this share of the largest one are noise.
_SMALL = 1e-2


def reference_limit(site: Site, largest_position: int) -> float:
    """Return the largest distance allowed between transformers' float32 layer and mm2's own."""
    return REFERENCE_LIMIT + (ANGLE_STEP * largest_position if site.order >= Site.Q_ROPE.order else 0.0)


def bf16_limit(site: Site) -> float:
    """Return the largest distance allowed between a BF16 site and its float32 layer."""
    return _BF16_LIMIT_BEFORE_ATTENTION if site.order < Site.ATTN_CONTEXT.order else _BF16_LIMIT


def scale_error(site: Site, found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> float:
    """Return the relative difference in scale over the real rows; infinite if a value is not finite."""
    exact, shown = (_rows(site, tensor)[real].double().flatten() for tensor in (expected, found))
    if not torch.isfinite(shown).all():
        return float("inf")
    square = float(exact @ exact)
    return abs(float(shown @ exact) / square - 1) if square else 0.0


def relative_distance(site: Site, found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖ over the real rows; infinite if a value is not finite."""
    exact, shown = (_rows(site, tensor)[real].double() for tensor in (expected, found))
    norm = float(exact.norm())
    distance = float((shown - exact).norm())
    if not torch.isfinite(shown).all():
        return float("inf")
    return distance / norm if norm else distance


def rotated_dims(normed: torch.Tensor, rotated: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Find the dims of a head that the rotary embedding changes, bool [D].

    In BF16, slow dims may stay unchanged at low positions.

    Args:
        normed: Before the rotation [B,S,N·D].
        rotated: After the rotation [B,N,S,D].
        real: Real rows, bool [B,S].
    """
    width = rotated.shape[-1]
    before = normed.unflatten(-1, (-1, width))[real]
    after = rotated.transpose(1, 2)[real]
    changes: torch.Tensor = (before != after).flatten(0, 1).any(dim=0)
    return changes


def is_rotated_width(changes: torch.Tensor, width: int) -> bool:
    """Decide whether the changed dims fit a rotary width: none beyond it, and both of the fastest pair."""
    return bool(changes[0] and changes[width // 2]) and not bool(changes[width:].any())


def norm_spread(projected: torch.Tensor, normed: torch.Tensor, real: torch.Tensor, *, head_dim: int) -> float:
    """Measure how differently the norm of q or k scales the heads of a token; 0 for a norm over the whole width.

    Each token's factors are divided by the first token's, which cancels the norm's weights.

    Args:
        projected: Before the norm [B,S,N·D].
        normed: After the norm [B,S,N·D].
        real: Real rows, bool [B,S].
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
    captured: Mapping[Site, torch.Tensor], bias: torch.Tensor, real: torch.Tensor
) -> tuple[int, float]:
    """Count tokens whose experts do not follow from logits and float32 bias; return the largest weight error too.

    Args:
        captured: Router logits [B,S,E], experts and weights [B,S,k].
        bias: Float32 [E].
        real: Real rows, bool [B,S].
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
    """Count NaN and Inf on the real rows."""
    rows = _rows(site, tensor)[real]
    return int((~torch.isfinite(rows)).sum()) if rows.is_floating_point() else 0


def _rows(site: Site, tensor: torch.Tensor) -> torch.Tensor:
    """Return a site's tensor as rows [B,S,…]."""
    return tensor.transpose(1, 2).flatten(2) if site.has_heads_dim else tensor
