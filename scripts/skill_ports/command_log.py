"""Command log: mm2's commands as an agent starts them, each written down before it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from minimax_tools.errors import CannotRunError

COMMANDS = ("mm2-compare", "mm2-diagnose", "mm2-gpu", "mm2-split", "mm2-test")

_SCRIPT = """#!/bin/sh
printf '%s\\t%s %s\\n' "$(pwd -P)" {name} "$*" >> {log}
exec {command} "$@"
"""


def write_commands(folder: Path, log: Path) -> None:
    """Write mm2's commands into a folder for an agent's PATH; each adds a line to the log and starts the real one.

    Raises:
        CannotRunError: mm2 is not installed beside this Python.
    """
    folder.mkdir()
    for name in COMMANDS:
        command = Path(sys.executable).with_name(name)
        if not command.exists():
            raise CannotRunError(
                f"{command} does not exist", next_step="install mm2 in this environment: make venv"
            )
        words = {
            "name": name,
            "log": shlex.quote(str(log.resolve())),
            "command": shlex.quote(str(command)),
        }
        script = folder / name
        script.write_text(_SCRIPT.format(**words), encoding="utf-8")
        script.chmod(0o755)


def read_commands(folder: Path, log: Path) -> tuple[str, ...]:
    """Read the command lines that were started in a folder or below it, in their order."""
    if not log.exists():
        return ()
    lines = (line.partition("\t") for line in log.read_text(encoding="utf-8").splitlines())
    return tuple(line for place, _, line in lines if Path(place).is_relative_to(folder.resolve()))
