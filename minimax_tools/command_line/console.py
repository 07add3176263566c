"""The commands' way to the terminal: exit codes, errors, JSON, and log messages on stderr."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import click

from minimax_tools.errors import CannotRunError, Mm2Error, TargetError, UsageError

# Level of the environment variable DEBUG from which every section is shown.
DETAILED_LEVEL = 11
# Version of the keys and values of every JSON output. It changes where a reader of the old ones would be wrong.
SCHEMA_VERSION = 1
# Keys of click's `Context.meta`, in which the functions below keep facts about the running command.
_DEBUG = "minimax_tools.debug"  # whether --debug was given
_JSON = "minimax_tools.json"  # whether --json was given
_ARGUMENTS = "minimax_tools.arguments"  # the command line, without the program's name
_SPEAKER = "minimax_tools.speaker"  # name of this process, if several share the terminal
_AFTERWARDS = "minimax_tools.afterwards"  # work for the end of the command
# Options that change nothing but what is printed.
_OUTPUT_OPTIONS = ("--json", "--quiet", "--debug")
# Packages whose log messages are shown.
_PACKAGES = ("minimax_tools", "neuron", "gpu_reference", "compare", "reports")


class CommandEnd(SystemExit):
    """The deliberate end of a command, unlike a SystemExit from code that the command runs."""


def end_command(exit_code: int) -> NoReturn:
    """End the running command with an exit code."""
    raise CommandEnd(exit_code)


class Mm2Command(click.Command):
    """A command whose errors become one message on stderr and the exit code of their class.

    No error gets exit code 1, which means that a port differs. If code of a port exits, that is an error too. `--debug`
    prints the traceback as well.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options. Some of them read a remote address, and may fail as the command itself may."""
        try:
            return super().parse_args(ctx, args)
        except (Mm2Error, KeyboardInterrupt) as error:
            _fail(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and then what was left for its end."""
        try:
            try:
                result = super().invoke(ctx)
            except CommandEnd:
                _end_work(ctx)
                raise
            _end_work(ctx)
            return result
        except (click.ClickException, click.Abort, click.exceptions.Exit, CommandEnd):
            raise
        except SystemExit as error:
            exited = TargetError("code that this command ran exited", found=f"exit code {error.code}")
            exited.__cause__ = error
            _fail(ctx, exited)
        except (Exception, KeyboardInterrupt) as error:
            _fail(ctx, error)


class Mm2Group(click.Group):
    """A group of `Mm2Command`s."""

    command_class = Mm2Command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context. Keep the arguments in it: a command may start itself again as several ranks."""
        arguments = tuple(args)  # click empties the list.
        context = super().make_context(info_name, args, parent, **extra)
        context.meta[_ARGUMENTS] = arguments
        return context


def do_afterwards(ctx: click.Context, work: Callable[[], object]) -> None:
    """Call `work` when the command has come to its own end, with whatever exit code, and has printed its results."""
    ctx.meta.setdefault(_AFTERWARDS, []).append(work)


def given_arguments() -> tuple[str, ...]:
    """Return the command line of the running command, without the program's name."""
    arguments: tuple[str, ...] = click.get_current_context().meta[_ARGUMENTS]
    return arguments


def same_command(program: str, *further: str, without: Collection[str] = ()) -> str:
    """Return the running command as a shell line with further options, and without some and those of the output."""
    left_out = {*_OUTPUT_OPTIONS, *without}
    return shlex.join((program, *(word for word in given_arguments() if word not in left_out), *further))


def speak_as(speaker: str) -> None:
    """Print the running command's error with a name before it, because several processes share the terminal."""
    click.get_current_context().meta[_SPEAKER] = speaker


def remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Switch on tracebacks and debug messages (click callback of `--debug`)."""
    ctx.meta[_DEBUG] = value


def remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    """Print errors as JSON on stdout too (click callback of `--json`)."""
    ctx.meta[_JSON] = value
    return value


def show_progress(ctx: click.Context, _: click.Parameter, quiet: bool) -> bool:
    """Send log messages to stderr, only warnings if quiet; all with --debug (click callback of `--quiet`)."""
    handler = _StderrHandler()
    level = logging.DEBUG if ctx.meta.get(_DEBUG) else logging.WARNING if quiet else logging.INFO
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        # Else a library that sets up the root logger would print every line again.
        logger.propagate = False
    return quiet


def show_warnings_only() -> None:
    """Log only warnings; one of several ranks reports the progress of all."""
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.WARNING)


def versioned(record: Mapping[str, Any], *, next_commands: Sequence[str]) -> dict[str, Any]:
    """Return a command's JSON object with its schema version and the commands to run next, each complete."""
    return {"schema_version": SCHEMA_VERSION, **record, "next": list(next_commands)}


def print_json(record: Mapping[str, Any], *, next_commands: Sequence[str]) -> None:
    """Write one JSON object to stdout, with the commands to run next."""
    value = versioned(record, next_commands=next_commands)
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_text(text: str, *, next_commands: Sequence[str]) -> None:
    """Write a command's text to stdout; below it the commands to run next, one a line, never broken."""
    lines = [text] if text else []
    if next_commands:
        lines += ["", "Next", *(f"  {command}" for command in next_commands)]
    if lines:
        click.echo("\n".join(lines))


def print_error(error: BaseException, *, as_json: bool, speaker: str | None = None) -> int:
    """Print an error that ends a command, with `as_json` on stdout too, and return its exit code.

    `speaker` is the name of this process if several share a terminal.
    """
    message, exit_code = _describe(error)
    if as_json:
        record = {**_no_verdict(exit_code), "error": message, "exit_code": exit_code}
        print_json(record, next_commands=_after_error(error))
    click.echo(f"{'' if speaker is None else f'{speaker}: '}Error: {message}", err=True)
    return exit_code


def shows_details() -> bool:
    """Decide whether the environment variable DEBUG asks for every section."""
    text = os.environ.get("DEBUG", "")
    return text.isdecimal() and int(text) >= DETAILED_LEVEL


def shows_pictures(stream: TextIO) -> bool:
    """Decide whether a stream can show characters beyond ASCII."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _fail(ctx: click.Context, error: BaseException) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        # The reader of stdout has gone, as after `| head`. Without this, Python complains again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ctx.exit(CannotRunError.exit_code)
    if ctx.meta.get(_DEBUG):
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    # With a speaker this is one of several ranks, and only the command that started them prints JSON.
    speaker = ctx.meta.get(_SPEAKER)
    as_json = speaker is None and bool(ctx.meta.get(_JSON))
    ctx.exit(print_error(error, as_json=as_json, speaker=speaker))


def _end_work(ctx: click.Context) -> None:
    """Do the work for the command's end. If it fails, the command fails, but its JSON is on stdout already."""
    for work in ctx.meta.pop(_AFTERWARDS, []):
        try:
            work()
        except (Exception, KeyboardInterrupt) as error:
            ctx.meta[_JSON] = False
            _fail(ctx, error)


def _describe(error: BaseException) -> tuple[str, int]:
    """Return the message for an error, and its exit code."""
    if isinstance(error, Mm2Error):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", CannotRunError.exit_code
    message = f"unexpected {type(error).__name__}: {error}. Run again with --debug for the traceback."
    return message, CannotRunError.exit_code


def _after_error(error: BaseException) -> tuple[str, ...]:
    """Return the commands that an error names, or the help of a command that was used wrongly."""
    context = click.get_current_context(silent=True)
    if isinstance(error, UsageError) and context is not None:
        return (f"{context.command_path} --help",)
    return error.commands if isinstance(error, Mm2Error) else ()


def _no_verdict(exit_code: int) -> dict[str, Any]:
    """Return the JSON keys of a comparison that could not run, whichever command it was; {} for other exit codes."""
    if exit_code != CannotRunError.exit_code:
        return {}
    return {"verdict": "incomparable", "compared": 0, "of": 0, "blame": []}
