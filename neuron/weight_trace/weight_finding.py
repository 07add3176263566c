"""Weight finding: a fault in a port's weights, or something that may be one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.text_enum import TextEnum


class Severity(TextEnum):
    """Certainty that a finding is a fault."""

    WRONG = "wrong"  # certain: the port fails
    SUSPECT = "suspect"  # a port may do it on purpose: running the layer (the trial) decides
    NOTE = "note"  # the port does it on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFinding:
    """A fault in a port's weights, or something that may be one: `severity` tells which."""

    mistake: WeightMistake
    severity: Severity
    kinds: tuple[str, ...]  # kinds of the source tensors concerned: `q_proj`, `w1`
    text: str
    details: str = ""  # what lies where, if the text does not say
    port_tensors: tuple[str, ...] = ()  # names of the port's tensors concerned
    # True if the name of the port's tensor claims another weight than lies there: wrong, unless the trial is right.
    contradicts_names: bool = False

    def cleared(self, reason: str) -> WeightFinding:
        """Return the finding as a note, with the reason why it is no fault."""
        return replace(self, severity=Severity.NOTE, text=f"{self.text}; {reason}")
