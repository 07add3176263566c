"""Trials: every mutant in a process of its own, split off from one that has imported all and made what tests share.

It is a plugin of pytest. The tests run once, and the lines that each runs are recorded. Then a process is split off for
each mutant, which runs the tests that may notice it until one fails.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import resource
import select
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from mutants.coverage_map import CoverageMap
from mutants.graft import NotGraftedError, find_caches, graft
from mutants.mutant import Mutant

# A mutant that takes longer than its tests took, by these, runs forever.
_PATIENCE_S, _PATIENCE = 10.0, 5.0
# A mutant may ask for memory without end.
_MOST_MEMORY_BYTES = 8 << 30


class Outcome(Enum):
    """Outcome of a mutant."""

    KILLED = "killed"  # a test fails
    ENDLESS = "endless"  # a test does not end, which is noticed too
    SURVIVED = "survived"
    UNTESTED = "untested"  # no test runs the statement
    UNTRIED = "untried"  # it cannot be put into a running process, or changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A mutant and what became of it."""

    mutant: Mutant
    outcome: Outcome
    says: str = ""  # the test that noticed it, or why it was not tried

    @property
    def counts(self) -> bool:
        """Decide whether the tests could have noticed it."""
        return self.outcome is not Outcome.UNTRIED

    @property
    def is_noticed(self) -> bool:
        """Decide whether a test noticed it."""
        return self.outcome in (Outcome.KILLED, Outcome.ENDLESS)


