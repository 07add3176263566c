"""Command-line options that mean the same in every command, declared once, and the values that they are read into."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from minimax_tools.capture.store import (
    CAPTURES_VARIABLE,
    DEFAULT_CAPTURES,
    DEVICE_SIDE,
    capture_directory,
    captures_folder,
    list_captures,
)
from minimax_tools.command_line.console import LateValue, remember_debug, remember_json, show_progress
from minimax_tools.dumps.format_names import FORMAT_NAMES
from minimax_tools.errors import UsageError
from minimax_tools.machine.importing import importing
from minimax_tools.machine.size import parse_size
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.sites import SITE_LEVELS
from minimax_tools.model.span import Span
from minimax_tools.remote.address import RemoteAddress, is_remote
from minimax_tools.stored_dtype import StoredDtype
from minimax_tools.text.input_request import InputRequest

if TYPE_CHECKING:
    import torch

    from minimax_tools.capture.manifest import Description
    from minimax_tools.dumps.opening import DumpReading


# Dtypes that weights and activations are computed in.
DEFAULT_DTYPE = "bfloat16"
DTYPE_NAMES = (DEFAULT_DTYPE, "float32")


def read_dtype(_: click.Context, __: click.Parameter, name: str) -> LateValue:
    """Return the dtype of torch that an option names (a click callback)."""

    def find(_: click.Context) -> torch.dtype:
        with importing():
            import torch

        dtype: torch.dtype = getattr(torch, name)
        return dtype

    return LateValue(find)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStore:
    """The place of a run's capture, as the user chose it."""

    captures: Path  # folder of all captures
    output_dir: Path | None = None  # capture directory of this run; None for a directory under `captures`
    overwrite: bool = False  # whether the run may replace another one

    def directory(self, side: str, run_name: str) -> Path:
        """Return the capture directory of a run of one side."""
        return self.output_dir or capture_directory(self.captures, side, run_name)

    def saved(self, side: str, run_name: str) -> Path:
        """Return the directory of a saved run: of its numbered folders the one that was written last."""
        from minimax_tools.capture.resumption import numbered_directories

        directory = self.directory(side, run_name)
        if self.output_dir is not None:
            return directory
        saved = numbered_directories(directory)
        return saved[0] if saved else directory

    def place_run(self, run_name: str, description: Description) -> Path:
        """Return the directory for a port's run, which replaces no other run unless the user asked for that.

        If another run has the usual place, it is a numbered folder beside it.
        """
        from minimax_tools.capture.resumption import find_free_directory, refuse_other_run

        directory = self.directory(DEVICE_SIDE, run_name)
        if self.overwrite:
            return directory
        if self.output_dir is None:
            return find_free_directory(directory, description)
        refuse_other_run(directory, description)
        return directory


Command = TypeVar("Command", bound=Callable[..., Any])


def stack_options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator for several options, shown in the order given."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def grouped_as(name: str, build: Callable[..., Any], *, prefix: str = "") -> Callable[[Command], Command]:
    """Return a decorator that gives a command one value in place of the options that the value is built from.

    Args:
        name: Parameter of the command that gets the value.
        build: Function that builds the value. Its parameters have the names of the options that it takes. An option
            that a decorator above this one takes is no longer there: then `build` uses its parameter's default.
        prefix: Text before the parameters' names in the options' names: `gpu_` for `gpu_format_name`.
    """
    parameters = tuple(inspect.signature(build).parameters)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            names = [parameter for parameter in parameters if prefix + parameter in values]
            options = {parameter: values.pop(prefix + parameter) for parameter in names}
            return command(**values, **{name: build(**options)})

        decorated: Command = run  # type: ignore[assignment]  # functools.wraps keeps what click reads
        return decorated

    return decorate


def read_span(start_layer: int | None, end_layer: int | None, layers: str | None) -> Span | None:
    """Read the span options; None if none was given.

    Raises:
        UsageError: Both notations were used, or only one end was given.
    """
    if layers is not None and (start_layer is not None or end_layer is not None):
        raise UsageError(
            "--layers and --start-layer/--end-layer were both given", next_step="Use one of them."
        )
    if layers is not None:
        return Span.parse(layers)
    if start_layer is None and end_layer is None:
        return None
    if start_layer is None or end_layer is None:
        raise UsageError(
            "--start-layer and --end-layer come together", next_step="Give both, or --layers A:B."
        )
    return Span.inclusive(start_layer, end_layer)


def _read_dump_reading(format_name: str | None, map_path: Path | None) -> DumpReading:
    from minimax_tools.dumps.name_map import NameMap
    from minimax_tools.dumps.opening import DumpReading

    return DumpReading(format=format_name, names=NameMap() if map_path is None else NameMap.read(map_path))


