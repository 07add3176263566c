"""GoldenLogits: the exact next-token logits of a row, and those of right models that round.

The exact model computes in float32. The variants round wherever a correct BF16 implementation may, through all layers:
their distance from the exact model is the noise of a right port, token by token.

Noise rarely sends a token to another expert, and what such a flip changes may be far larger than noise. So a port need
not be near the exact model: at each token it may be near one of the alternatives, right models that flip elsewhere.
T tokens of a row, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from minimax_tools.golden_logits.token_logits import TokenLogits, divergence, pick_tokens
from minimax_tools.reference.plausible_flips import FLIP_SHARES
from minimax_tools.reference.rounding import RoundingKind

# Computed copies: the exact model, then the variants, the last ones with plausible flips.
KINDS = (RoundingKind.EXACT, RoundingKind.NEAREST, *(RoundingKind.RANDOM,) * (1 + len(FLIP_SHARES)))
# Copies that find alternatives: three that show how far noise reaches, then the alternatives themselves, each by the
# share of the plausible flips that each makes. A right port makes few of them, and any few.
ALTERNATIVE_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2) * 12
ALTERNATIVE_KINDS = (
    RoundingKind.EXACT,
    RoundingKind.NEAREST,
    *(RoundingKind.RANDOM,) * (1 + len(ALTERNATIVE_SHARES)),
)
# Most candidates of a token: the exact model's likeliest.
MOST_CANDIDATES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenLogits:
    """The golden's next-token logits of one row."""

    input_ids: torch.Tensor  # the row, int64 [T]
    candidates: torch.Tensor  # token ids of the exact model's likeliest tokens, the first first, int64 [T,K]
    exact: TokenLogits
    variants: tuple[TokenLogits, ...]  # one for each of KINDS but the first
    alternatives: tuple[TokenLogits, ...] = ()  # of further right models

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.input_ids)

    @property
    def row(self) -> tuple[int, ...]:
        """The row's token ids."""
        return tuple(self.input_ids.tolist())

    def measure(self, logits: torch.Tensor, tokens: torch.Tensor) -> TokenLogits:
        """Take the logits [t,V] of another model for some tokens of the row, int64 [t], at the same candidates."""
        following = following_tokens(self.input_ids)
        return TokenLogits.of(logits, candidates=self.candidates[tokens], following=following[tokens])

    def with_alternatives(self, *alternatives: TokenLogits) -> GoldenLogits:
        """Return these logits with those of further right models added."""
        return replace(self, alternatives=(*self.alternatives, *alternatives))

    def nearest(self, port: TokenLogits) -> TokenLogits:
        """Return for each token the exact logits or those of an alternative: those that a port's diverge least from."""
        models = (self.exact, *self.alternatives)
        divergences = torch.stack([divergence(model, port) for model in models])
        # NaN is as far from every model.
        return pick_tokens(models, divergences.nan_to_num(nan=torch.inf).argmin(dim=0))

    def select(self, tokens: torch.Tensor) -> GoldenLogits:
        """Return the logits of some tokens, by their indices, int64."""
        return GoldenLogits(
            input_ids=self.input_ids[tokens],
            candidates=self.candidates[tokens],
            exact=self.exact.select(tokens),
            variants=tuple(variant.select(tokens) for variant in self.variants),
            alternatives=tuple(alternative.select(tokens) for alternative in self.alternatives),
        )


def following_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """Return the token that follows each one of a row [T]; after the last one, that itself."""
    return torch.cat((input_ids[1:], input_ids[-1:]))
