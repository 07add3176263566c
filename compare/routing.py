"""Routing: expert sets compared token by token, and which flips BF16 noise explains.

T judged tokens, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.results import RoutingResult

# Two experts trade places when their scores' errors, on either side, add up to the margin.
_NOISE_FACTOR = 4.0
_NOISE_QUANTILE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterNoise:
    """How close the golden's choice was, token by token.

    Args:
        margin: [T], distance of the k-th from the (k+1)-th biased score, in float32.
        noise: [T], what BF16 cost the golden on the scores that compete there.
        widening: [T], factor by which a chained layer's incoming error widens the noise; None if isolated.
    """

    margin: torch.Tensor
    noise: torch.Tensor
    widening: torch.Tensor | None = None

    def is_fragile(self) -> torch.Tensor:
        """Tokens whose experts may flip without a fault: bool [T]."""
        reach = _NOISE_FACTOR * torch.quantile(self.noise.double(), _NOISE_QUANTILE)
        return self.margin.double() <= (reach if self.widening is None else reach * self.widening)


def flipped_tokens(reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Tokens whose expert sets differ: bool [T], of two [T,k] of expert numbers in any order."""
    return (_in_order(reference) != _in_order(target)).any(dim=-1)


def compare_routing(
    reference: torch.Tensor, target: torch.Tensor, router_noise: RouterNoise | None
) -> RoutingResult:
    """Count flips of [T,k] expert numbers, and those that the noise explains; without a floor none is."""
    flipped = flipped_tokens(reference, target)
    explained = torch.zeros_like(flipped)
    if router_noise is not None:
        explained = flipped & router_noise.is_fragile() & ~_repeating_tokens(target)
    unexplained = flipped & ~explained
    margins = router_noise.margin[unexplained] if router_noise else torch.empty(0)
    return RoutingResult(
        num_tokens=reference.shape[0],
        num_flipped=int(flipped.sum()),
        num_explained=int(explained.sum()),
        widest_unexplained_margin=float(margins.max()) if margins.numel() else None,
    )


def align_by_expert(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Weights [T,k] in ascending order of the experts [T,k] they belong to."""
    return weights.gather(-1, experts.long().argsort(dim=-1))


def align_by_size(weights: torch.Tensor) -> torch.Tensor:
    """Weights [T,k] in ascending order, where nobody tells the experts they belong to."""
    return weights.sort(dim=-1).values


def _repeating_tokens(experts: torch.Tensor) -> torch.Tensor:
    """Tokens that name an expert twice, which no noise does: bool [T]."""
    ordered = _in_order(experts)
    return (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)


def _in_order(experts: torch.Tensor) -> torch.Tensor:
    return experts.long().sort(dim=-1).values