def _parse_numbers(*, least: int, expected: str) -> Callable[..., tuple[int, ...]]:
    """Return a click callback that reads integers such as `96,61`; () if the option is absent."""

    def parse(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
        if value is None:
            return ()
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < least:
            raise click.BadParameter(f"{value!r}: expected {expected}", param=parameter)
        return numbers

    return parse


parse_lengths = _parse_numbers(least=1, expected="positive lengths, for example 96,61")
_parse_start_positions = _parse_numbers(least=0, expected="positions from 0 on, for example 0,4096,65536")


def parse_size_option(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Read a size such as `2GB` as bytes (a click callback); None if the option is absent."""
    if value is None:
        return None
    try:
        size_bytes = parse_size(value)
    except ValueError:
        # Refused below, like a size of zero.
        size_bytes = 0
    if size_bytes < 1:
        raise click.BadParameter(
            f"{value!r}: expected a size, for example 500MB, 2GB or 64MiB", param=parameter
        )
    return size_bytes


def _model_option(*, required: bool) -> Callable[[Command], Command]:
    return click.option(
        "--model",
        envvar="MM2_MODEL",
        required=required,
        metavar="FOLDER|HUB_ID|s3://…",
        help="Checkpoint: a folder, a hub id or s3://bucket/folder [env: MM2_MODEL].",
    )


model_option = _model_option(required=True)
# For commands that can learn the model from a plan, or do without one.
optional_model_option = _model_option(required=False)
true_size_option = click.option(
    "--preset",
    type=click.Choice([family.preset for family in FAMILIES.values()]),
    default=MINIMAX_M2.preset,
    show_default=True,
    help="Published model that is meant without --model: "
    + ", ".join(f"{family.preset_words} ({family.preset})" for family in FAMILIES.values())
    + ".",
)
captures_option = click.option(
    "--captures",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=CAPTURES_VARIABLE,
    default=DEFAULT_CAPTURES,
    show_default=True,
    help="Folder of all captures [env: MM2_CAPTURES].",
)
_folder_options = stack_options(
    captures_option,
    click.option(
        "--output-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Capture directory of this run. Default: one under --captures.",
    ),
)
# For searches, which keep a record of their runs and begin anew with --anew.
search_store_options = stack_options(_folder_options, grouped_as("store", CaptureStore))
store_options = stack_options(
    _folder_options,
    click.option(
        "--overwrite",
        is_flag=True,
        help="Replace a finished capture of another port, golden or other options. Default: keep it.",
    ),
    grouped_as("store", CaptureStore),
)
_dtype_option = functools.partial(
    click.option,
    "--dtype",
    type=click.Choice(DTYPE_NAMES),
    default=DEFAULT_DTYPE,
    show_default=True,
    help="Dtype of weights and activations.",
)
dtype_option = _dtype_option(callback=read_dtype)
# The same as a `StoredDtype`, for commands that need no torch.
memory_dtype_option = _dtype_option(callback=lambda _, __, name: StoredDtype.from_json(name))
run_options = stack_options(
    click.option(
        "--sites",
        "sites_level",
        type=click.Choice(list(SITE_LEVELS)),
        default="all",
        show_default=True,
        help="Sites to capture in each layer.",
    ),
    dtype_option,
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers."),
)
text_options = stack_options(
    click.option("--prompt", "prompts", multiple=True, help="Text of a row. Repeat for several rows."),
    click.option(
        "--prompts-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="File of prompts: one per line, or a JSON list of strings.",
    ),
    click.option("--chat", is_flag=True, help="Apply the tokenizer's chat template. Default: raw text."),
)
padding_options = stack_options(
    click.option(
        "--padding-side",
        type=click.Choice(["left", "right"]),
        help="Side on which shorter rows are padded. Default: right; of mm2's own rows one is padded on the left.",
    ),
    click.option(
        "--pad-to",
        callback=parse_lengths,
        metavar="128,512",
        help="Bucket lengths in tokens; rows are padded to the smallest that fits. Default: the longest row.",
    ),
)
max_length_option = click.option(
    "--max-length",
    type=click.IntRange(min=1),
    help="Longest row in tokens; longer rows are cut. Default: no limit.",
)
quick_option = click.option(
    "--quick",
    is_flag=True,
    help="Two short rows from position 0 in place of the default rows: faster, and shows less; every verdict says so.",
)
input_options = stack_options(
    text_options,
    click.option(
        "--input-ids",
        multiple=True,
        metavar="1,2,3|FILE",
        help="Token ids of a row, or a JSON file of rows. Repeat for several rows.",
    ),
    click.option(
        "--seq-len",
        "seq_lens",
        callback=parse_lengths,
        metavar="96,61",
        help="Rows of random token ids, one per length in tokens.",
    ),
    quick_option,
    click.option(
        "--batch-size", type=click.IntRange(min=1), default=1, help="Random rows of each length. Default: 1."
    ),
    click.option(
        "--last-tokens",
        type=click.IntRange(min=0),
        default=0,
        metavar="16",
        help="Keep and judge the last tokens of each row alone: rows of thousands of tokens take little disk. "
        "Default: all.",
    ),
    padding_options,
    max_length_option,
    click.option(
        "--start-positions",
        callback=_parse_start_positions,
        metavar="0,4096,65536",
        help="Position of each row's first token: one per row, or one for all. Default: 0.",
    ),
    grouped_as("inputs", InputRequest),
)
layer_option = click.option("--layer", type=click.IntRange(min=0), required=True, help="Layer, from 0.")
span_options = stack_options(
    click.option("--start-layer", type=click.IntRange(min=0), help="First layer, from 0."),
    click.option("--end-layer", type=click.IntRange(min=0), help="Last layer, included."),
    click.option(
        "--layers",
        metavar="A:B",
        help="Layers A to B-1, instead of --start-layer and --end-layer. Default: all.",
    ),
    grouped_as("span", read_span),
)
memory_budget_option = click.option(
    "--memory-budget",
    callback=parse_size_option,
    metavar="12GB|12GiB",
    help="Abort before anonymous memory exceeds this size. Default: no limit.",
)


class RenamedOption(click.Option):
    """An option with a second, older name; errors say the first one."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the option's first name."""
        return f"'{self.opts[0]}'"


def reading_options(
    side: str = "", whose: str = "the directory", *, old_side: str = ""
) -> Callable[[Command], Command]:
    """Return --format and --map, given to the command as `reading`.

    Args:
        side: Prefix of the options in a command with several sides: `run-` for --run-format and `run_reading`.
        whose: The directory that they are about, in words, for the help.
        old_side: Prefix of second names of the same options; empty for none.
    """
    prefix = side.replace("-", "_")
    old_names = [(f"--{old_side}{name}",) if old_side else () for name in ("format", "map")]
    return stack_options(
        click.option(
            f"--{side}format",
            *old_names[0],
            f"{prefix}format_name",
            cls=RenamedOption,
            type=click.Choice(FORMAT_NAMES),
            help=f"Tool that wrote {whose}. Default: recognised from the files.",
        ),
        click.option(
            f"--{side}map",
            *old_names[1],
            f"{prefix}map_path",
            cls=RenamedOption,
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            metavar="FILE.yaml",
            help=f"Map from sites to tensors in {whose}, for another tool's dump.",
        ),
        grouped_as(f"{prefix}reading", _read_dump_reading, prefix=prefix),
    )


_debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=remember_debug,
    help="Print tracebacks and debug messages.",
)
_quiet_option = click.option(
    "--quiet", is_flag=True, expose_value=False, callback=show_progress, help="Print no progress."
)
output_options = stack_options(
    _debug_option,
    click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=remember_json, help="Print JSON."
    ),
    _quiet_option,
)
# Of commands that judge a run: `as_json` is a form of JSON, or None for text.
WHOLE_JSON, SUMMARY_JSON = "whole", "summary"
judging_output_options = stack_options(
    _debug_option,
    click.option(
        "--json",
        "as_json",
        is_flag=False,
        flag_value=WHOLE_JSON,
        type=click.Choice([WHOLE_JSON, SUMMARY_JSON]),
        metavar="[=summary]",
        is_eager=True,
        callback=remember_json,
        help="Print JSON: every figure of every site, or a summary: the verdict, what was compared, limits and causes.",
    ),
    _quiet_option,
)


class CapturePath(click.Path):
    """The folder of a capture, or the address of one: its mirror's folder, whose files come when they are read.

    No server is asked while options are read, so a wrong command line is told at once.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the placeholder in the help."""
        return "FOLDER|s3://…|hf://…"

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the folder that `value` names; of an address, what finds the folder when the command runs."""
        is_completion = ctx is not None and ctx.resilient_parsing
        if not isinstance(value, str) or not is_remote(value) or is_completion:
            return super().convert(value, param, ctx)
        address = RemoteAddress.parse(value)

        def find(_: click.Context) -> Path:
            from minimax_tools.capture.mirror import mirror_capture

            return mirror_capture(address)

        return LateValue(find)


Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_captures(side: str) -> Completer:
    """Return a completer of an option that names a capture of a side; without a match the shell offers folders."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = sorted(str(capture) for capture in list_captures(captures_folder(context) / side))
        matching = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return matching or [CompletionItem(incomplete, type="dir")]

    return complete
