"""Routing: expert sets compared token by token, and which flips BF16 noise explains.

T judged tokens, E experts, k per token.
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
        widening: Factor by which a chained layer's incoming error widens the noise; 1 in isolated runs.
    """

    margin: torch.Tensor
    noise: torch.Tensor
    widening: float = 1.0

    def is_fragile(self) -> torch.Tensor:
        """Tokens whose experts may flip without a fault: bool [T]."""
        typical = torch.quantile(self.noise.double(), _NOISE_QUANTILE)
        return self.margin.double() <= _NOISE_FACTOR * typical * self.widening


def flipped_tokens(reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Tokens whose expert sets differ: bool [T], of two [T,k] of expert numbers in any order."""
    return (reference.long().sort(dim=-1).values != target.long().sort(dim=-1).values).any(dim=-1)


def compare_routing(
    reference: torch.Tensor, target: torch.Tensor, router_noise: RouterNoise | None
) -> RoutingResult:
    """Count flips, and those that the noise explains; without a floor none is."""
    flipped = flipped_tokens(reference, target)
    explained = flipped & router_noise.is_fragile() if router_noise else torch.zeros_like(flipped)
    unexplained = flipped & ~explained
    margins = router_noise.margin[unexplained] if router_noise else torch.empty(0)
    return RoutingResult(
        num_tokens=reference.shape[0],
        num_flipped=int(flipped.sum()),
        num_explained=int(explained.sum()),
        widest_unexplained_margin=float(margins.max()) if margins.numel() else None,
    )


def align_weights(
    reference_experts: torch.Tensor, reference: torch.Tensor, target_experts: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides' weights [T,k] in ascending order of the experts they belong to."""
    return (
        reference.gather(-1, reference_experts.long().argsort(dim=-1)),
        target.gather(-1, target_experts.long().argsort(dim=-1)),
    )
