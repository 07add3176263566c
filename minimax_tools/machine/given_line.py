"""The command line of the running command, as it was given."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

import click

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
