"""ForkedCommand: a command of mm2 in a fork of this process, which has imported torch already; killed where asked."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

import compare
import gpu_reference
import minimax_tools
import neuron
import reports

# Changes of files, as Python's audit hooks name them. What Rust and torch write they do not see.
_EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree"})
# Longest time of a command of a toy, in seconds.
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command."""

    exit_code: int  # negative: the signal that ended it
    text: str  # what it printed
    duration_s: float
    num_events: int  # changes of files beside or below `place`


def run_forked(
    command: click.Command,
    arguments: tuple[str, ...],
    *,
    place: Path,
    kill_after_s: float | None = None,
    kill_at_event: int | None = None,
) -> Ended:
    """Run a command in a fork; kill it after a time, or at its n-th change of a file beside or below `place`."""
    output, counter = place.parent / ".printed", place.parent / ".events"
    output.touch()
    counter.touch()
    _import_packages()
    begun_s = time.monotonic()
    process = os.fork()
    if process == 0:
        _run(lambda: command.main(list(arguments)), place, output, counter, kill_at_event)
    deadline_s = begun_s + (_LIMIT_S if kill_after_s is None else kill_after_s)
    while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() >= deadline_s:
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
            break
        time.sleep(0.001)
    text = output.read_text(encoding="utf-8", errors="replace")
    num_events = len(counter.read_bytes())
    output.unlink()
    counter.unlink()
    return Ended(
        exit_code=os.waitstatus_to_exitcode(ended[1]),
        text=text,
        duration_s=time.monotonic() - begun_s,
        num_events=num_events,
    )


@functools.cache
def _import_packages() -> None:
    """Import what the commands work with, once for all forks."""
    for package in (minimax_tools, reports, compare, gpu_reference, neuron):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)


def _run(
    call: Callable[[], object], place: Path, output: Path, counter: Path, kill_at_event: int | None
) -> None:
    """Run the command in this process, the fork, and end it."""
    exit_code = 99
    try:
        descriptor = os.open(output, os.O_WRONLY)
        events = os.open(counter, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        num_left = [kill_at_event]

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event not in _EVENTS or not arguments or str(place.parent) not in str(arguments[0]):
                return
            os.write(events, b".")
            if num_left[0] is not None:
                num_left[0] -= 1
                if num_left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        call()
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
