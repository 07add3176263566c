"""Rooms: the files whose mutants the tests must notice, and the tests that are run for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

# Patterns of source files; a mutant belongs to the folder of its file.
SOURCES = (
    "compare/**/*.py",
    "minimax_tools/capture/*.py",
    "minimax_tools/checkpoint/fp8.py",
    # Experts are regrouped while they are read.
    "minimax_tools/checkpoint/filling.py",
    "minimax_tools/checkpoint/layer_loader.py",
    "minimax_tools/checkpoint/reader.py",
)


def find_sources(root: Path, patterns: Iterable[str] = SOURCES) -> list[Path]:
    """Return the files that match any of the patterns, relative to the repository; a folder means all files in it."""
    found: set[Path] = set()
    for pattern in patterns:
        paths = [root / pattern] if (root / pattern).is_file() else root.glob(_files_of(root, pattern))
        found |= {path.relative_to(root) for path in paths if path.name != "__init__.py"}
    return sorted(found)


def find_tests(root: Path, sources: Iterable[Path]) -> Iterator[Path]:
    """Yield the folders of the tests that mirror the sources, and those of what works on captures."""
    folders = {PurePath("tests", *source.parts[:-1]) for source in sources}
    if any(source.parts[0] == "compare" for source in sources):
        folders = {folder for folder in folders if folder.parts[1] != "compare"} | {PurePath("tests/compare")}
    yield from sorted(root / folder for folder in folders if (root / folder).is_dir())


def _files_of(root: Path, pattern: str) -> str:
    return f"{pattern.rstrip('/')}/**/*.py" if (root / pattern).is_dir() else pattern
