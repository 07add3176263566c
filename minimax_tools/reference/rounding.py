"""Rounding: float32 values rounded as BF16 hardware would, row by row in one of three ways; and the head in float32.

A batch may hold several copies of the same rows, each copy rounded in its own way (see `RoundedLayer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import torch

from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.float32_stages import gain_of

# The bits of a float32 that hold its exponent. All other bits cleared, a value is the power of two below it.
_EXPONENT_BITS = 0x7F800000
# The distance of neighbouring BF16 numbers, relative to that power of two: BF16 has 7 bits of mantissa.
_STEP = 2.0**-7
# Knuth's multiplier for hashing. It puts neighbouring seeds far apart, so that their draws do not overlap.
_SEED_FACTOR = 2654435761


class RoundingKind(IntEnum):
    """A way to round; the copies of a batch lie in this order."""

    EXACT = 0  # not rounded
    NEAREST = 1  # to the nearest BF16 number, as hardware does
    RANDOM = 2  # moved by up to half a BF16 step: samples other orders of the same operations (Monte Carlo arithmetic)


# The kinds that change values, each with the slice of its rows.
RoundedRows: TypeAlias = "tuple[tuple[RoundingKind, slice], ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """A source of roundings."""

    seed: int  # seed of the random steps. The same `seed` and `draw` give the same steps.

    def apply(self, values: torch.Tensor, rounded: RoundedRows, *, draw: int) -> torch.Tensor:
        """Round float32 values [R,…] in place, the rows that `rounded` names, and return them.

        Roundings with different numbers (`draw`) have different random steps.
        """
        for kind, rows in rounded:
            part = values[rows]
            if kind is RoundingKind.NEAREST:
                part.copy_(part.bfloat16())
            elif kind is RoundingKind.RANDOM:
                part.addcmul_(_bf16_steps(part), self._noise(part, draw))
        return values

    def _noise(self, values: torch.Tensor, draw: int) -> torch.Tensor:
        """Draw values between −½ and ½ on the CPU, so that they are the same on every device."""
        # torch's CPU generator uses only 32 bits of a seed.
        generator = torch.Generator().manual_seed((self.seed * _SEED_FACTOR + draw) % 2**32)
        return torch.rand(values.shape, generator=generator).sub_(0.5).to(values.device)


def rounded_rows(kinds: torch.Tensor) -> RoundedRows:
    """Find the rows that each kind changes; `kinds` is int64 [R], the `RoundingKind` of each row, ascending."""
    ends = torch.bincount(kinds, minlength=len(RoundingKind)).cumsum(0).tolist()
    return tuple(
        (kind, slice(start, end))
        for kind, start, end in zip(RoundingKind, (0, *ends[:-1]), ends, strict=True)
        if start < end and kind is not RoundingKind.EXACT
    )


def _bf16_steps(values: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring BF16 numbers around float32 values; 0 around 0."""
    powers = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return powers.mul_(_STEP)


# Rows of lm_head that are upcast at a time: at H 3072, 200 MB in float32 instead of 2.5 GB for 200 064 rows.
_SLAB_ROWS = 16384


@dataclass(frozen=True, slots=True, eq=False)
class Float32Head:
    """The model's head in float32."""

    norm: torch.Tensor  # weight of the final norm [H], of any float dtype
    lm_head: torch.Tensor  # weight of lm_head [vocab,H], of any float dtype; upcast a slab of rows at a time
    spec: ModelSpec = field(kw_only=True)  # the model, for the final norm's epsilon and gain

    def run(self, hidden_states: torch.Tensor) -> dict[ModelSite, torch.Tensor]:
        """Compute final_norm [B,S,H] and logits [B,S,vocab], float32, of the last layer's output [B,S,H]."""
        normed = self.normalise(hidden_states)
        return {ModelSite.FINAL_NORM: normed, ModelSite.LOGITS: self.score(normed)}

    def run_rounded(
        self, hidden_states: torch.Tensor, rounding: Rounding, rounded: RoundedRows, *, draw: int = 0
    ) -> dict[ModelSite, torch.Tensor]:
        """Compute both sites of hidden states [R,…,H], rounded where BF16 rounds, in three roundings from `draw` on."""
        normed = self.scale(hidden_states)
        if not self.spec.graph.has_gain_of_one_plus:
            normed = rounding.apply(normed, rounded, draw=draw)
        normed = rounding.apply(normed.mul_(self.gain), rounded, draw=draw + 1)
        logits = rounding.apply(self.score(normed), rounded, draw=draw + 2)
        return {ModelSite.FINAL_NORM: normed, ModelSite.LOGITS: logits}

    def normalise(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute final_norm [B,S,H] in float32."""
        return self.scale(hidden_states) * self.gain

    @property
    def gain(self) -> torch.Tensor:
        """The factor of the final norm, float32 [H]."""
        return gain_of(self.spec.graph, self.norm.to(torch.float32))

    def scale(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Divide [...,H] by its root mean square, float32: the final norm before its weight."""
        states = hidden_states.to(torch.float32)
        return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.spec.rms_norm_eps)

    def score(self, normed: torch.Tensor) -> torch.Tensor:
        """Compute logits [B,S,vocab], float32, of final_norm [B,S,H]."""
        states = normed.to(torch.float32)
        slabs = [states @ slab.to(torch.float32).T for slab in self.lm_head.split(_SLAB_ROWS)]
        return torch.cat(slabs, dim=-1)
