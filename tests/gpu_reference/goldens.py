"""Goldens captured, compared and interrupted, and budgets of memory, for the tests of goldens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_reference.golden.golden import GoldenRequest, open_golden
from minimax_tools.capture.reader import Capture
from minimax_tools.machine.memory import MemoryBudget, MemoryUsage, give_back_freed_memory


def capture(request: GoldenRequest, directory: Path, progress: Any = None) -> Capture:
    """Make a golden."""
    with open_golden(request) as golden:
        golden.capture(directory, extra={}, progress=progress)
    return Capture.open(directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Read a capture's files by name."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.suffix != ".lock"
    }


class StoppedError(Exception):
    """Ends a run."""


class StopAfter:
    """Ends a run when so many layers are written; notes which were passed by."""

    def __init__(self, num_layers: int) -> None:
        self.left = num_layers
        self.passed: list[int] = []

    def advance(self, layer: int, *, num_bytes: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError

    def skip(self, layer: int) -> None:
        self.passed.append(layer)


def interrupt(request: GoldenRequest, directory: Path, *, after: int) -> None:
    """Make a golden that ends when so many layers are written."""
    with pytest.raises(StoppedError):
        capture(request, directory, StopAfter(after))


def refuse_to_run(*_: object) -> None:
    """Fail: a hook of a module that is not to run."""
    raise AssertionError("a layer ran that was to stand aside")


def in_use_and(num_bytes: float) -> MemoryBudget:
    """Return a budget of what is in use now and some bytes more."""
    # What earlier tests left to be freed would be room that nobody counted on.
    give_back_freed_memory()
    return MemoryBudget(MemoryUsage.on_host().anonymous_bytes + int(num_bytes))
