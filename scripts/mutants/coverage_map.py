"""CoverageMap: the tests that run a line, and so may notice a mutant of it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import coverage

from mutants.mutant import Mutant


class CoverageMap:
    """Records the lines of some files that each test runs."""

    def __init__(self, root: Path, files: Iterable[Path]) -> None:
        """Record the lines of `files`, relative to the repository."""
        self._root = root
        self._files = sorted(files)
        self._coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[str(root / file) for file in self._files]
        )
        self._by_line: dict[Path, Mapping[int, list[str]]] = {}
        self._uses: dict[str, dict[Path, set[int]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while tests run."""
        self._coverage.start()
        try:
            yield
        finally:
            self._coverage.stop()
            data = self._coverage.get_data()
            self._by_line = {file: data.contexts_by_lineno(str(self._root / file)) for file in self._files}
            self._uses = _find_uses(self._root, self._files)

    def enter(self, test: str) -> None:
        """Say which test runs the lines from now on."""
        self._coverage.switch_context(test)

    def tests_of(self, mutant: Mutant) -> set[str]:
        """Return the tests that run the mutant's statement.

        A constant, a default and a compiled loop show no lines: then those count that run a line with its name.
        """
        if mutant.is_in_function and not mutant.is_compiled:
            return self._tests_at(mutant.file, mutant.lines)
        uses = self._uses.get(mutant.top_name, {})
        return set().union(*(self._tests_at(file, lines) for file, lines in uses.items()))

    def _tests_at(self, file: Path, lines: Iterable[int]) -> set[str]:
        by_line = self._by_line.get(file, {})
        return {test for line in lines for test in by_line.get(line, ()) if test}


def _find_uses(root: Path, files: Iterable[Path]) -> dict[str, dict[Path, set[int]]]:
    """Return the lines of functions in which each name is read."""
    uses: dict[str, dict[Path, set[int]]] = {}
    for file in files:
        for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses.setdefault(node.id, {}).setdefault(file, set()).add(node.lineno)
    return uses
