"""The commands' way to the terminal: exit codes, errors, JSON, and log messages on stderr."""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from minimax_tools.command_line.help_groups import write_options
from minimax_tools.command_line.project_defaults import FILE_NAME, ProjectDefaults
from minimax_tools.errors import CannotRunError, Mm2Error, TargetError, UsageError, did_you_mean
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.importing import importing
from minimax_tools.machine.stops import forget_interrupt, given_words, keep_arguments, stopped_error
from minimax_tools.machine.streams import OutputError, drop_output, write
from minimax_tools.printable import NEXT_TITLE, printable, printable_json, versioned
from minimax_tools.remote.address import is_remote

logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    _Choice = click.Choice[Any]
else:  # older releases of click have no subscript here
    _Choice = click.Choice


class NearChoice(_Choice):
    """A choice whose error suggests the values that are spelled most alike."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the choice.

        Raises:
            click.BadParameter: There is no such choice.
        """
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = did_you_mean(str(value), map(str, self.choices))
            if not near:
                raise
            message = f"{error.message.rstrip('.')}. {near}"
            raise click.BadParameter(message, ctx=ctx, param=param) from error


@contextmanager
def printable_messages() -> Iterator[None]:
    """Print warnings, and messages of loggers that nobody set up, without control characters while the block runs."""
    format_warning, last_resort = warnings.formatwarning, logging.lastResort

    def format_printable(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return printable(format_warning(message, category, filename, lineno, line))

    # The text alone is changed: who records warnings records them as before.
    warnings.formatwarning = format_printable
    if last_resort is not None:
        formatter_before = last_resort.formatter
        last_resort.setFormatter(_PrintableFormatter())
    try:
        yield
    finally:
        warnings.formatwarning = format_warning
        if last_resort is not None:
            last_resort.setFormatter(formatter_before)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class LocalPath(click.Path):
    """A path that refuses remote addresses, of which pathlib makes folders such as `s3:` without a word."""

    @classmethod
    def like(cls, path: click.Path) -> LocalPath:
        """Return a type that takes what another type of paths takes, but no address."""
        local = cls.__new__(cls)
        local.__dict__.update(path.__dict__)
        return local

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path.

        Raises:
            click.BadParameter: It is an address, or what `click.Path` refuses.
        """
        if isinstance(value, str) and is_remote(value):
            self.fail(f"{value!r} is an address: expected a path of this machine.", param, ctx)
        return super().convert(value, param, ctx)


@dataclass(frozen=True, slots=True)
class LateValue:
    """The value of an option that is found when the command runs: a server is asked for it, or torch has it."""

    find: Callable[[click.Context], Any]


def find_late_values(ctx: click.Context) -> None:
    """Give the command that is about to run its late values."""
    for name, value in ctx.params.items():
        ctx.params[name] = value.find(ctx) if isinstance(value, LateValue) else value


# Variable with the file in which a command leaves its values to the command that started it.
RECORD_VARIABLE = "MM2_STAGE_RECORD"
# Level of the environment variable DEBUG from which every section is shown.
DETAILED_LEVEL = 11
# Keys of click's `Context.meta`, in which the functions below keep facts about the running command.
_DEBUG = "minimax_tools.debug"  # whether --debug was given
_JSON = "minimax_tools.json"  # whether --json was given
_SPEAKER = "minimax_tools.speaker"  # name of this process, if several share the terminal
_DEFAULTS = "minimax_tools.defaults"  # the project's defaults
# Packages whose log messages are shown.
_PACKAGES = ("minimax_tools", "neuron", "gpu_reference", "compare", "reports")
# Placeholders of numbers in the help, in place of click's `INTEGER RANGE`.
_PLACEHOLDERS: Mapping[str, str] = {"integer range": "N", "integer": "N", "float range": "X", "float": "X"}

# A flag, or the form that was asked for, a text.
JsonValue = TypeVar("JsonValue", bool, "str | None")
Command = TypeVar("Command", bound=Callable[..., Any])


class CommandEnd(SystemExit):
    """The deliberate end of a command, unlike a SystemExit from code that the command runs."""


def end_command(exit_code: int) -> NoReturn:
    """End the running command with an exit code."""
    raise CommandEnd(exit_code)


class Mm2Command(click.Command):
    """A command whose errors become one message on stderr and the exit code of their class.

    No error gets exit code 1, which means that a port differs. If code of a port exits, that is an error too. `--debug`
    prints the traceback as well. The help shows the options in groups; options that are not given take the project's
    defaults (`ProjectDefaults`); errors about names suggest near ones. Paths are of this machine,
    unless an option takes addresses (`CapturePath`). `resumes`: the same command goes on from what it had finished.
    """

    def __init__(self, *args: Any, resumes: bool = False, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.resumes = resumes
        for param in self.params:
            if type(param.type) is click.Choice:
                param.type = NearChoice(param.type.choices)
            if type(param.type) is click.Path:
                param.type = LocalPath.like(param.type)
            if isinstance(param, click.Option) and not param.is_flag and param.metavar is None:
                param.metavar = _PLACEHOLDERS.get(param.type.name)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context, with the project's defaults.

        Raises:
            click.UsageError: The command line or the project's file is wrong.
        """
        arguments = tuple(args)  # click empties the list.
        try:
            defaults = ProjectDefaults.find(Path.cwd())
        except UsageError as error:
            if not extra.get("resilient_parsing"):  # a completion never fails
                raise click.UsageError(str(error)) from error
            defaults = ProjectDefaults()
        try:
            context = super().make_context(
                info_name, args, parent, **{"default_map": dict(defaults.values), **extra}
            )
        except click.MissingParameter as error:
            other_ways = _other_ways(error.param)
            raise click.MissingParameter(other_ways, ctx=error.ctx, param=error.param) from error
        except click.BadParameter as error:
            if not _is_given_by(defaults, error):
                raise
            message = f"{error.message} {defaults.path} gives it."
            raise click.BadParameter(message, ctx=error.ctx, param=error.param) from error
        context.meta[_DEFAULTS] = defaults
        keep_arguments(context, arguments)
        return context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, and the project's defaults of this command."""
        write_options(self, ctx, formatter)
        defaults = ProjectDefaults.find(Path.cwd())
        offered = defaults.offered_to(ctx)
        if offered:
            with formatter.section(f"Defaults from {defaults.path}"):
                formatter.write_text(offered)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options. Their errors are those of a command: a text may be no address that mm2 reads."""
        try:
            return super().parse_args(ctx, args)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except (Exception, KeyboardInterrupt) as error:
            _fail(ctx, OutputError.of_help(error) or error)

    def invoke(self, ctx: click.Context) -> Any:
        """Find the command's late values, and run it."""
        try:
            _tell_defaults(ctx)
            find_late_values(ctx)
            with printable_messages():
                return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, CommandEnd):
            raise
        except SystemExit as error:
            exited = TargetError("code that this command ran exited", found=f"exit code {error.code}")
            exited.__cause__ = error
            _fail(ctx, exited)
        except (Exception, KeyboardInterrupt) as error:
            _fail(ctx, error)


