"""CompileCounts: graphs that a process compiled, where they broke, and operations that ran on the CPU instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Counted = TypeVar("Counted")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak:
    """A break of a graph that torch.compile makes of a layer: a line that runs outside of any graph."""

    reason: str
    place: str | None = None  # the line: its file, number and code; None if torch does not know it

    def __str__(self) -> str:
        return f"{self.place or 'an unknown line'}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """Counts since this process began, or between two such counts; all zero where nothing is compiled."""

    compiles: int  # graphs compiled
    fallbacks: Mapping[str, int]  # times that an operation ran on the CPU instead of the device, by its name
    seconds: float = 0.0  # time of compiling
    graph_breaks: Mapping[GraphBreak, int] = field(default_factory=dict)  # times that each break was met
    # Times that a graph was compiled anew, by the condition that the graphs before did not meet.
    recompiles: Mapping[str, int] = field(default_factory=dict)

    def since(self, earlier: CompileCounts) -> CompileCounts:
        """Subtract an earlier count."""
        return CompileCounts(
            compiles=self.compiles - earlier.compiles,
            fallbacks=_grown(self.fallbacks, earlier.fallbacks),
            seconds=self.seconds - earlier.seconds,
            graph_breaks=_grown(self.graph_breaks, earlier.graph_breaks),
            recompiles=_grown(self.recompiles, earlier.recompiles),
        )


def _grown(now: Mapping[Counted, int], earlier: Mapping[Counted, int]) -> dict[Counted, int]:
    """Return what was counted since, by what it is; without what was not."""
    grown = {key: count - earlier.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in grown.items() if count}
