"""GoldenLogits: the exact next-token logits of a row, and those of right models that round.

The exact model computes in float32. The variants round wherever a correct BF16 implementation may: their distance from
it is the noise of a right port, token by token. Noise rarely sends a token to another expert, and such a flip may
change far more than noise. So a port may also be near one of the alternatives, right models that flip elsewhere.

Logits are kept at some candidates, and in sum at all other tokens: the divergence over these is never more than that
over the vocabulary, and what noise makes and what a mistake makes shrink alike. T tokens of a row, K candidates, V the
vocabulary, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.reference.rounded_model import FLIP_SHARES
from minimax_tools.reference.rounding import RoundingKind

# Choice of a token whose logits hold NaN.
NO_CHOICE = -1
# Fields of `TokenLogits`, each with a value for every token.
LOGITS_FIELDS = ("candidates", "others", "following", "choices")
Row = tuple[int, ...]
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
        return _combine([self], lambda parts: parts[0][tokens])


def join_tokens(parts: Sequence[TokenLogits]) -> TokenLogits:
    """Join the logits of consecutive tokens."""
    return _combine(parts, torch.cat)


def pick_tokens(models: Sequence[TokenLogits], choice: torch.Tensor) -> TokenLogits:
    """Take the logits of each token from one of several models, by its index, int64 [T]."""
    tokens = torch.arange(len(choice))
    return _combine(models, lambda parts: torch.stack(parts)[choice, tokens])


def _combine(
    logits: Sequence[TokenLogits], combine: Callable[[list[torch.Tensor]], torch.Tensor]
) -> TokenLogits:
    """Combine each field of several logits."""
    return TokenLogits(**{name: combine([getattr(one, name) for one in logits]) for name in LOGITS_FIELDS})


def divergence(reference: TokenLogits, target: TokenLogits) -> torch.Tensor:
    """Return KL(reference ‖ target) in nats for each token, float64 [T]; NaN or infinite where the target is."""
    log_reference, log_target = reference.log_probabilities(), target.log_probabilities()
    terms = log_reference.exp() * (log_reference - log_target)
    # A remainder without tokens has no probability on either side.
    terms = torch.where(log_reference == -torch.inf, 0.0, terms)
    return terms.sum(dim=-1).clamp(min=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamStart:
    """The stream of some rows at the input of one layer, as every computed copy begins with it."""

    layer: int  # the number of layers stands for the input of the final norm
    states: Mapping[Row, torch.Tensor]  # by the row's token ids, [T,H]

    def digest(self) -> str:
        """Compute sha256 over the rows and their states."""
        digest = hashlib.sha256(f"layer {self.layer}\n".encode())
        for row, states_th in sorted(self.states.items()):
            digest.update(f"{row} {states_th.dtype} {list(states_th.shape)}\n".encode())
            digest.update(states_th.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def pad(self, rows: list[Row], *, num_columns: int) -> torch.Tensor:
        """Return the states of rows as a batch [B,S,H], padded with zeros on the right."""
        states = [self.states[row] for row in rows]
        batch = states[0].new_zeros((len(rows), num_columns, states[0].shape[-1]))
        for padded, states_th in zip(batch, states, strict=True):
            padded[: len(states_th)] = states_th
        return batch


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
