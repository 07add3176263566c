"""Plant small faults one by one, and count those that the tests notice.

By default, faults are planted in the lines that differ from the branch main. Each is tried against the tests that run
it. Texts, annotations and raised errors are left alone (see `mutants/mutant.py`). Faults that no test can notice stand
with their reasons in `mutants/excuses.yaml`.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

# Threads do not outlive a fork, so there must be none; this holds for libraries that are imported later.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["NUMBA_NUM_THREADS"] = "1"

import pytest
from mutants.changes import changed_lines
from mutants.coverage_map import CoverageMap
from mutants.excuses import is_excused, read_excuses
from mutants.mutant import Mutant, find_mutants
from mutants.rooms import SOURCES, find_sources, find_tests
from mutants.trial import Outcome, Trial, Trials

ROOT = Path(__file__).parents[1]
# What each test ran is kept here: the tests take minutes.
_KEPT = ROOT / ".mutants_cache" / "coverage.json"
# Share of the faults that the tests must notice, in percent.
_GOAL = 90.0


def main() -> int:
    """Try the mutants and print the shares; return 1 if the goal is missed or a test fails by itself, else 0."""
    arguments = _parse()
    mutants = _choose(arguments)
    if not mutants:
        print(
            f"No fault to plant: nothing in question differs from {arguments.base}. All: make mutants ALL=1"
        )
        return 0
    tests = arguments.tests or [*find_tests(ROOT, sorted({mutant.file for mutant in mutants}))]
    with tempfile.TemporaryDirectory(prefix="mm2-mutants-") as folder, os.fdopen(os.dup(2), "w") as progress:
        start = time.monotonic()

        def tell(line: str) -> None:
            print(f"{time.monotonic() - start:5.0f} s  {line}", file=progress, flush=True)

        tell(f"{len(mutants)} faults. Tests: {' '.join(map(str, tests))}")
        scratch = Path(folder) / "tests"
        scratch.mkdir()
        coverage_map = CoverageMap(ROOT, find_sources(ROOT), kept=_KEPT)
        trials = Trials(
            ROOT,
            mutants,
            coverage_map=coverage_map,
            scratch=scratch,
            tell=tell,
            most_seconds=arguments.seconds,
        )
        options = [
            "-q",
            "-m",
            arguments.marks,
            f"--basetemp={scratch}",
            "-p",
            "no:cacheprovider",
            f"--rootdir={ROOT}",
        ]
        code = pytest.main([*options, *map(str, tests)], plugins=[trials])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return 1
    for test in trials.failing:
        print(f"fails without any fault: {test}")
    return _report(trials.trials) or int(bool(trials.failing))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="main", help="branch to compare with (default: main)")
    parser.add_argument(
        "--all", action="store_true", help="plant faults in all lines of the files in question"
    )
    parser.add_argument("--modules", nargs="+", metavar="PATH", help="plant faults in these files or folders")
    parser.add_argument("--sample", type=int, metavar="NUMBER", help="draw so many of the faults")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument(
        "--tests", nargs="+", metavar="PATH", help="run these tests (default: those that mirror)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of tests for each fault, on one core (default: %(default)s)",
    )
    parser.add_argument("--marks", default="not slow", help="pytest's -m (default: 'not slow')")
    return parser.parse_args()


def _choose(arguments: argparse.Namespace) -> list[Mutant]:
    excuses = read_excuses()
    sources = find_sources(ROOT, arguments.modules or SOURCES)
    if arguments.all or arguments.modules:
        mutants = [mutant for file in sources for mutant in find_mutants(ROOT, file)]
    else:
        changed = _changed(arguments.base)
        found = [mutant for file in sources if file in changed for mutant in find_mutants(ROOT, file)]
        mutants = [mutant for mutant in found if changed[mutant.file] & set(mutant.lines)]
    mutants = [mutant for mutant in mutants if not is_excused(mutant, excuses)]
    if arguments.sample is not None and arguments.sample < len(mutants):
        drawn = random.Random(arguments.seed).sample(range(len(mutants)), arguments.sample)
        # In the order in which they were drawn: a run that is cut short has tried a sample, too.
        mutants = [mutants[index] for index in drawn]
    return mutants


def _changed(base: str) -> dict[Path, frozenset[int]]:
    try:
        return dict(changed_lines(ROOT, base))
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"git cannot compare with {base}: {error.stderr.strip()}. Name another branch: --base BRANCH"
        )


def _report(trials: Sequence[Trial]) -> int:
    rooms: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        rooms[str(trial.mutant.file.parent)].append(trial)
    for trial in trials:
        if trial.counts and not trial.is_noticed:
            print(f"{trial.outcome.value}: {trial.mutant}")
    print(f"{'room':32} {'faults':>6} {'noticed':>7} {'share':>7} {'untested':>8} {'untried':>7}")
    for room, tried in (*sorted(rooms.items()), ("all", list(trials))):
        counted = [trial for trial in tried if trial.counts]
        noticed = sum(trial.is_noticed for trial in counted)
        untested = sum(trial.outcome is Outcome.UNTESTED for trial in counted)
        share = f"{100 * noticed / len(counted):.1f} %" if counted else "-"
        print(f"{room:32} {len(counted):6} {noticed:7} {share:>7} {untested:8} {len(tried) - len(counted):7}")
    return int(100 * noticed < _GOAL * len(counted))


if __name__ == "__main__":
    sys.exit(main())
