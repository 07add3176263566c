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

from minimax_tools.json_codec import DecodeError, decode
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import JsonError, parse_json, read_own_json
from minimax_tools.machine.streams import write
from minimax_tools.printable import NEXT_TITLE, SCHEMA_VERSION

logger = logging.getLogger(__name__)

_LOG_NAME = "stages.json"
# Exit codes of a stage that was carried out.
_KEPT = (0, 1)
_NEXT_LINE = f"{NEXT_TITLE}\n"
# The module behind each command: the commands need not be on the PATH.
_MODULES: Mapping[str, str] = MappingProxyType(
    {"mm2-gpu": "gpu_reference", "mm2-test": "neuron", "mm2-diagnose": "compare.diagnosis"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A finished stage."""

    name: str
    command: str  # a shell line
    source_digest: str  # sha256 of the port's source; empty for a stage that does not run it
    exit_code: int
    output: str  # what the command wrote to stdout
    schema_version: int  # of the JSON that it wrote: a later mm2 may write another

    @property
    def record(self) -> dict[str, Any] | None:
        """The output as JSON; None if it is text."""
        try:
            record = parse_json(self.output)
        except JsonError:
            return None
        return record if isinstance(record, dict) else None

    @property
    def next_commands(self) -> tuple[str, ...]:
        """The commands that the stage advises to run next."""
        if self.record is not None:
            return _next_commands(self.record)
        return tuple(line.strip() for line in _split(self.output)[1][1:])

    @property
    def text(self) -> str:
        """The output without the commands to run next."""
        return "".join(_split(self.output)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advice:
    """The key of a command's JSON that holds the commands to run next."""

    next: tuple[str, ...] = ()


class StageLog:
    """Finished stages of an unfinished call, in a folder: the next call goes on behind them.

    A finished call forgets the stages that ran the port. What a port does may change without a trace in its source,
    such as a file that it reads while it runs.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOG_NAME
        self._finished = {result.name: result for result in _read(self._path)}

    def find(self, name: str, words: tuple[str, ...], *, source_digest: str) -> StageResult | None:
        """Return a stage that a former call finished; None if it did not, or with another command or source."""
        known = self._finished.get(name)
        asked = (shlex.join(words), source_digest, SCHEMA_VERSION)
        is_same = known is not None and (known.command, known.source_digest, known.schema_version) == asked
        return known if is_same else None

    def finish(self) -> None:
        """Forget the stages that ran the port.

        Raises:
            OSError: The log cannot be written.
        """
        self._finished = {name: result for name, result in self._finished.items() if not result.source_digest}
        self._write()

    def run(
        self, name: str, words: tuple[str, ...], *further: str, source_digest: str, is_shown: bool
    ) -> StageResult:
        """Run a stage to its end, and keep its result.

        `further` options do not count as another command. `is_shown` writes its output to stdout as it comes, without
        the commands to run next.

        A stage that could not be carried out (exit codes 2 and 3) is not kept: the next call runs it again.

        Raises:
            OSError: The log cannot be written.
        """
        lines: list[str] = []
        is_next = False
        with subprocess.Popen(
            [sys.executable, "-m", _MODULES[words[0]], *words[1:], *further],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None, "stdout is a pipe"
            try:
                for line in process.stdout:
                    lines.append(line)
                    is_next = is_next or line == _NEXT_LINE
                    if is_shown and not is_next:
                        write(line, ends_line=False)
            except BaseException:
                # Stopped, or the output cannot be written: the stage must not run on alone.
                process.terminate()
                raise
        result = StageResult(
            name=name,
            command=shlex.join(words),
            source_digest=source_digest,
            exit_code=process.returncode,
            output="".join(lines),
            schema_version=SCHEMA_VERSION,
        )
        if result.exit_code in _KEPT:
            self._finished[name] = result
            self._write()
        return result

    def _write(self) -> None:
        with whole_file(self._path) as file:
            json.dump([asdict(stage) for stage in self._finished.values()], file, indent=1)


def _next_commands(record: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return decode(_Advice, record).next
    except DecodeError:
        return ()


def _split(output: str) -> tuple[list[str], list[str]]:
    """Split a command's text into its lines, and those of the commands to run next."""
    lines = output.splitlines(keepends=True)
    place = lines.index(_NEXT_LINE) if _NEXT_LINE in lines else len(lines)
    return lines[:place], lines[place:]


def _read(path: Path) -> tuple[StageResult, ...]:
    """Read the stages of a former call; () if there are none, or the file is damaged: then all run again."""
    if not path.exists():
        return ()
    try:
        results = decode(tuple[StageResult, ...], read_own_json(path))
    except (OSError, ValueError) as error:
        logger.warning("Starting anew: %s cannot be read (%s).", path, error)
        return ()
    return tuple(result for result in results if result.exit_code in _KEPT)
