"""Wrong ports and dumps that ended in exit code 0, and wrong things that other benchmarks counted.

A benchmark joins by printing, with `--json`, the figures `wrong_things` (how many it tried) and `false_passes` (how
many of them ended in 0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Figure

from faults.cases import Case, DumpCase
from minimax_tools.errors import UsageError

# Effect, in noise floors, from which a port must not pass. The ρ of right ports reaches 1.5 over all tokens. A mistake
# of one floor and the noise of one floor make a ρ of √2: such a port may pass.
_BEYOND_DOUBT = 2.0
# Names of the figures.
TRIED, PASSED = "wrong_things", "false_passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedCounts:
    """Counts of another benchmark."""

    benchmark: str  # name of the benchmark
    num_tried: int  # number of wrong things that it tried
    num_passed: int  # number of these that ended in exit code 0

    @classmethod
    def read(cls, path: Path) -> JoinedCounts:
        """Read the output of a benchmark with `--json`.

        Raises:
            UsageError: The file cannot be read, or lacks the figures.
        """
        next_step = f"Name the --json output of a benchmark that counts {TRIED} and {PASSED}."
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found = {figure["figure"]: figure["value"] for figure in record["figures"]}
            name = str(record["benchmark"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is not the output of a benchmark", found=str(error), next_step=next_step
            ) from error
        missing = [figure for figure in (TRIED, PASSED) if figure not in found]
        if missing:
            raise UsageError(
                f"{path} does not count {' and '.join(missing)}",
                found=", ".join(sorted(found)),
                next_step=next_step,
            )
        return cls(benchmark=name, num_tried=int(found[TRIED]), num_passed=int(found[PASSED]))


def give_pass_figures(
    cases: Sequence[Case], dumps: Sequence[DumpCase], joined: Sequence[JoinedCounts] = ()
) -> Iterator[Figure]:
    """Count wrong things and those that pass: each run of a port is one, and each view (set of shown sites) of a dump.

    A port or dump is wrong if a mistake changes a shown site by two noise floors or more: right implementations may
    differ by less. Changes of one to two floors are counted apart, and so are ports that show their output alone.
    """
    ports = _by_run([case for case in cases if _effect(case) >= _BEYOND_DOUBT])
    beyond_doubt = {run[0].run for run in ports}
    faint = _by_run([case for case in cases if _effect(case) >= 1.0 and case.run not in beyond_doubt])
    wrong_dumps = [case for case in dumps if case.is_mistake and case.effect >= _BEYOND_DOUBT]
    faint_dumps = [case for case in dumps if case.is_above_floor and case.effect < _BEYOND_DOUBT]
    counts = {
        "ports": (len(ports), _count_passed(ports)),
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
    if faint or faint_dumps:
        passed = _count_passed(faint) + sum(case.is_passed for case in faint_dumps)
        yield Figure.plain(f"passed_near_the_floor_of_{len(faint) + len(faint_dumps)}", passed)
    # Ports that show their output alone, which differs beyond doubt.
    black_boxes = _by_run(
        [
            case
            for case in cases
            if case.is_mistake and min(case.effect, case.effects.get("output", 0.0)) >= _BEYOND_DOUBT
        ]
    )
    if black_boxes:
        passed = sum(all(case.black_box_verdict in ("pass", "warn") for case in run) for run in black_boxes)
        yield Figure.plain(f"{PASSED}_of_{len(black_boxes)}_black_boxes", passed)


def _effect(case: Case) -> float:
    """Return the effect of a layer's mistake in noise floors; of two planted at once (`halves`), the larger one."""
    if case.halves:
        return max(case.effects.get(site, 0.0) for sites in case.halves for site in sites)
    return case.effect if case.is_mistake else 0.0


def _count_passed(runs: Sequence[Sequence[Case]]) -> int:
    """Count the runs that ended in exit code 0; all cases of a run hold its verdict."""
    return sum(all(case.is_passed for case in run) for run in runs)


def _by_run(cases: Sequence[Case]) -> list[list[Case]]:
    """Group the cases, which are layers, by run."""
    runs: dict[str, list[Case]] = {}
    for case in cases:
        runs.setdefault(case.run, []).append(case)
    return list(runs.values())
