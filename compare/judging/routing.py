"""Routing: the experts that both sides chose, token by token, and which flips BF16 noise explains.

A flip is a token for which the port chose other experts than the golden. A right port flips where two scores are closer
than noise: the margin is the distance of the k-th score from the (k+1)-th.
T judged tokens, E experts, k of them per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compare.limits.criteria import Judgement
from compare.limits.limits import LimitContext, NoiseLimits, most_hits
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Flip, RoutingResult, SiteStatus

# Noise may turn a margin round that is up to this many times a score's noise: two scores err, on two sides.
_NOISE_FACTOR = 4.0
# A score's noise is this quantile over the tokens.
_NOISE_QUANTILE = 0.99
# Flips that a result describes.
_MOST_NAMED = 5
# From so many tokens on, a quarter of them is judged although all may have flipped.
_MANY_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterNoise:
    """Margin and noise of the golden's choice, token by token."""

    margin: torch.Tensor  # [T], distance of the k-th from the (k+1)-th biased score, in float32
    noise: torch.Tensor  # [T], BF16 error of the golden's scores that compete for the k-th place
    # [T], factor by which a chained layer's input error widens the noise; None in isolated runs
    widening: torch.Tensor | None = None
    scores: torch.Tensor | None = None  # [T,E], the golden's biased scores; None if the bias is not known

    def is_fragile(self) -> torch.Tensor:
        """Find tokens whose experts may flip without a fault: bool [T]."""
        return self.is_within_reach(self.margin)

    def is_within_reach(self, margin: torch.Tensor) -> torch.Tensor:
        """Find tokens on which noise may turn a margin [T] round: bool [T]."""
        return margin.double() <= self.reach

    @property
    def reach(self) -> torch.Tensor:
        """The largest margin that noise may turn round: float64 [T]."""
        reach = _NOISE_FACTOR * torch.quantile(self.noise.double(), _NOISE_QUANTILE)
        return reach.expand(len(self.noise)) if self.widening is None else reach * self.widening

    def flip_margin(self, reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the margin that noise must overcome to turn one choice [T,k] into the other, [T].

        A new expert may lie further behind than the (k+1)-th score. So the largest distance between a dropped expert
        and a new one counts, if the scores are known.
        """
        if self.scores is None:
            return self.margin
        # Without a flip nothing is dropped or added: the difference is -inf, and the token's own margin stays.
        was_chosen, is_chosen = (_membership(side, self.scores.shape[-1]) for side in (reference, target))
        dropped = self.scores.masked_fill(~was_chosen | is_chosen, -torch.inf).amax(dim=-1)
        added = self.scores.masked_fill(was_chosen | ~is_chosen, torch.inf).amin(dim=-1)
        return torch.maximum(dropped - added, self.margin)


def flipped_tokens(reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Find tokens whose expert sets differ: bool [T], of two [T,k] of expert numbers in any order."""
    return (_in_order(reference) != _in_order(target)).any(dim=-1)


def compare_routing(
    reference: torch.Tensor, target: torch.Tensor, router_noise: RouterNoise | None, *, places: torch.Tensor
) -> RoutingResult:
    """Count flips between experts [T,k] of both sides, and those that noise explains.

    Without a floor there is no `router_noise`, and noise explains none. `places` [T,2] are the tokens' rows and
    positions.
    """
    flipped = flipped_tokens(reference, target)
    explained, margin = torch.zeros_like(flipped), None
    if router_noise is not None:
        margin = router_noise.flip_margin(reference, target)
        explained = (
            flipped & router_noise.is_within_reach(margin) & ~_impossible_tokens(target, router_noise.scores)
        )
    unexplained = (flipped & ~explained).nonzero()[:, 0]
    widest = None
    if margin is not None and len(unexplained):
        unexplained = unexplained[margin[unexplained].argsort(descending=True, stable=True)]
        widest = float(margin[unexplained[0]])
    return RoutingResult(
        num_tokens=reference.shape[0],
        num_flipped=int(flipped.sum()),
        num_explained=int(explained.sum()),
        widest_unexplained_margin=widest,
        worst_flips=tuple(
            _describe_flip(
                reference[token],
                target[token],
                place=places[token],
                margin=None if margin is None else float(margin[token]),
            )
            for token in unexplained[:_MOST_NAMED]
        ),
    )


def count_unflipped(
    num_tokens: int, limits: NoiseLimits, *, input_error: float, context: LimitContext
) -> int:
    """Return how many tokens surely have the golden's experts, for a port that does not show its choice.

    In a deep chain nearly all may have other experts; a quarter of many tokens counts all the same.
    """
    chance = flip_chance(input_error, limits, context=context)
    # `most_hits` is the largest number of flips that chance explains.
    sure = num_tokens - most_hits(num_tokens, chance=chance, share=context.share)
    return max(sure, num_tokens // 4 if num_tokens >= _MANY_TOKENS else 0)


def flip_chance(input_error: float, limits: NoiseLimits, *, context: LimitContext) -> float:
    """Return the chance that a token's experts flip without a fault, for a golden without a noise floor.

    It is the share of flips in right BF16 ports. It grows in proportion to the error of the router's logits, which is
    that of the layer itself and that of its input.
    """
    chance = limits.floorless(Site.ROUTER_EXPERTS, "flipped_share").usual
    bfloat16_error = limits.floorless(Site.ROUTER_LOGITS, "relative_l2").usual
    layer_error = limits.float32 if context.is_float32 else bfloat16_error
    return min(chance * math.hypot(layer_error, input_error) / bfloat16_error, 1.0)


def judge_routing(
    routing: RoutingResult, limits: NoiseLimits, *, has_floor: bool, input_error: float, context: LimitContext
) -> Judgement:
    """Judge expert sets: noise must explain every flip; without a noise floor, flips must be few.

    `input_error` is the relative error of the layer's input, 0 in isolated runs.
    """
    if has_floor and routing.num_unexplained:
        flips = f"{routing.num_unexplained} of {routing.num_tokens} tokens chose other experts beyond noise"
        return SiteStatus.FAIL, f"{flips} (widest margin {routing.widest_unexplained_margin:.3g})"
    if has_floor:
        return SiteStatus.PASS, f"{routing.num_flipped} flips within noise" if routing.num_flipped else ""
    if routing.num_flipped == 0:
        return SiteStatus.PASS, ""
    chance = flip_chance(input_error, limits, context=context)
    most = most_hits(routing.num_tokens, chance=chance, share=context.share)
    flips = f"{routing.num_flipped} of {routing.num_tokens} tokens chose other experts (no noise floor)"
    if routing.num_flipped <= most:
        return SiteStatus.PASS, flips
    return SiteStatus.FAIL, f"{flips}, limit {most}"


def align_by_expert(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Sort weights [T,k] in ascending order of the experts [T,k] they belong to."""
    return weights.gather(-1, experts.long().argsort(dim=-1))


def align_by_size(weights: torch.Tensor) -> torch.Tensor:
    """Sort weights [T,k] by size, for experts that are not known."""
    return weights.sort(dim=-1).values


def _impossible_tokens(experts: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    """Find tokens that name an expert twice, or one that does not exist, which no noise does: bool [T].

    Without `scores` [T,E] the number of experts is unknown, and only a negative number cannot exist.
    """
    ordered = _in_order(experts)
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)
    is_beyond = torch.zeros_like(is_repeated) if scores is None else ordered[:, -1] >= scores.shape[-1]
    return is_repeated | (ordered[:, 0] < 0) | is_beyond


def _membership(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return which experts each token has, bool [T,E], from [T,k]; numbers that are no expert's are left out."""
    valid = (experts >= 0) & (experts < num_experts)
    # Counted, since a port may name one expert twice, and a number that is no expert's adds 0 to expert 0.
    counts = torch.zeros(experts.shape[0], num_experts, dtype=torch.int64)
    return counts.scatter_add_(1, experts.long().where(valid, 0), valid.long()) > 0


def _describe_flip(
    reference: torch.Tensor, target: torch.Tensor, *, place: torch.Tensor, margin: float | None
) -> Flip:
    row, position = place.tolist()
    golden, port = sorted(reference.tolist()), sorted(target.tolist())
    return Flip(
        row=row,
        position=position,
        dropped=tuple(expert for expert in golden if expert not in port),
        chosen=tuple(expert for expert in port if expert not in golden),
        margin=margin,
    )


def _in_order(experts: torch.Tensor) -> torch.Tensor:
    return experts.long().sort(dim=-1).values
