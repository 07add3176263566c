"""Figures that check one layer of a golden, and their limits; `Tally` and `Worst` make checks of many of them.

Distances are relative, in float64, over the real tokens. `real` is always bool [B,S], false on padding.
Shapes: B batch, S sequence, N heads, D head_dim, E experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from minimax_tools.capture.manifest import Check, Outcome
from minimax_tools.errors import list_faults
from minimax_tools.json_codec import finite_or_none
from minimax_tools.model.router import Router
from minimax_tools.model.sites import Site


@dataclass(slots=True, kw_only=True)
class Tally:
    """A check that passes if no item has a fault."""

    name: str
    missing: str  # reason why the check did not run, if no item comes
    count: int = 0
    faults: list[str] = field(default_factory=list)  # faults so far, in words

    def add(self, *faults: str) -> None:
        """Add an item with its faults in words; without faults the item is right."""
        self.count += 1
        self.faults += faults

    def check(self, statement: str) -> Check:
        """Return the check; `statement` says what holds if no item has a fault."""
        if not (self.faults or self.count):
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        found = list_faults(self.faults) if self.faults else f"{statement} ({self.count})"
        return claim(self.name, is_right=not self.faults, found=found)


@dataclass(slots=True, kw_only=True)
class Worst:
    """A check that passes if the worst figure is within its limit; figures are compared relative to their limits."""

    name: str
    missing: str  # reason why the check did not run, if no figure comes
    figure: float | None = None  # worst figure so far; `limit` is its limit, and `where` its place in words
    limit: float | None = None
    where: str = ""

    def add(self, figure: float, limit: float, where: str) -> None:
        """Add a figure; NaN is worse than any number."""
        excess_before = -math.inf
        if self.figure is not None and self.limit is not None:
            excess_before = _excess(self.figure, self.limit)
        if _excess(figure, limit) > excess_before:
            self.figure, self.limit, self.where = figure, limit, where

    def check(self, statement: str) -> Check:
        """Return the check; `statement` says what the figure measures."""
        if self.figure is None or self.limit is None:
            return Check(name=self.name, outcome=Outcome.NOT_CHECKED, found=self.missing)
        found = f"{statement} by at most {self.figure:.2g}, at {self.where}; allowed {self.limit:.2g}"
        check = claim(self.name, is_right=self.figure <= self.limit, found=found)
        return replace(check, figure=finite_or_none(self.figure), limit=self.limit)


def claim(name: str, *, is_right: bool, found: str) -> Check:
    """Return the check of one thing that holds or does not."""
    return Check(name=name, outcome=Outcome.PASSED if is_right else Outcome.FAILED, found=found)


def _excess(figure: float, limit: float) -> float:
    return math.inf if math.isnan(figure) else figure / limit


# Relative distance. transformers' and mm2's float32 layers add in other orders, which gave distances of 2e-7 to 3e-6.
REFERENCE_LIMIT = 1e-5
# Relative error of a float32 angle: half the distance of two floats. Distances grow by it with each position.
ANGLE_STEP = 6e-8
# Relative distance that BF16 alone may cost a site, from the same layer input. At hidden sizes 256 to 3072 it cost
# 0.4 % up to the rotated queries and keys, and 1.9 % at attention's context with 512 positions. Longer prompts cost
# more. Sites after the context may hold nothing but the context.
_BF16_LIMIT_BEFORE_ATTENTION = 0.015
_BF16_LIMIT = 0.04
# Relative change of a site's scale. Noise has no direction, so it scales a site by less than 0.05 %. If one channel
# outweighs all others, the few roundings of that channel scale the site by up to 0.4 %.
SCALE_LIMIT = 0.008
# Relative difference between the scales of two heads of a token. A norm over the whole width scales all heads alike,
# except for BF16 rounding, which medians reduce.
NORM_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.02}
# Biased scores that differ by less than this share of the largest may be chosen either way: float32 rounds them.
_TIE = 2e-6
# Values below this share of the largest one are left out of quotients, which would be mostly noise.
_SMALL = 1e-2


class RouterFaults(NamedTuple):
    """The tokens whose experts do not follow from logits and bias, and the largest error of a router weight."""

    num_wrong_tokens: int
    weight_error: float


def reference_limit(site: Site, largest_position: int) -> float:
    """Return the largest distance allowed between transformers' float32 layer and mm2's own."""
    return REFERENCE_LIMIT + (ANGLE_STEP * largest_position if site.order >= Site.Q_ROPE.order else 0.0)


def bf16_limit(site: Site) -> float:
    """Return the largest distance allowed between a BF16 site and its float32 layer."""
    return _BF16_LIMIT_BEFORE_ATTENTION if site.order < Site.ATTN_CONTEXT.order else _BF16_LIMIT


def scale_error(site: Site, found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> float:
    """Return the relative difference in scale over the real tokens; infinite if a value is not finite."""
    found_values, exact = (_by_token(site, tensor)[real].double().flatten() for tensor in (found, expected))
    if not torch.isfinite(found_values).all():
        return float("inf")
    square = float(exact @ exact)
    # The factor that brings `expected` nearest to `found` is ⟨found, expected⟩ / ⟨expected, expected⟩.
    return abs(float(found_values @ exact) / square - 1) if square else 0.0


def relative_distance(site: Site, found: torch.Tensor, expected: torch.Tensor, real: torch.Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖ over the real tokens; infinite if a value is not finite.

    If all expected values are 0, return ‖found‖.
    """
    found_values, exact = (_by_token(site, tensor)[real].double() for tensor in (found, expected))
    if not torch.isfinite(found_values).all():
        return float("inf")
    norm, distance = float(exact.norm()), float((found_values - exact).norm())
    return distance / norm if norm else distance


