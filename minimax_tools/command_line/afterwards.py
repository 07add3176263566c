"""Work for the end of a command, after its results are printed."""

from __future__ import annotations

from collections.abc import Callable

import click

# Key of click's `Context.meta`.
_AFTERWARDS = "minimax_tools.afterwards"

Work = Callable[[], object]


def do_afterwards(ctx: click.Context, work: Work) -> None:
    """Call `work` when the command has come to its own end, with whatever exit code, and has printed its results."""
    ctx.meta.setdefault(_AFTERWARDS, []).append(work)


def take_afterwards(ctx: click.Context) -> tuple[Work, ...]:
    """Return the work for the command's end, and forget it: the caller does it, or a process that it starts."""
    return tuple(ctx.meta.pop(_AFTERWARDS, ()))
