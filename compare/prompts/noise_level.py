"""NoiseLevel: the usual noise of golden logits, pooled over all tokens of all prompts.

At a token where no variant happens to flip an expert, a right port may. The pooled noise tells how large that is.
T tokens of a row, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from minimax_tools.golden_logits.golden_logits import GoldenLogits
from minimax_tools.golden_logits.token_logits import divergence
from minimax_tools.reference.plausible_flips import FLIP_SHARES


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLevel:
    """Usual noise of a right port."""

    num_tokens: int  # pooled tokens
    # 95th percentile over tokens of the farthest variant's divergence from the exact model, in nats
    divergence: float
    # Mean over tokens of the variants' largest error in the distance of the two likeliest tokens' logits
    distance: float

    @classmethod
    def of(cls, goldens: Iterable[GoldenLogits]) -> NoiseLevel:
        """Pool the noise of rows; there is at least one."""
        divergences, distances = [], []
        for golden in goldens:
            divergences.append(token_noise(golden))
            first = torch.zeros(golden.num_tokens, dtype=torch.int64)
            distances.append(distance_noise(golden, first, first + min(1, golden.candidates.shape[1] - 1)))
        pooled = torch.cat(divergences)
        return cls(
            num_tokens=len(pooled),
            divergence=float(pooled.quantile(0.95)),
            distance=float(torch.cat(distances).mean()),
        )


def token_noise(golden: GoldenLogits) -> torch.Tensor:
    """Return the farthest variant's divergence from the exact model, in nats, for each token: float64 [T]."""
    return torch.stack([divergence(golden.exact, variant) for variant in golden.variants]).amax(dim=0)


def rounding_noise(golden: GoldenLogits) -> torch.Tensor:
    """Return the same of the variants that make no flips but their own, float64 [T].

    They are samples of right ports: one more right port is farther than all of them at a share of the tokens.
    """
    own = golden.variants[: len(golden.variants) - len(FLIP_SHARES)]
    return torch.stack([divergence(golden.exact, variant) for variant in own]).amax(dim=0)


def logit_distance(logits: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the logit of the candidate in one place [T] minus that in another, of logits [T,K]: float64 [T]."""
    places = torch.stack((one, other), dim=-1)
    higher, lower = logits.double().gather(-1, places).unbind(dim=-1)
    return higher - lower


def distance_noise(golden: GoldenLogits, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the largest error of the variants in such a distance, for each token: float64 [T]."""
    exact = logit_distance(golden.exact.candidates, one, other)
    errors = [logit_distance(variant.candidates, one, other) - exact for variant in golden.variants]
    return torch.stack(errors).abs().amax(dim=0)