def rotated_dims(normed: torch.Tensor, rotated: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Find the dims of a head that the rotary embedding changes, bool [D].

    In BF16, slow dims may stay unchanged at low positions.

    Args:
        normed: Queries or keys before the rotation [B,S,N·D].
        rotated: The same after the rotation [B,N,S,D].
        real: bool [B,S], false on padding.
    """
    width = rotated.shape[-1]
    before = normed.unflatten(-1, (-1, width))[real]
    after = rotated.transpose(1, 2)[real]
    changes: torch.Tensor = (before != after).flatten(0, 1).any(dim=0)
    return changes


def is_rotated_width(changes: torch.Tensor, width: int) -> bool:
    """Decide whether the changed dims [D] fit a rotary width: none lies beyond it, and the fastest pair changed.

    Dims i and i + width/2 are a pair; pair 0 rotates fastest.
    """
    return bool(changes[0] and changes[width // 2]) and not bool(changes[width:].any())


def norm_spread(projected: torch.Tensor, normed: torch.Tensor, real: torch.Tensor, *, head_dim: int) -> float:
    """Measure how differently the norm of q or k scales the heads of a token; 0 for a norm over the whole width.

    A factor is what the norm multiplied a value by. A token's factors are divided by those of the first token, which
    cancels the weights of the norm. The median over a head then is the scale of that head.

    Args:
        projected: Queries or keys before the norm [B,S,N·D].
        normed: The same after the norm [B,S,N·D].
        real: bool [B,S], false on padding.
        head_dim: D.
    """
    before, after = projected[real].double(), normed[real].double()
    if len(before) < 2:
        # The first token has no other to be compared with.
        return 0.0
    is_large = before.abs() > _SMALL * before.abs().amax()
    factors = torch.where(is_large, after / before, torch.nan)
    relative = (factors / factors[:1]).unflatten(-1, (-1, head_dim))
    head_scales = relative.nanmedian(dim=-1).values
    middle_scale = head_scales.nanmedian(dim=-1, keepdim=True).values
    spread = (head_scales / middle_scale - 1).abs()
    return float(spread[spread.isfinite()].max()) if bool(spread.isfinite().any()) else 0.0


def find_router_faults(
    captured: Mapping[Site, torch.Tensor], router: Router, real: torch.Tensor
) -> RouterFaults:
    """Check that experts and weights follow from the router's logits.

    Args:
        captured: Router logits [B,S,E], experts [B,S,k], and router weights [B,S,k] if they were captured.
        router: The layer's router.
        real: bool [B,S], false on padding.
    """
    scores = router.scores(captured[Site.ROUTER_LOGITS][real].double())
    biased = router.biased(scores)
    experts = captured[Site.ROUTER_EXPERTS][real].long()
    worst_chosen = biased.gather(-1, experts).amin(dim=-1)
    best_other = biased.scatter(-1, experts, -torch.inf).amax(dim=-1)
    num_wrong_tokens = int((best_other > worst_chosen + _TIE * biased.abs().amax()).sum())
    if Site.ROUTER_WEIGHTS not in captured:
        return RouterFaults(num_wrong_tokens, 0.0)
    weights = router.shares(scores, experts)
    weight_error = (captured[Site.ROUTER_WEIGHTS][real].double() - weights).abs().max()
    return RouterFaults(num_wrong_tokens, float(weight_error))


def count_nonfinite(site: Site, tensor: torch.Tensor, real: torch.Tensor) -> int:
    """Count NaN and Inf on the real tokens."""
    values = _by_token(site, tensor)[real]
    return int((~torch.isfinite(values)).sum()) if values.is_floating_point() else 0


def _by_token(site: Site, tensor: torch.Tensor) -> torch.Tensor:
    """Return a site's tensor as [B,S,…]; a site with heads is stored as [B,N,S,D]."""
    return tensor.transpose(1, 2).flatten(2) if site.has_heads_dim else tensor
