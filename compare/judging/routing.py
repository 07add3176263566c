"""Routing: expert sets compared token by token, and which flips BF16 noise explains.

T judged tokens, E experts, k of them per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.results.choices import Flip, RoutingResult

# Two experts trade places when their scores' errors, on either side, add up to the margin.
_NOISE_FACTOR = 4.0
_NOISE_QUANTILE = 0.99
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterNoise:
    """Closeness of the golden's choice, token by token.

    Args:
        margin: [T], distance of the k-th from the (k+1)-th biased score, in float32.
        noise: [T], what BF16 cost the golden on the scores that compete there.
        widening: [T], factor by which a chained layer's input error widens the noise; None if isolated.
        scores: [T,E], the golden's biased scores; None where the bias is not known.
    """

    margin: torch.Tensor
    noise: torch.Tensor
    widening: torch.Tensor | None = None
    scores: torch.Tensor | None = None

    def is_fragile(self) -> torch.Tensor:
        """Find tokens whose experts may flip without a fault: bool [T]."""
        return self.is_within_reach(self.margin)

    def is_within_reach(self, margin: torch.Tensor) -> torch.Tensor:
        """Find tokens on which noise may turn a margin [T] round: bool [T]."""
        return margin.double() <= self.reach

    @property
    def reach(self) -> torch.Tensor:
        """The widest margin that noise may turn round: float64 [T]."""
        reach = _NOISE_FACTOR * torch.quantile(self.noise.double(), _NOISE_QUANTILE)
        return reach.expand(len(self.noise)) if self.widening is None else reach * self.widening

    def flip_margin(self, reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the margin that noise must overcome to turn one choice [T,k] into the other, [T].

        The expert that was chosen instead may lie further behind than the (k+1)-th score. So where the scores are
        known, the widest distance between a dropped expert and a new one counts.
        """
        if self.scores is None:
            return self.margin
        was_chosen, is_chosen = (_membership(side, self.scores.shape[-1]) for side in (reference, target))
        dropped = self.scores.masked_fill(~was_chosen | is_chosen, -torch.inf).amax(dim=-1)
        added = self.scores.masked_fill(was_chosen | ~is_chosen, torch.inf).amin(dim=-1)
        return torch.maximum(dropped - added, self.margin)


def flipped_tokens(reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Find tokens whose expert sets differ: bool [T], of two [T,k] of expert numbers in any order."""
    return (_in_order(reference) != _in_order(target)).any(dim=-1)


def compare_routing(
    reference: torch.Tensor,
    target: torch.Tensor,
    router_noise: RouterNoise | None,
    *,
    places: torch.Tensor,
) -> RoutingResult:
    """Count flips of [T,k] expert numbers, and those that the noise explains; without a floor none is.

    Args:
        reference: The golden's experts.
        target: The port's.
        router_noise: How close the golden's choice was; None without a floor.
        places: [T,2], row and position of each token.
    """
    flipped = flipped_tokens(reference, target)
    explained, margin = torch.zeros_like(flipped), None
    if router_noise is not None:
        margin = router_noise.flip_margin(reference, target)
        explained = flipped & router_noise.is_within_reach(margin) & ~_repeating_tokens(target)
    unexplained = (flipped & ~explained).nonzero()[:, 0]
    if margin is not None:
        unexplained = unexplained[margin[unexplained].argsort(descending=True, stable=True)]
    return RoutingResult(
        num_tokens=reference.shape[0],
        num_flipped=int(flipped.sum()),
        num_explained=int(explained.sum()),
        widest_unexplained_margin=float(margin[unexplained[0]])
        if margin is not None and len(unexplained)
        else None,
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


def align_by_expert(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Sort weights [T,k] in ascending order of the experts [T,k] they belong to."""
    return weights.gather(-1, experts.long().argsort(dim=-1))


def align_by_size(weights: torch.Tensor) -> torch.Tensor:
    """Sort weights [T,k] by size, where their experts are not known."""
    return weights.sort(dim=-1).values


def _repeating_tokens(experts: torch.Tensor) -> torch.Tensor:
    """Find tokens that name an expert twice, which no noise does: bool [T]."""
    ordered = _in_order(experts)
    return (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)


def _membership(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Mark the experts of each token, bool [T,E], of [T,k]; numbers that are no expert's are left out."""
    valid = (experts >= 0) & (experts < num_experts)
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
