"""MachineFinding: a finding about this machine.

| level | means |
|---|---|
| `ok` | as it should be |
| `fail` | a run cannot work |
| `warn` | a run works, but its numbers are not what they seem |
| `note` | worth knowing |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minimax_tools.text_enum import TextEnum


class Level(TextEnum):
    """Importance of a finding, the highest last."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """A finding about a subject, which is named in a word or two; `next_step` is empty if the user need not act."""

    level: Level
    subject: str
    found: str
    next_step: str = ""


def worst_level(findings: Sequence[MachineFinding]) -> Level:
    """Return the highest level among the findings."""
    order = tuple(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)


def render_findings(findings: Sequence[MachineFinding]) -> Iterator[str]:
    """Yield the lines of findings: each with its level and, below it, the next step."""
    for finding in findings:
        label = f"[{finding.level}]"
        yield f"{label:7}{finding.subject}: {finding.found}"
        if finding.next_step:
            yield f"       → {finding.next_step}"
