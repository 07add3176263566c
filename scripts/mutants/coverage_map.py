"""CoverageMap: the tests that run a line, and so may notice a mutant of it.

What a test ran is kept in a file until the test, a conftest.py above it, or a file that it ran lines of changes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import coverage

from mutants.mutant import Mutant


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """Lines and time of a test that passed."""

    seconds: float  # of processor time
    wall_s: float
    digests: dict[str, str]  # of its own file, of those above it, and of the source files that it ran
    lines: dict[str, list[int]]  # of each source file


class CoverageMap:
    """Records the lines of source files that each test runs."""

    def __init__(self, root: Path, files: Iterable[Path], *, kept: Path) -> None:
        """Record the lines of `files`, relative to the repository; `kept` is the file of earlier records."""
        self.runs: dict[str, TestRun] = {}
        self._root = root
        self._files = sorted(files)
        self._kept = kept
        self._times: dict[str, tuple[float, float]] = {}
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[str(root / file) for file in self._files]
        )
        # Tests may run no line of these files.
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])
        self._tests: dict[str, dict[int, list[str]]] = {}
        self._uses: dict[str, dict[Path, set[int]]] = {}

    def read_kept(self) -> None:
        """Take over the earlier records that still hold."""
        if self._kept.exists():
            for test, values in json.loads(self._kept.read_text(encoding="utf-8")).items():
                run = TestRun(**values)
                if all(self._digest(name) == digest for name, digest in run.digests.items()):
                    self.runs[test] = run

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while tests run, and keep the records."""
        self._coverage.start()
        try:
            yield
        finally:
            self._coverage.stop()
            self._add_recorded()
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            records = {test: asdict(run) for test, run in self.runs.items()}
            self._kept.write_text(json.dumps(records), encoding="utf-8")
            for test, run in self.runs.items():
                for name, lines in run.lines.items():
                    for line in lines:
                        self._tests.setdefault(name, {}).setdefault(line, []).append(test)
            self._uses = _find_uses(self._root, self._files)

    def enter(self, test: str) -> None:
        """Say which test runs the lines from now on."""
        self._coverage.switch_context(test)

    def leave(self, test: str, *, seconds: float, wall_s: float) -> None:
        """Say that a test has passed."""
        self._times[test] = (seconds, wall_s)

    def tests_of(self, mutant: Mutant) -> set[str]:
        """Return the tests that run the mutant's statement.

        A constant, a default and a compiled loop show no lines: then those count that run a line with its name, or
        whose own file reads the name.
        """
        if mutant.is_in_function and not mutant.is_compiled:
            return self._tests_at(mutant.file, mutant.lines)
        uses = self._uses.get(mutant.top_name, {})
        naming = {test for test in self.runs if mutant.top_name in self._names_in(test.partition("::")[0])}
        return naming.union(*(self._tests_at(file, lines) for file, lines in uses.items()))

    def _tests_at(self, file: Path, lines: Iterable[int]) -> set[str]:
        tests = self._tests.get(str(file), {})
        return {test for line in lines for test in tests.get(line, ())}

    def _add_recorded(self) -> None:
        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {test: {} for test in self._times}
        for file in self._files:
            for line, tests in data.contexts_by_lineno(str(self._root / file)).items():
                for test in tests:
                    if test in lines:
                        lines[test].setdefault(str(file), []).append(line)
        for test, (seconds, wall_s) in self._times.items():
            own = Path(test.partition("::")[0])
            above = [str(folder / "conftest.py") for folder in own.parents]
            names = [str(own), *(name for name in above if (self._root / name).exists()), *lines[test]]
            digests = {name: self._digest(name) for name in names}
            self.runs[test] = TestRun(seconds=seconds, wall_s=wall_s, digests=digests, lines=lines[test])

    @functools.cache  # noqa: B019 - one map lives as long as the process
    def _names_in(self, file: str) -> frozenset[str]:
        return frozenset(_find_uses(self._root, [Path(file)]))

    @functools.cache  # noqa: B019 - as above
    def _digest(self, name: str) -> str:
        path = self._root / name
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def _find_uses(root: Path, files: Iterable[Path]) -> dict[str, dict[Path, set[int]]]:
    """Return the lines in which each name is read."""
    uses: dict[str, dict[Path, set[int]]] = {}
    for file in files:
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses.setdefault(node.id, {}).setdefault(file, set()).add(node.lineno)
    return uses
