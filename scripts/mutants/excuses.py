"""Excuses: mutants that no test can notice, each with its reason, in `excuses.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from mutants.mutant import Mutant

FILE = Path(__file__).with_suffix(".yaml")


def read_excuses(file: Path = FILE) -> Mapping[tuple[str, str, str, str], str]:
    """Return the reason of each excused change: file, function or class, code before, code after.

    Raises:
        ValueError: An excuse lacks a reason, or has another key.
    """
    excuses = {}
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")) or []:
        if entry.keys() != {"file", "within", "before", "after", "reason"} or not entry["reason"]:
            raise ValueError(
                f"{file}: expected file, within, before, after and reason, found {entry}. Write all five."
            )
        excuses[entry["file"], entry["within"], entry["before"], entry["after"]] = entry["reason"]
    return excuses


def is_excused(mutant: Mutant, excuses: Mapping[tuple[str, str, str, str], str]) -> bool:
    """Decide whether a change is excused, wherever in its function or class it stands."""
    return (str(mutant.file), mutant.top_name, mutant.before, mutant.after) in excuses
