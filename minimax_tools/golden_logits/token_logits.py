"""TokenLogits: next-token logits of a row, at some candidates and in sum at all other tokens.

A vocabulary of 200 064 logits for each token would fill a disk. The divergence over K candidates and one remainder is
never more than that over all tokens, for any two models; what noise makes and what a mistake makes shrink alike.
T tokens of a row, K candidates, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Choice of a token whose logits hold NaN.
NO_CHOICE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLogits:
    """Next-token logits of T tokens; which tokens the candidates are is the owner's to know."""

    candidates: torch.Tensor  # logits of the candidates, float32 [T,K]
    others: (
        torch.Tensor
    )  # logarithm of the summed exponentials of all other logits, float32 [T]; -inf without others
    following: torch.Tensor  # logit of the token that follows in the row, float32 [T]
    choices: torch.Tensor  # the likeliest token, int64 [T]; NO_CHOICE if a logit is NaN

    @classmethod
    def of(cls, logits: torch.Tensor, *, candidates: torch.Tensor, following: torch.Tensor) -> TokenLogits:
        """Take them from all logits [T,V], for the token ids `candidates` [T,K] and `following` [T]."""
        values = logits.float()
        has_nan = values.isnan().any(dim=-1)
        return cls(
            candidates=values.gather(-1, candidates),
            others=values.scatter(-1, candidates, -torch.inf).logsumexp(dim=-1),
            following=values.gather(-1, following[:, None])[:, 0],
            choices=torch.where(has_nan, NO_CHOICE, values.nan_to_num(nan=-torch.inf).argmax(dim=-1)),
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.others)

    def log_probabilities(self) -> torch.Tensor:
        """Return the logarithms of the candidates' probabilities and of the remainder's, float64 [T,K+1]."""
        return torch.cat((self.candidates, self.others[:, None]), dim=-1).double().log_softmax(dim=-1)

    def following_log_probability(self) -> torch.Tensor:
        """Return the logarithm of the following token's probability, float64 [T]."""
        total = torch.cat((self.candidates, self.others[:, None]), dim=-1).double().logsumexp(dim=-1)
        return self.following.double() - total

    def select(self, tokens: torch.Tensor) -> TokenLogits:
        """Return the logits of some tokens, by their indices, int64."""
        return TokenLogits(
            candidates=self.candidates[tokens],
            others=self.others[tokens],
            following=self.following[tokens],
            choices=self.choices[tokens],
        )


def join_tokens(parts: list[TokenLogits]) -> TokenLogits:
    """Join the logits of consecutive tokens."""
    return TokenLogits(
        candidates=torch.cat([part.candidates for part in parts]),
        others=torch.cat([part.others for part in parts]),
        following=torch.cat([part.following for part in parts]),
        choices=torch.cat([part.choices for part in parts]),
    )


def pick_tokens(models: Sequence[TokenLogits], choice: torch.Tensor) -> TokenLogits:
    """Take the logits of each token from one of several models, by its index, int64 [T]."""
    tokens = torch.arange(len(choice))

    def pick(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts)[choice, tokens]

    return TokenLogits(
        candidates=pick([model.candidates for model in models]),
        others=pick([model.others for model in models]),
        following=pick([model.following for model in models]),
        choices=pick([model.choices for model in models]),
    )


def divergence(reference: TokenLogits, target: TokenLogits) -> torch.Tensor:
    """Return KL(reference ‖ target) in nats for each token, float64 [T]; NaN or infinite where the target is."""
    log_reference, log_target = reference.log_probabilities(), target.log_probabilities()
    terms = log_reference.exp() * (log_reference - log_target)
    # A remainder without tokens has no probability on either side.
    terms = torch.where(log_reference == -torch.inf, 0.0, terms)
    return terms.sum(dim=-1).clamp(min=0.0)
