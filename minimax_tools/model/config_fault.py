"""Faults of a config.json: keys whose values describe another computation, or another format, than mm2 knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFault:
    """A key of config.json with a value that mm2 does not compute or read."""

    key: str  # with its parent, such as `rope_parameters.rope_type`
    expected: str
    found: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.key} is {self.found} instead of {self.expected}"


def refuse_faults(faults: Sequence[ConfigFault], *, where: Path | str) -> None:
    """Raise one error for all faults of the file `where`; without faults, do nothing.

    Raises:
        UnsupportedModelError: There are faults; each key is named with its value.
    """
    if not faults:
        return
    first, *others = faults
    next_step = " ".join(dict.fromkeys(fault.next_step for fault in faults))
    if not others:
        raise UnsupportedModelError(
            f"{where} sets {first.key}", expected=first.expected, found=first.found, next_step=next_step
        )
    raise UnsupportedModelError(
        f"{where} describes a model that mm2 does not compute",
        found="; ".join(map(str, faults)),
        next_step=next_step,
    )
