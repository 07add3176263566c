"""Groups of commands, each imported when it is called; a command of mm2 begun as a process.

At the top it imports nothing that takes time: until `begin`, a stop is told by Python, in its own words.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from minimax_tools.command_line.console import Mm2Command, failing_on_lost_help, version_option
from minimax_tools.errors import did_you_mean
from minimax_tools.machine.stops import keep_arguments


def run_command(program: str, module: str, name: str = "main", further: tuple[str, ...] = ()) -> None:
    """Run the click command `name` of a module as `program`; `further` stands before the words of the command line.

    Until the command's libraries are loaded, which may take seconds, a stop ends the process in words.
    """
    begin((program, *sys.argv[1:]))
    from minimax_tools.machine.stops import raise_when_stopped

    command = getattr(importlib.import_module(module), name)
    # `obj` is called once the libraries are loaded.
    command([*further, *sys.argv[1:]], prog_name=program, obj=raise_when_stopped)


def begin(words: Sequence[str]) -> None:
    """Begin a command, whose line is `words`; until `raise_when_stopped`, a stop ends the process in words."""
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    from minimax_tools.command_line.console import print_error
    from minimax_tools.machine.stops import asks_for_json, end_when_stopped, ignore_stops, stopped_error
    from minimax_tools.machine.streams import OutputError, require_streams

    as_json = asks_for_json(words)
    # Registered first, this is called last: what is done is told, and a stop must not replace the exit code.
    atexit.register(ignore_stops)
    # Nothing was done yet: no command would go on from it.
    end_when_stopped(lambda: print_error(stopped_error(words, resumes=False), as_json=as_json))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    try:
        require_streams()
    except OutputError as error:
        sys.exit(print_error(error, as_json=False))
    # torch reads this when it is loaded: threads of compiled code must sleep while they wait. If they spin, they take
    # the cores of threads that read and of other processes: beside one, 8.5 s of processor time became 55 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@dataclass(frozen=True, slots=True)
class CommandPlace:
    """The place of a command that is not loaded yet."""

    name: str  # as users type it; `single-layer` is `single_layer_command` of its module
    module: str

    @property
    def attribute(self) -> str:
        """Name of the command in its module."""
        return f"{self.name.replace('-', '_')}_command"

    @property
    def summary(self) -> str:
        """First sentence of the command's help, read from its file: to import it would take time."""
        package, _, file = self.module.rpartition(".")
        source = Path(importlib.import_module(package).__path__[0], f"{file}.py").read_text(encoding="utf-8")
        after = source.partition(f"def {self.attribute}(")[2]
        help_text = " ".join(after.split('"""')[1].split())
        sentence, ends, _ = help_text.partition(". ")
        return sentence + ends.strip()

    def load(self) -> click.Command:
        """Import the module and return the command."""
        command: click.Command = getattr(importlib.import_module(self.module), self.attribute)
        return command


class Mm2Group(click.Group):
    """A group of `Mm2Command`s in titled sections, with the option --version."""

    command_class = Mm2Command

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._sections: dict[str, tuple[CommandPlace, ...]] = {}
        version_option(self)

    def add_section(self, title: str, folder: str, files: Mapping[str, str]) -> None:
        """Add commands, which the help lists under a title, each with its file in the package `folder`."""
        self._sections[title] = tuple(CommandPlace(name, f"{folder}.{file}") for name, file in files.items())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the help."""
        return [*self._places(), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported if it was not; None if there is none of that name."""
        place = self._places().get(cmd_name)
        return super().get_command(ctx, cmd_name) if place is None else place.load()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context. Keep the arguments in it: a command may start itself again as several ranks."""
        arguments = tuple(args)  # click empties the list.
        context = super().make_context(info_name, args, parent, **extra)
        keep_arguments(context, arguments)
        return context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options. Help that cannot be written is an error of standard output."""
        with failing_on_lost_help(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names."""
        name, known = args[0], self.list_commands(ctx)
        if not ctx.resilient_parsing and not name.startswith("-") and name not in known:
            ctx.fail(f"No such command {name!r}. {did_you_mean(name, known)}".rstrip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        width = max(map(len, self.list_commands(ctx)), default=0)
        for title, places in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(place.name.ljust(width), place.summary) for place in places])

    def _places(self) -> dict[str, CommandPlace]:
        return {place.name: place for places in self._sections.values() for place in places}
