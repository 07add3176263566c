"""Weight finding: a fault in a port's weights, or something that may be one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minimax_tools.text_enum import TextEnum


class WeightMistake(TextEnum):
    """Kind of fault in a weight."""

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


class Severity(TextEnum):
    """Certainty that a finding is a fault."""

    WRONG = "wrong"  # certain: the port fails
    SUSPECT = "suspect"  # a port may do it on purpose: the trial decides
    NOTE = "note"  # the port does it on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFinding:
    """A fault in a port's weights, or something that may be one.

    Args:
        kinds: Kinds of the source tensors concerned: `q_proj`, `w1`.
        port_tensors: Names of the port's tensors concerned.
        contradicts_names: True if the port's own names say otherwise: then it is wrong even without a trial.
    """

    mistake: WeightMistake
    severity: Severity
    kinds: tuple[str, ...]
    text: str
    port_tensors: tuple[str, ...] = ()
    contradicts_names: bool = False

    def cleared(self, reason: str) -> WeightFinding:
        """Return the finding as a note, with the reason why it is no fault."""
        return replace(self, severity=Severity.NOTE, text=f"{self.text}; {reason}")
