"""Replacements: runs of a whole port with the golden's stream in place of its own at one point, and their search.

The stream is the hidden states that pass from layer to layer. A point is the input of a layer, by the layer's number;
the number of layers stands for the input of the final norm, None for a run in which nothing is replaced. Each point
begins a part of the model: the layer, or the final norm and head, or what comes before layer 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.results.results import Verdict

Point = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedRun:
    """A run with the stream replaced at one point, and the judgement of its logits."""

    point: Point
    is_right: bool
    excess: float  # the largest error of the logits in units of its limit; infinite if they are not finite
    reason: str = ""  # what differs; empty if the run is right


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSearch:
    """A search for the last wrong part of a model, finished or waiting for a run."""

    num_layers: int
    reference: str  # folder or address of the golden
    target: str  # the port as the user named it; empty if it was run by hand
    runs: tuple[ReplacedRun, ...]  # the runs that were judged, in order
    is_finished: bool
    waits_for: Point = None  # point of the run that is needed next, of an unfinished search
    finding: ReplacedRun | None = (
        None  # the run whose point begins the wrong part; None if all parts are right
    )
    # Points of all parts that may be the wrong one, the finding's first: more than one if the error grows slowly from
    # run to run. Empty without a finding.
    suspects: tuple[Point, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """`fail` if a part is wrong, `incomparable` while a run is missing."""
        if not self.is_finished:
            return Verdict.INCOMPARABLE
        return Verdict.PASS if self.finding is None else Verdict.FAIL

    @property
    def num_parts(self) -> int:
        """Number of parts of the model: its layers, one behind them, and one before them."""
        return self.num_layers + 2

    @property
    def num_judged(self) -> int:
        """Number of parts that are known to be right, and the wrong one."""
        known = [
            count_parts_behind(run.point, num_layers=self.num_layers) for run in self.runs if run.is_right
        ]
        if self.finding is not None:
            known.append(count_parts_behind(self.finding.point, num_layers=self.num_layers))
        return max(known, default=0)


def count_parts_behind(point: Point, *, num_layers: int) -> int:
    """Return the number of parts of a model behind a point."""
    return num_layers + 2 if point is None else num_layers - point + 1


def name_part(point: Point, *, num_layers: int) -> str:
    """Name the part of the model that a point begins."""
    if point is None:
        return "what comes before layer 0: tokens, positions, embedding"
    return "the final norm or the head" if point == num_layers else f"layer {point}"


def part_layer(point: Point, *, num_layers: int) -> int | None:
    """Return the layer that a point begins; None if the part lies before or behind the layers."""
    return None if point == num_layers else point


def name_point(point: Point, *, num_layers: int) -> str:
    """Name the point at which a run's stream is replaced."""
    if point is None:
        return "nowhere"
    return "final norm's input" if point == num_layers else f"layer {point}'s input"
