"""Stops: SIGINT (Ctrl-C), SIGTERM and SIGHUP, which end a command in the same words; command lines, given and begun.

A command that begins a process calls `end_when_stopped` first and `raise_when_stopped` once its libraries are loaded.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import click

from minimax_tools.errors import CannotRunError

if TYPE_CHECKING:
    import subprocess

# Key of click's `Context.meta`.
_ARGUMENTS = "minimax_tools.arguments"  # the command line, without the program's name
_JSON_OPTION = "--json"
# Options that change nothing but what is printed.
_OUTPUT_OPTIONS = (_JSON_OPTION, "--quiet", "--debug")


def keep_arguments(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Keep the arguments of the program; those of a command in a group, which come later, are part of them."""
    ctx.meta.setdefault(_ARGUMENTS, tuple(arguments))


def given_arguments() -> tuple[str, ...]:
    """Return the command line of the running command, without the program's name."""
    arguments: tuple[str, ...] = click.get_current_context().meta[_ARGUMENTS]
    return arguments


def given_words(ctx: click.Context) -> tuple[str, ...]:
    """Return the command line of a command, with the program's name; () if no program was started."""
    program = ctx.find_root().info_name
    return (program, *ctx.meta.get(_ARGUMENTS, ())) if program else ()


def asks_for_json(words: Sequence[str]) -> bool:
    """Decide whether a command line has --json; a summary is asked for by --json=summary."""
    return any(map(_is_json, words))


def same_command(program: str, *further: str, without: Collection[str] = ()) -> str:
    """Return the running command as a shell line with further options, and without some and those of the output."""
    left_out = {*_OUTPUT_OPTIONS, *without}
    kept = (word for word in given_arguments() if word not in left_out and not _is_json(word))
    return shlex.join((program, *kept, *further))


def _is_json(word: str) -> bool:
    return word.partition("=")[0] == _JSON_OPTION


# The module behind each program: programs need not be on the PATH.
_MODULES: Mapping[str, str] = MappingProxyType(
    {"mm2-gpu": "gpu_reference", "mm2-test": "neuron", "mm2-diagnose": "compare.diagnosis"}
)
# Variables by which torchrun tells a process its place.
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
)


def process_words(words: Sequence[str]) -> list[str]:
    """Return a command line of mm2, which begins with the program's name, as the system starts a process with it."""
    return [sys.executable, "-m", _MODULES[words[0]], *words[1:]]


def run_child(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command line of mm2 in a process of its own to its end, and keep what it writes.

    It finds mm2 as this process does. Of several ranks this is the lead; the command launches its own.
    """
    # Loaded here: help and errors do without.
    import subprocess

    alone = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        process_words(words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={**alone, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_when_stopped(tell: Callable[[], object]) -> None:
    """Let a stop call `tell` and end the process at once: nothing has been done yet, and libraries are being loaded.

    An exception would not do: it would come out of the middle of a library.
    """

    def end(_: int, __: FrameType | None) -> NoReturn:
        tell()
        os._exit(CannotRunError.exit_code)

    _handle(end)


def raise_when_stopped() -> None:
    """Let a stop raise KeyboardInterrupt in the main thread. A second stop ends the process at once."""

    def stop(_: int, __: FrameType | None) -> NoReturn:
        _handle(end)
        raise KeyboardInterrupt

    def end(_: int, __: FrameType | None) -> NoReturn:
        os._exit(CannotRunError.exit_code)

    _handle(stop)


def die_when_stopped() -> None:
    """Let a stop end the process without a word: its supervisor tells of it."""
    _handle(signal.SIG_DFL)


def ignore_stops() -> None:
    """Let a stop do nothing: the process is at its end."""
    _handle(signal.SIG_IGN)


def forget_interrupt() -> None:
    """Let Python forget a KeyboardInterrupt that was caught.

    Python notes one that leaves text given to `exec`, as dataclasses do while a library is imported. At its end it
    would send SIGINT to itself, although the exit code was chosen. The next text that is run takes the note away.
    """
    exec("")


def stopped_error(arguments: Sequence[str], *, resumes: bool) -> CannotRunError:
    """Return the error of a stopped command; `arguments` is its command line, empty if another program started it."""
    command = shlex.join(arguments)
    what_is_kept = "What was finished is kept; go on with" if resumes else "Run it again with"
    return CannotRunError(
        "interrupted",
        next_step=f"{what_is_kept}: {command}" if command else f"{what_is_kept} the same command.",
        commands=(command,) if command else (),
    )


def _handle(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in STOPS:
        # A signal that was ignored stays ignored: nohup and shells in the background ask for it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
