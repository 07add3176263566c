"""Bisection: the search for wrong layers by probes, each a run over some of the layers.

A probe runs its layers in chains of a few: each chain begins with the golden's input, and its end is judged. The probe
ends with its first wrong chain. A chain is right if its error stays below limits, so small mistakes may hide in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minimax_tools.model.span import Span
from minimax_tools.results.probes import BisectionFinding, Probe

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
