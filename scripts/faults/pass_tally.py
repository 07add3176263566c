"""Pass tally: wrong things that end in exit code 0, of ports, of dumps, and of what other benchmarks counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from figures import Figure

from faults.cases import Case
from faults.dump_cases import DumpCase
from faults.joined import PASSED, TRIED, Joined


def give_pass_figures(
    cases: Sequence[Case], dumps: Sequence[DumpCase], joined: Sequence[Joined] = ()
) -> Iterator[Figure]:
    """Count wrong things and those that pass: ports once for each run, dumps once for each view of a run.

    A thing is wrong where a mistake changes more than BF16 costs at a site that is shown. A port that shows its
    output alone is told of separately: it may hide what its output hardly shows.
    """
    ports = _wrong_runs(cases)
    wrong_dumps = [case for case in dumps if case.is_above_floor]
    counts = {
        "ports": (len(ports), sum(all(case.is_passed for case in run) for run in ports)),
        "dumps": (len(wrong_dumps), sum(case.is_passed for case in wrong_dumps)),
        **{one.benchmark: (one.num_tried, one.num_passed) for one in joined},
    }
    tried = sum(number for number, _ in counts.values())
    if not tried:
        return
    yield Figure.at_least(TRIED, tried, 1000)
    yield Figure.exactly(PASSED, sum(passed for _, passed in counts.values()), 0)
    for name, (number, passed) in counts.items():
        if number:
            yield Figure.plain(f"{PASSED}_of_{number}_{name}", passed)
    boxes = _wrong_boxes(cases)
    if boxes:
        passed = sum(all(case.black_box_verdict in ("pass", "warn") for case in run) for run in boxes)
        yield Figure.plain(f"{PASSED}_of_{len(boxes)}_black_boxes", passed)


def _wrong_runs(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases above the floor, run by run."""
    return _by_run([case for case in cases if case.is_above_floor or case.is_pair_above_floor])


def _wrong_boxes(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases whose output alone differs by more than the floor, run by run."""
    return _by_run([case for case in cases if case.is_above_floor and case.is_distinguishable])


def _by_run(cases: Sequence[Case]) -> list[list[Case]]:
    runs: dict[str, list[Case]] = {}
    for case in cases:
        runs.setdefault(case.run, []).append(case)
    return list(runs.values())
