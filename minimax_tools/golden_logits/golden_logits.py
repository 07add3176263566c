"""GoldenLogits: the exact next-token logits of a row, and those of right models that round.

The exact model computes in float32. The variants round wherever a correct BF16 implementation may, through all layers:
their distance from the exact model is the noise of a right port, token by token.
T tokens of a row, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.golden_logits.token_logits import TokenLogits
from minimax_tools.reference.plausible_flips import NUM_FLIPPING
from minimax_tools.reference.rounding import RoundingKind

# Computed copies: the exact model, then the variants, the last ones with plausible flips.
KINDS = (RoundingKind.EXACT, RoundingKind.NEAREST, *(RoundingKind.RANDOM,) * (1 + NUM_FLIPPING))
# Most candidates of a token: the exact model's likeliest.
MOST_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenLogits:
    """The golden's next-token logits of one row."""

    input_ids: torch.Tensor  # the row, int64 [T]
    candidates: torch.Tensor  # token ids of the exact model's likeliest tokens, the first first, int64 [T,K]
    exact: TokenLogits
    variants: tuple[TokenLogits, ...]  # one for each of KINDS but the first

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.input_ids)

    def measure(self, logits: torch.Tensor, tokens: torch.Tensor) -> TokenLogits:
        """Take the logits [t,V] of another model for some tokens of the row, int64 [t], at the same candidates."""
        following = following_tokens(self.input_ids)
        return TokenLogits.of(logits, candidates=self.candidates[tokens], following=following[tokens])

    def select(self, tokens: torch.Tensor) -> GoldenLogits:
        """Return the logits of some tokens, by their indices, int64."""
        return GoldenLogits(
            input_ids=self.input_ids[tokens],
            candidates=self.candidates[tokens],
            exact=self.exact.select(tokens),
            variants=tuple(variant.select(tokens) for variant in self.variants),
        )


def following_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """Return the token that follows each one of a row [T]; after the last one, that itself."""
    return torch.cat((input_ids[1:], input_ids[-1:]))
