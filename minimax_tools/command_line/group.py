"""Groups of commands. A command's module is imported when the command is called.

Entry: a command of mm2 begun as a process. Streams and signals are in order before a library is loaded.

At the top it imports nothing that takes time: until `begin`, a stop is told by Python, in its own words.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
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


# Title of the commands of a group that belong to no section.
_OTHER_COMMANDS = "Other"
# Longest first sentence of a command that a group's help shows whole.
_LONGEST_SENTENCE = 200


@dataclass(frozen=True, slots=True)
class CommandPlace:
    """The place of a command that is not loaded yet."""

    name: str  # as users type it
    module: str  # name of its module
    attribute: str  # its name in the module
    summary: str  # the first sentence of its help, which the group's help shows

    def load(self) -> click.Command:
        """Import the module and return the command."""
        command: click.Command = getattr(importlib.import_module(self.module), self.attribute)
        return command


class Mm2Group(click.Group):
    """A group of `Mm2Command`s in titled sections, with the option --version."""

    command_class = Mm2Command

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._places = _Commands(self.commands)
        self.commands = self._places
        self._sections: dict[str, tuple[str, ...]] = {}
        version_option(self)

    def add_section(self, title: str, *places: CommandPlace) -> None:
        """Add commands, which the help lists under a title."""
        for place in places:
            self._places.add(place)
        names = tuple(place.name for place in places)
        self._sections[title] = (*self._sections.get(title, ()), *names)

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
        """Return the command that the first argument names.

        Raises:
            click.UsageError: There is none; the message suggests near names.
        """
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and name not in self.commands:
            near = did_you_mean(name, self.commands)
            ctx.fail(f"No such command {name!r}. {near}".rstrip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        titled = {name for names in self._sections.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in titled)
        sections = {**self._sections, _OTHER_COMMANDS: others}
        width = max((len(name) for name in self.commands), default=0)
        for title, names in sections.items():
            rows = [(name.ljust(width), self._places.summary_of(name)) for name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _Commands(MutableMapping[str, click.Command]):
    """The commands of a group by name, each loaded when it is asked for."""

    def __init__(self, loaded: MutableMapping[str, click.Command]) -> None:
        self._loaded = dict(loaded)
        self._places: dict[str, CommandPlace] = {}

    def add(self, place: CommandPlace) -> None:
        self._places[place.name] = place

    def summary_of(self, name: str) -> str:
        if name in self._places:
            return self._places[name].summary
        return self._loaded[name].get_short_help_str(limit=_LONGEST_SENTENCE)

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            self._loaded[name] = self._places[name].load()
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._loaded})

    def __len__(self) -> int:
        return len({**self._places, **self._loaded})