class Trials:
    """The plugin; `trials` holds the results when pytest has ended."""

    def __init__(
        self,
        root: Path,
        mutants: Sequence[Mutant],
        *,
        coverage_map: CoverageMap,
        scratch: Path,
        tell: Callable[[str], None],
        most_seconds: float,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Try `mutants`; tests write below `scratch`, pytest's `basetemp`. Progress goes to `tell`.

        Of the tests that run a mutant, those are left out that begin after `most_seconds` of processor time.
        """
        self.trials: list[Trial] = []
        self.failing: list[str] = []  # tests that fail without any mutant
        self._root, self._mutants, self._scratch, self._tell = root, mutants, scratch, tell
        self._most_seconds, self._patience_s = most_seconds, patience_s
        self._map = coverage_map
        self._items: dict[str, pytest.Item] = {}
        self._killers: Counter[tuple[Path, str]] = Counter()
        self._fit: dict[str, bool] = {}
        self._shared: set[str] = set()  # names of the fixtures that all tests share
        self._caches: list[functools._lru_cache_wrapper[Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests once, then those of each mutant."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors while tests were collected")
        self._items = {item.nodeid: item for item in session.items}
        self._map.read_kept()
        with self._map.recording():
            self._run_once([item for item in session.items if self._must_run(item)])
        self._caches = find_caches()
        # Else each child would walk through all objects, and so copy them.
        gc.freeze()
        for number, mutant in enumerate(self._mutants, start=1):
            trial = self._try(mutant)
            self.trials.append(trial)
            self._tell(f"[{number}/{len(self._mutants)}] {trial.outcome.value:8} {mutant}  {trial.says}")
        return True

    def _must_run(self, item: pytest.Item) -> bool:
        """Decide whether nobody knows what a test runs, or it is the first to need what all tests share."""
        shared = {
            name
            for name, fixtures in getattr(item, "_fixtureinfo").name2fixturedefs.items()  # noqa: B009
            if fixtures[-1].scope == "session" and name not in self._shared
        }
        self._shared |= shared
        return bool(shared) or item.nodeid not in self._map.runs

    def _run_once(self, items: Sequence[pytest.Item]) -> None:
        ends = [*self._items.values()][:: max(1, len(self._items) - 1)]
        self._tell(f"{len(items)} tests run once.")
        for number, item in enumerate(items, start=1):
            self._map.enter(item.nodeid)
            seconds, wall_s = time.process_time(), time.monotonic()
            # Behind the last test stands a far one, so that what all tests share is kept, and nothing else.
            follower = items[number] if number < len(items) else min(ends, key=partial(_count_shared, item))
            reports = runtestprotocol(item, log=False, nextitem=follower)
            if any(report.failed for report in reports):
                self.failing.append(item.nodeid)
                self._map.runs.pop(item.nodeid, None)
            elif not any(report.skipped for report in reports):
                took_s = time.process_time() - seconds
                self._map.leave(item.nodeid, seconds=took_s, wall_s=time.monotonic() - wall_s)
            if number % 100 == 0:
                self._tell(f"{number} of {len(items)} tests have run once.")
        self._map.enter("")

    def _try(self, mutant: Mutant) -> Trial:
        tests = self._choose(mutant)
        if not tests:
            return Trial(mutant=mutant, outcome=Outcome.UNTESTED)
        outcome, last = self._run_apart(tests, mutant)
        if outcome in (Outcome.KILLED, Outcome.ENDLESS) and not self._is_fit(last):
            # The test depends on the process that it began in, such as on a thread of it.
            return self._try(mutant)
        if outcome is Outcome.KILLED:
            self._killers[mutant.file, last] += 1
        return Trial(mutant=mutant, outcome=outcome, says=last if outcome is not Outcome.SURVIVED else "")

    def _choose(self, mutant: Mutant) -> list[str]:
        """Return the tests that may notice it: those that noticed others of its file, its folder's, and quick ones."""
        own = f"tests/{mutant.file.parent}/"
        tests = [
            test for test in self._map.tests_of(mutant) if test in self._items and self._fit.get(test, True)
        ]
        tests.sort(
            key=lambda test: (
                -self._killers[mutant.file, test],
                not test.startswith(own),
                self._map.runs[test].seconds,
                test,
            )
        )
        chosen: list[str] = []
        seconds = 0.0
        for test in tests:
            seconds += self._map.runs[test].seconds
            if chosen and seconds > self._most_seconds:
                break
            chosen.append(test)
        return chosen

    def _is_fit(self, test: str) -> bool:
        """Decide whether a test passes in a process of its own without a mutant."""
        if test in self._items and test not in self._fit:
            self._fit[test] = self._run_apart([test], None)[0] is Outcome.SURVIVED
        return self._fit.get(test, True)

    def _run_apart(self, tests: Sequence[str], mutant: Mutant | None) -> tuple[Outcome, str]:
        """Run tests in a process of their own; return also the test that ran last, or why none ran."""
        before = set(self._scratch.iterdir())
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            for cache in self._caches:
                cache.cache_clear()
            _run_in_child([self._items[test] for test in tests], mutant, root=self._root, writer=writer)
        os.close(writer)
        patience = self._patience_s + _PATIENCE * sum(self._map.runs[test].wall_s for test in tests)
        said, has_ended = _listen(reader, time.monotonic() + patience)
        _end_group(child)
        for path in set(self._scratch.iterdir()) - before:
            shutil.rmtree(
                path, ignore_errors=True
            ) if path.is_dir() and not path.is_symlink() else path.unlink()
        *started, verdict = said.split("\n") if said else [""]
        if not has_ended:
            return Outcome.ENDLESS, started[-1] if started else tests[0]
        if verdict.startswith("untried"):
            return Outcome.UNTRIED, verdict.removeprefix("untried ")
        if verdict == "survived":
            return Outcome.SURVIVED, ""
        # It told of a failure, or died without a word.
        return Outcome.KILLED, started[-1] if started else tests[0]


def _count_shared(item: pytest.Item, other: pytest.Item) -> int:
    """Return the number of folders, files and classes that hold both tests."""
    return len({*item.listchain()} & {*other.listchain()})


def _run_in_child(items: Sequence[pytest.Item], mutant: Mutant | None, *, root: Path, writer: int) -> None:
    """Run the tests until one fails; write the name of each that begins, and the verdict. Never returns."""
    verdict = "killed"
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
        random.seed(0)
        if mutant is not None:
            graft(root / mutant.file, mutant.source.text, mutant.code())
        for number, item in enumerate(items):
            os.write(writer, f"{item.nodeid}\n".encode())
            reports = runtestprotocol(item, log=False, nextitem=items[(number + 1) % len(items)])
            if any(report.failed for report in reports):
                break
        else:
            verdict = "survived"
    except NotGraftedError as error:
        verdict = f"untried {error}"
    finally:
        os.write(writer, verdict.encode())
        os._exit(0)


def _listen(reader: int, deadline: float) -> tuple[str, bool]:
    """Return what the child wrote, and whether it ended before the deadline."""
    said = b""
    try:
        while True:
            ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return said.decode(), False
            part = os.read(reader, 1 << 16)
            said += part
            if not part or said.endswith((b"killed", b"survived")) or b"untried" in said:
                return said.decode(), True
    finally:
        os.close(reader)


def _end_group(child: int) -> None:
    """End a child and all that it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