@contextmanager
def loading() -> Iterator[None]:
    """Let a command import in the block what it works with: at the top of its file, its help would wait for torch.

    After the block `ctx.obj` is called, if the process gave a function there. So a process knows when its libraries are
    loaded, and an exception comes out of the middle of none of them.
    """
    with importing():
        yield
    tell_loaded = click.get_current_context().obj
    if callable(tell_loaded):
        tell_loaded()


def version_option(command: Command) -> Command:
    """Add --version to a command."""
    # Made anew for each: click's decorator keeps the name of the first program that it showed.
    return click.version_option(package_name="mm2", message="%(prog)s %(version)s")(command)


@contextmanager
def failing_on_lost_help(ctx: click.Context) -> Iterator[None]:
    """End the command in words if its help cannot be written in the block."""
    try:
        yield
    except OSError as error:
        _fail(ctx, OutputError.of_help(error) or error)


def speak_as(speaker: str) -> None:
    """Print the running command's error with a name before it, because several processes share the terminal."""
    click.get_current_context().meta[_SPEAKER] = speaker


def remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Switch on tracebacks and debug messages (click callback of `--debug`)."""
    ctx.meta[_DEBUG] = value


def remember_json(ctx: click.Context, _: click.Parameter, value: JsonValue) -> JsonValue:
    """Print errors as JSON on stdout too (click callback of `--json`)."""
    ctx.meta[_JSON] = bool(value)
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


def leave_record(record: Callable[[], Mapping[str, Any]], text: str, *, next_commands: Sequence[str]) -> None:
    """Leave a command's JSON, and the first line of its text, to the command that started it, if one asked for them."""
    if path := os.environ.get(RECORD_VARIABLE):
        left = {
            "headline": text.partition("\n")[0],
            "record": versioned(record(), next_commands=next_commands),
        }
        with whole_file(Path(path)) as file:
            file.write(printable_json(left))


def print_json(record: Mapping[str, Any], *, next_commands: Sequence[str]) -> None:
    """Write one JSON object to stdout, with the commands to run next."""
    write(printable_json(versioned(record, next_commands=next_commands)))
    if context := click.get_current_context(silent=True):
        context.meta[_JSON] = False  # an error that follows is no second object


def print_text(text: str, *, next_commands: Sequence[str]) -> None:
    """Write a command's text to stdout; below it the commands to run next, one a line, never broken.

    A command that left its values with `leave_record` shows no commands: who started it does.
    """
    lines = [text] if text else []
    if next_commands and RECORD_VARIABLE not in os.environ:
        lines += ["", NEXT_TITLE, *(f"  {printable(command)}" for command in next_commands)]
    if lines:
        write("\n".join(lines))


