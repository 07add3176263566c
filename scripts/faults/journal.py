"""Journal: a file of finished runs, so that an interrupted benchmark goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

CaseT = TypeVar("CaseT")
_ROOT = Path(__file__).parents[2]
# A journal is valid for one state of the code in these folders, except the files of scripts/faults that plan runs, or
# count cases: a change in them changes no case.
_SOURCES = ("compare", "minimax_tools", "neuron", "gpu_reference", "scripts/faults")
_WITHOUT_EFFECT = ("plan.py", "tally.py")


class Journal(Generic[CaseT]):
    """A file of finished runs, one per line, that starts anew if the code has changed; without a path, no file.

    The cases of a run are dataclasses of the given kinds. Journals that were put together are one.
    """

    def __init__(self, path: Path | None, *kinds: type[CaseT]) -> None:
        self._path = path
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._runs: dict[str, tuple[CaseT, ...]] = {}
        if path is None:
            return
        sources = {"sources": _digest_sources()}
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        first, *others = map(_parsed, text.splitlines() or [""])
        if first != sources:
            path.write_text(json.dumps(sources) + "\n", encoding="utf-8")
            return
        for record in others:
            if record is not None and "run" in record:
                self._runs[record["run"]] = tuple(map(self._case, record["cases"]))
        if not text.endswith("\n"):
            # The next run must not join a line that a killed run left incomplete.
            path.write_text(text + "\n", encoding="utf-8")

    def find(self, run: str) -> tuple[CaseT, ...] | None:
        """Find the cases of a finished run by its name; None if it has not finished."""
        return self._runs.get(run)

    def find_or_make(self, run: str, make: Callable[[], Iterable[CaseT]]) -> tuple[CaseT, ...]:
        """Find the cases of a run; if it has not finished, make and keep them."""
        if run not in self._runs:
            self.add(run, make())
        return self._runs[run]

    def add(self, run: str, cases: Iterable[CaseT]) -> None:
        """Keep a finished run."""
        self._runs[run] = tuple(cases)
        if self._path is not None:
            records = [{"kind_of_case": type(case).__name__, **asdict(case)} for case in self._runs[run]]  # type: ignore[call-overload]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": run, "cases": records}) + "\n")

    def _case(self, record: dict[str, Any]) -> CaseT:
        kind = self._kinds[record.pop("kind_of_case")]
        return kind(**_without_lists(record))


def _digest_sources() -> str:
    """Compute the sha256 over the code in `_SOURCES` that runs and judges, and its limits."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.*")):
            has_effect = folder != "scripts/faults" or path.name not in _WITHOUT_EFFECT
            if path.suffix in (".py", ".yaml") and has_effect:
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _parsed(line: str) -> Any:
    """Read the record of a line; None if a killed run left it incomplete."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _without_lists(value: Any) -> Any:
    """Turn lists, at any depth, into the tuples that JSON does not keep."""
    if isinstance(value, list):
        return tuple(map(_without_lists, value))
    if isinstance(value, dict):
        return {name: _without_lists(part) for name, part in value.items()}
    return value
