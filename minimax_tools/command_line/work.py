"""Work: what a command does, in a module that is imported when the command runs.

A command's declaration, its options and its help, imports little: help, errors of usage and completions take a moment.
Its work imports torch, which takes seconds.

    @click.command("memory", cls=Mm2Command)
    @model_option
    @done_by("minimax_tools.commands.work.memory", "print_memory")
    def memory_command() -> None:
        'Print what a checkpoint takes.'
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from minimax_tools.machine.importing import importing

# Attribute of a command's function; functools.wraps hands it on.
_WORK = "__mm2_work__"


@dataclass(frozen=True, slots=True)
class Work:
    """The place of a function that does a command's work."""

    module: str
    function: str  # takes the command's values by name

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return function


def done_by(module: str, function: str) -> Callable[[Callable[[], None]], Callable[..., Any]]:
    """Return the decorator of a declaration whose command calls a function of a module that is not loaded yet."""
    work = Work(module, function)

    def decorate(declaration: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(declaration)
        def run(**values: Any) -> Any:
            return work.load()(**values)

        add_work(run, work)
        return run

    return decorate


def add_work(function: Callable[..., Any], work: Work) -> None:
    """Let a command that calls `function` load further work before it runs."""
    setattr(function, _WORK, (*getattr(function, _WORK, ()), work))


def load_work(ctx: click.Context) -> None:
    """Import the work of a command that is about to run; then call `ctx.obj`, if the process gave a function there.

    So a process knows when its libraries are loaded, and an exception comes out of the middle of none of them.
    """
    with importing():
        for work in work_of(ctx.command):
            work.load()
    if callable(ctx.obj):
        ctx.obj()


def work_of(command: click.Command) -> tuple[Work, ...]:
    """Return the places of a command's work; () for a command that works where it is declared."""
    work: tuple[Work, ...] = getattr(command.callback, _WORK, ())
    return work
