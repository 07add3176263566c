"""The border between the commands and the terminal: exit codes, error text, progress on stderr."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import click

from minimax_tools.errors import Mm2Error

_DEBUG = "minimax_tools.debug"
_JSON = "minimax_tools.json"
_PACKAGES = ("minimax_tools", "neuron", "gpu_reference", "compare", "reports")


_HANDLED = (Mm2Error, OSError, RuntimeError, ValueError, TypeError, LookupError, KeyboardInterrupt)


class CommandFailure(click.ClickException):
    """An error on its way out: one message on stderr, the exit code of the error's class."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Mm2Command(click.Command):
    """A command that turns mm2's errors into messages and exit codes.

    Without `--debug` no traceback is shown; with it the exception passes through.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors become a `CommandFailure`."""
        try:
            return super().invoke(ctx)
        except _HANDLED as error:
            raise _reported(ctx, error) from error


class Mm2Group(click.Group):
    """A group of such commands."""

    command_class = Mm2Command


def remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Click callback of `--debug`: tracebacks and debug messages for this run."""
    ctx.meta[_DEBUG] = value


def remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    """Click callback of `--json`: errors become JSON on stdout too."""
    ctx.meta[_JSON] = value
    return value


def show_progress(ctx: click.Context, _: click.Parameter, quiet: bool) -> bool:
    """Click callback of `--quiet`: send the libraries' log messages to stderr, warnings only if quiet."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logging.DEBUG if ctx.meta.get(_DEBUG) else logging.WARNING if quiet else logging.INFO
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
    return quiet


def print_json(value: Any) -> None:
    """Write one JSON object to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def _reported(ctx: click.Context, error: BaseException) -> BaseException:
    """The failure to raise for `error`, said on stdout too where JSON was asked for; the error itself to debug."""
    if ctx.meta.get(_DEBUG) or isinstance(error, (click.exceptions.Exit, click.Abort)):
        return error
    failure = _as_failure(error)
    if ctx.meta.get(_JSON):
        print_json(_as_json(failure))
    return failure


def _as_failure(error: BaseException) -> CommandFailure:
    if isinstance(error, Mm2Error):
        return CommandFailure(str(error), exit_code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return CommandFailure("interrupted", exit_code=3)
    return CommandFailure(
        f"unexpected {type(error).__name__}: {error}. Run again with --debug for the traceback.", exit_code=3
    )


def _as_json(failure: CommandFailure) -> dict[str, Any]:
    verdict = {"verdict": "incomparable", "compared": 0, "of": 0, "blame": []} if failure.exit_code == 3 else {}
    return {**verdict, "error": failure.message, "exit_code": failure.exit_code}
