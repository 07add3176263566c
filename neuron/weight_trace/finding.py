"""WeightFinding: one thing that is wrong with the weights in a port, or looks as if it were."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class WeightMistake(str, Enum):
    """What can be wrong with a weight."""

    MISSING = "missing"
    DUPLICATED = "duplicated"
    SWAPPED = "swapped"
    TRANSPOSED = "transposed"
    ORDER = "order"
    SCALED = "scaled"
    COMPUTED = "computed"
    DTYPE = "dtype"
    NEVER_BOUND = "never_bound"
    ZERO = "zero"
    VALUES = "values"

    def __str__(self) -> str:
        return self.value


class Severity(str, Enum):
    """How much a finding counts."""

    WRONG = "wrong"  # certain: the port fails
    SUSPECT = "suspect"  # a port may mean it: the trial tells
    NOTE = "note"  # a port means it

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFinding:
    """One thing that was found.

    Args:
        mistake: What it is, or would be.
        weight: How much it counts.
        tensors: What it is about, in the hub's kinds: `q_proj`, `w1`.
        places: The port's tensors that it shows in.
        text: It in words.
        is_named: Whether the port's own names contradict it, so that it is wrong even where no trial could tell.
    """

    mistake: WeightMistake
    weight: Severity
    tensors: tuple[str, ...]
    places: tuple[str, ...]
    text: str
    is_named: bool = False

    def on_ranks(self, ranks: tuple[int, ...]) -> WeightFinding:
        """The same, of some of the ranks alone."""
        names = ", ".join(str(rank) for rank in dict.fromkeys(ranks))
        return replace(self, text=f"{self.text} (on rank {names})")

    def cleared(self, reason: str) -> WeightFinding:
        """The same, as what the port means."""
        return replace(self, weight=Severity.NOTE, text=f"{self.text}; {reason}")

    def quantised(self) -> WeightFinding:
        """The same, as what quantising does to it: whether the port can afford that, a run tells."""
        return replace(self, text=f"{self.text}: quantised, and right on weights that quantising keeps")

    def confirmed(self) -> WeightFinding:
        """The same, as what is wrong."""
        return replace(self, weight=Severity.WRONG)
