"""Journal: a file of finished runs, so that an interrupted benchmark goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faults.cases import Case, DumpCase

AnyCase = Case | DumpCase
_ROOT = Path(__file__).parents[2]
# A journal is valid for one state of the code in these folders, except the files of scripts/faults that plan runs, or
# count and print cases: a change in them changes no case.
_SOURCES = ("compare", "minimax_tools", "neuron", "gpu_reference", "scripts/faults")
_WITHOUT_EFFECT = ("plan.py", "tally.py", "dump_tally.py", "pass_tally.py", "curve.py", "table.py")


class RunJournal:
    """A file of finished runs, one per line, that starts anew if the code has changed; without a path, no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._runs: dict[str, tuple[AnyCase, ...]] = {}
        sources = digest_sources()
        if path is None:
            return
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = text.splitlines()
        if lines and _parsed(lines[0]) == {"sources": sources}:
            for record in map(_parsed, lines[1:]):
                if record is not None:
                    self._runs[record["run"]] = tuple(_case(case) for case in record["cases"])
            if not text.endswith("\n"):
                # The next run must not join a line that a killed run left incomplete.
                path.write_text(text + "\n", encoding="utf-8")
        else:
            path.write_text(json.dumps({"sources": sources}) + "\n", encoding="utf-8")

    def find(self, run: str) -> tuple[AnyCase, ...] | None:
        """Find the cases of a finished run by the `repr` of its plan; None if it has not finished."""
        return self._runs.get(run)

    def add(self, run: str, cases: Iterable[AnyCase]) -> None:
        """Keep a finished run."""
        self._runs[run] = tuple(cases)
        if self._path is not None:
            records = [_record(case) for case in self._runs[run]]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": run, "cases": records}) + "\n")

    def __len__(self) -> int:
        return len(self._runs)


def digest_sources() -> str:
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


def _record(case: AnyCase) -> dict[str, Any]:
    """Return the fields of a case by name; `baseline` has the name `stage` in the file."""
    fields = asdict(case)
    return {"kind_of_case": type(case).__name__, "stage": fields.pop("baseline"), **fields}


def _case(record: dict[str, Any]) -> AnyCase:
    """Build the case of a record by `_record`."""
    kinds: dict[str, type[Case] | type[DumpCase]] = {"Case": Case, "DumpCase": DumpCase}
    kind = kinds[record.pop("kind_of_case")]
    record["baseline"] = record.pop("stage")
    return kind(**{name: _without_lists(value) for name, value in record.items()})


def _without_lists(value: Any) -> Any:
    """Turn lists, at any depth, into the tuples that JSON does not keep."""
    if isinstance(value, list):
        return tuple(map(_without_lists, value))
    if isinstance(value, dict):
        return {name: _without_lists(part) for name, part in value.items()}
    return value