def print_then_report(text: str, report: Callable[[], str] | None, *, next_commands: Sequence[str]) -> None:
    """Print a verdict; then write its report, if any, and print that; then the commands to run next.

    So a full disk costs the report, and not the verdict.
    """
    print_text(text, next_commands=() if report else next_commands)
    if report:
        print_text(report(), next_commands=next_commands)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Write plain text to stdout, or to stderr; control characters become escapes."""
    write(printable(text), to_stderr=to_stderr)


def print_error(error: BaseException, *, as_json: bool, speaker: str | None = None) -> int:
    """Print an error that ends a command, with `as_json` on stdout too, and return its exit code.

    `speaker` is the name of this process if several share a terminal.
    """
    message, exit_code = _describe(error)
    record = {**_no_verdict(exit_code), "error": message, "exit_code": exit_code}
    if speaker is None:
        with suppress(OSError):
            leave_record(lambda: record, "", next_commands=_after_error(error))
    if as_json:
        try:
            print_json(record, next_commands=_after_error(error))
        except OutputError:
            drop_output()  # stderr tells the error
    say(f"{'' if speaker is None else f'{speaker}: '}Error: {message}", to_stderr=True)
    untold = [command for command in _named_commands(error) if command not in message]
    if untold and not as_json:
        say("\n".join(["", NEXT_TITLE, *(f"  {command}" for command in untold)]), to_stderr=True)
    return exit_code


def shows_details() -> bool:
    """Decide whether the environment variable DEBUG asks for every section."""
    text = os.environ.get("DEBUG", "")
    return text.isdecimal() and int(text) >= DETAILED_LEVEL


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), to_stderr=True)


def _other_ways(param: click.Parameter | None) -> str:
    """Say where a missing option may be given instead; an empty text if only on the command line."""
    if param is None or param.param_type_name != "option" or not param.envvar:
        return ""
    key = param.opts[0].lstrip("-").replace("-", "_")
    return f"Give it, or set the environment variable {param.envvar}, or write {key} = … into {FILE_NAME}."


def _is_given_by(defaults: ProjectDefaults, error: click.BadParameter) -> bool:
    if error.ctx is None or error.param is None or error.param.name is None:
        return False
    source = error.ctx.get_parameter_source(error.param.name)
    return source is ParameterSource.DEFAULT_MAP and error.param.name in defaults.values


def _tell_defaults(ctx: click.Context) -> None:
    """Log which options the project's file gave, on the lead of several ranks."""
    defaults: ProjectDefaults = ctx.meta.get(_DEFAULTS, ProjectDefaults())
    used = defaults.used_by(ctx)
    if used and os.environ.get("RANK", "0") == "0":
        logger.info("From %s: %s", defaults.path, used)


def _fail(ctx: click.Context, error: BaseException) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        # The reader of stdout has gone, as after `| head`.
        drop_output()
        ctx.exit(CannotRunError.exit_code)
    if isinstance(error, OutputError):
        drop_output()
        ctx.meta[_JSON] = False
    if isinstance(error, KeyboardInterrupt):
        error = _stopped(ctx)
    if ctx.meta.get(_DEBUG):
        say("".join(traceback.format_exception(error)).rstrip("\n"), to_stderr=True)
    # With a speaker this is one of several ranks, and only the command that started them prints JSON.
    speaker = ctx.meta.get(_SPEAKER)
    as_json = speaker is None and bool(ctx.meta.get(_JSON))
    ctx.exit(print_error(error, as_json=as_json, speaker=speaker))


def _stopped(ctx: click.Context) -> CannotRunError:
    forget_interrupt()
    resumes = isinstance(ctx.command, Mm2Command) and ctx.command.resumes
    # A rank is started by another program, whose command line it does not know.
    is_rank = _SPEAKER in ctx.meta
    return stopped_error(() if is_rank else given_words(ctx), resumes=resumes)


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Mm2Error):
        return str(error), error.exit_code
    what = f"unexpected {type(error).__name__}: {error}. Run again with --debug for the traceback."
    return what, CannotRunError.exit_code


def _after_error(error: BaseException) -> tuple[str, ...]:
    """Return the commands that an error names, or the help of a command that was used wrongly."""
    context = click.get_current_context(silent=True)
    if isinstance(error, UsageError) and context is not None:
        return (f"{context.command_path} --help",)
    return _named_commands(error)


def _named_commands(error: BaseException) -> tuple[str, ...]:
    return error.commands if isinstance(error, Mm2Error) else ()


def _no_verdict(exit_code: int) -> dict[str, Any]:
    """Return the JSON keys of a comparison that could not run, whichever command it was; {} for other exit codes."""
    if exit_code != CannotRunError.exit_code:
        return {}
    return {"verdict": "incomparable", "compared": 0, "of": 0, "blame": []}
