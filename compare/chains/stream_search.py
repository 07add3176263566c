"""Searches for wrong layers by probes: runs over some of the layers, or over what is behind a replaced stream.

A bisection's probe runs its layers in chains of a few, each from the golden's input, and ends with its first wrong
chain; a chain is right below limits, so small mistakes may hide in it. In a port that is compiled whole, the golden's
stream is put in at one point, and the logits tell whether all parts behind it are right: so the layers are counted from
the model's end, and the last wrong part is found. What lies before it is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minimax_tools.model.span import Span
from minimax_tools.results.probes import BisectionFinding, Chain, Point, Probe, ReplacedRun, StreamSearch

# Runs and judges a span of layers; given by the caller.
RunProbe = Callable[[Span], Probe]


def find_first(span: Span, run_probe: RunProbe) -> BisectionFinding | None:
    """Return the first finding in `span`, in at most ⌈log2 of its length⌉ + 1 probes; None if all is right.

    The left half of the suspects runs first. If it is right, the right half is suspected; in the end one layer runs
    alone. So the probes that are right cover every layer before the finding, or all of `span`.
    """
    suspects, wrong = span, None
    while True:
        half = Span(suspects.start, suspects.start + max(len(suspects) // 2, 1))
        first_wrong = run_probe(half).first_wrong
        if first_wrong is not None and len(first_wrong.span) == 1:
            return BisectionFinding(chain=first_wrong)
        if first_wrong is not None:
            suspects, wrong = first_wrong.span, first_wrong
        elif half.stop < suspects.stop:
            suspects = Span(half.stop, suspects.stop)
        else:
            # All parts are right by themselves. If they were wrong together, the error lies in no layer alone.
            return None if wrong is None else BisectionFinding(chain=wrong)


def find_all(span: Span, run_probe: RunProbe) -> Iterator[BisectionFinding]:
    """Yield all findings in `span`: behind the chain of each, the search goes on with the golden's input there."""
    rest: Span | None = span
    while rest is not None:
        finding = find_first(rest, run_probe)
        if finding is None:
            return
        yield finding
        stop = finding.chain.span.stop
        rest = Span(stop, span.stop) if stop < span.stop else None


def find_until_proof(span: Span, run_probe: RunProbe) -> Iterator[BisectionFinding]:
    """Yield the findings up to the first that proves the port wrong; a faint drift does not stop the search."""
    for finding in find_all(span, run_probe):
        yield finding
        if finding.is_proof:
            return


def find_exhaustively(span: Span, run_probe: RunProbe) -> Iterator[BisectionFinding]:
    """Yield the layers of `span` that are wrong when they run alone: a probe for each."""
    for layer in span:
        first_wrong = run_probe(Span.single(layer)).first_wrong
        if first_wrong is not None:
            yield BisectionFinding(chain=first_wrong)


# A part is cleared by the run that judges those behind it, if less than this share of the error shows there too.
_SHARE_BEHIND = 0.5

# Judges the run with the stream replaced at a point; None if that run is still to be made.
JudgeRun = Callable[[Point], ReplacedRun | None]


def search_stream(
    num_layers: int, judge_run: JudgeRun, *, reference: str, target: str, is_exhaustive: bool = False
) -> StreamSearch:
    """Search all parts of a model, in at most ⌈log2 of their number⌉ + 1 runs, up to the first that is missing.

    An error that grows slowly from run to run is no proof against one part: then there are several suspects, and a run
    more for each of them.

    With `is_exhaustive`, each part from the last on has a run of its own, up to the first that is wrong: the fewer
    layers lie behind the point of replacement, the less noise hides a mistake.
    """
    runs = _JudgedRuns(num_layers=num_layers, judge_run=judge_run)
    finding: ReplacedRun | None = None
    suspects: tuple[Point, ...] = ()
    is_finished, waits_for = True, None
    try:
        # One part for each layer, one behind the layers, and one before them.
        parts = Span(0, num_layers + 2)
        found = (
            next(find_exhaustively(parts, runs.probe), None)
            if is_exhaustive
            else find_first(parts, runs.probe)
        )
        if found is not None:
            finding, suspects = runs.suspect(found.chain.span.last)
    except _RunMissingError as missing:
        is_finished, waits_for = False, missing.point
    return StreamSearch(
        num_layers=num_layers,
        reference=reference,
        target=target,
        runs=tuple(runs.judged.values()),
        is_finished=is_finished,
        waits_for=waits_for,
        finding=finding,
        suspects=suspects,
    )


class _RunMissingError(Exception):
    """A run that the search needs has not been made."""

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        self.point = point


@dataclass(frozen=True, slots=True, kw_only=True)
class _JudgedRuns:
    """The runs of a search by their points, as probes over places: place 0 is the last part of the model."""

    num_layers: int
    judge_run: JudgeRun
    judged: dict[Point, ReplacedRun] = field(default_factory=dict)

    def probe(self, places: Span) -> Probe:
        """Probe parts behind which all are right, by the run with the stream replaced before the first of them."""
        run = self.of_place(places.last)
        # Logits do not tell how small an error would have been seen.
        chain = Chain(
            span=places, is_right=run.is_right, excess=run.excess, visible=math.inf, reason=run.reason
        )
        return Probe(span=places, chains=(chain,))

    def suspect(self, place: int) -> tuple[ReplacedRun, tuple[Point, ...]]:
        """Return the run that found the part at a place wrong, and the points of all parts that may be wrong instead.

        A mistake shows in all runs before it, with much the same error. So a part is to blame alone only if the error
        is small in the run behind it.
        """
        found = self.of_place(place)
        last = place
        while last and self.of_place(last - 1).excess > _SHARE_BEHIND * found.excess:
            last -= 1
        return found, tuple(self._point(suspected) for suspected in range(place, last - 1, -1))

    def of_place(self, place: int) -> ReplacedRun:
        """Return the run with the stream replaced before the part at a place; each is judged once."""
        point = self._point(place)
        if point not in self.judged:
            run = self.judge_run(point)
            if run is None:
                raise _RunMissingError(point)
            self.judged[point] = run
        return self.judged[point]

    def _point(self, place: int) -> Point:
        return self.num_layers - place if place <= self.num_layers else None
