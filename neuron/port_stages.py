"""Stages of judging a port: each a command in a process of its own, with a log from which a later call goes on."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from minimax_tools.json_codec import DecodeError, decode
from minimax_tools.machine.whole_file import whole_file

logger = logging.getLogger(__name__)

_LOG_NAME = "stages.json"
# The module behind each command: the commands need not be on the PATH.
_MODULES: Mapping[str, str] = MappingProxyType(
    {"mm2-gpu": "gpu_reference", "mm2-test": "neuron", "mm2-diagnose": "compare.diagnosis.cli"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A finished stage."""

    name: str
    command: str  # a shell line
    source_digest: str  # sha256 of the port's source; empty for a stage that does not run it
    exit_code: int
    output: str  # what the command wrote to stdout

    @property
    def record(self) -> dict[str, Any] | None:
        """The output as JSON; None if it is text."""
        try:
            record = json.loads(self.output)
        except json.JSONDecodeError:
            return None
        return record if isinstance(record, dict) else None


class StageLog:
    """Finished stages in a folder. A stage with the same command and source is not run again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOG_NAME
        self._finished = {result.name: result for result in _read(self._path)}

    def find(self, name: str, words: tuple[str, ...], *, source_digest: str) -> StageResult | None:
        """Return a stage that a former call finished; None if it did not, or with another command or source."""
        known = self._finished.get(name)
        is_same = known is not None and (known.command, known.source_digest) == (
            shlex.join(words),
            source_digest,
        )
        return known if is_same else None

    def run(self, name: str, words: tuple[str, ...], *, source_digest: str, is_shown: bool) -> StageResult:
        """Run a stage to its end, and keep its result; `is_shown` writes its output to stdout as it comes.

        A stage that could not be carried out (exit codes 2 and 3) is not kept: a later call runs it again.

        Raises:
            OSError: The log cannot be written.
        """
        lines = []
        with subprocess.Popen(
            [sys.executable, "-m", _MODULES[words[0]], *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None, "stdout is a pipe"
            for line in process.stdout:
                lines.append(line)
                if is_shown:
                    click.echo(line, nl=False)
        result = StageResult(
            name=name,
            command=shlex.join(words),
            source_digest=source_digest,
            exit_code=process.returncode,
            output="".join(lines),
        )
        if result.exit_code in (0, 1):
            self._finished[name] = result
            with whole_file(self._path) as file:
                json.dump([asdict(stage) for stage in self._finished.values()], file, indent=1)
        return result


def _read(path: Path) -> tuple[StageResult, ...]:
    """Read the stages of a former call; () if there are none, or the file is damaged: then all run again."""
    if not path.exists():
        return ()
    try:
        return decode(tuple[StageResult, ...], json.loads(path.read_text(encoding="utf-8")))
    except (DecodeError, ValueError, RecursionError) as error:
        logger.warning("Starting anew: %s cannot be read (%s).", path, error)
        return ()
