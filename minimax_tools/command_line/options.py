"""The options that mean the same in every command, declared once.

| decorator | options |
|---|---|
| `model_option`, `optional_model_option` | --model (env MM2_MODEL) |
| `captures_option` | --captures (env MM2_CAPTURES) |
| `store_options` | --captures, --output-dir |
| `run_options` | --sites, --dtype, --seed |
| `input_options` | --prompt, --prompts-file, --chat, --input-ids, --seq-len, --batch-size, |
| | --padding-side, --pad-to, --max-length, --start-positions |
| `span_options` | --start-layer, --end-layer, --layers |
| `layer_option` | --layer |
| `memory_budget_option` | --memory-budget |
| `reading_options` | --format, --map |
| `output_options` | --json, --quiet, --debug |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from minimax_tools.command_line.console import remember_debug, remember_json, show_progress
from minimax_tools.dumps.formats import FORMATS
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.opening import DumpReading
from minimax_tools.errors import UsageError
from minimax_tools.machine.size import parse_size
from minimax_tools.model.sites import SITE_LEVELS
from minimax_tools.model.span import Span
from minimax_tools.text.prompts import InputRequest

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DEFAULT_CAPTURES = Path("mm2-captures")


def stack_options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in the order given."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _parse_dtype(_: click.Context, __: click.Parameter, value: str) -> torch.dtype:
    return DTYPES[value]


def parse_lengths(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Click callback: `96,61` as a tuple of positive lengths; empty where the option is absent."""
    if value is None:
        return ()
    try:
        lengths = tuple(int(part) for part in value.split(","))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise click.BadParameter(f"{value!r}: expected positive lengths, for example 96,61", param=parameter)
    return lengths


def parse_start_positions(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Click callback: `0,4096` as a tuple of positions from 0 on; empty where the option is absent."""
    if value is None:
        return ()
    try:
        positions = tuple(int(part) for part in value.split(","))
    except ValueError:
        positions = (-1,)
    if min(positions) < 0:
        raise click.BadParameter(
            f"{value!r}: expected positions from 0 on, for example 0,4096,65536", param=parameter
        )
    return positions


def parse_size_option(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Click callback: `2GB` as bytes, at least one; None where the option is absent."""
    if value is None:
        return None
    try:
        size_bytes = parse_size(value)
    except ValueError:
        size_bytes = 0
    if size_bytes < 1:
        raise click.BadParameter(
            f"{value!r}: expected a size, for example 500MB, 2GB or 64MiB", param=parameter
        )
    return size_bytes


model_option = click.option(
    "--model",
    envvar="MM2_MODEL",
    required=True,
    metavar="FOLDER|HUB_ID",
    help="Checkpoint: a folder or a hub id [env: MM2_MODEL].",
)
# Where something else, such as a plan, tells the model if nobody does.
optional_model_option = click.option(
    "--model",
    envvar="MM2_MODEL",
    metavar="FOLDER|HUB_ID",
    help="Checkpoint: a folder or a hub id [env: MM2_MODEL].",
)
captures_option = click.option(
    "--captures",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="MM2_CAPTURES",
    default=DEFAULT_CAPTURES,
    show_default=True,
    help="Folder that holds all captures [env: MM2_CAPTURES].",
)
store_options = stack_options(
    captures_option,
    click.option(
        "--output-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Capture directory of this run, instead of one under --captures.",
    ),
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    default="bfloat16",
    show_default=True,
    callback=_parse_dtype,
    help="Dtype of weights and activations.",
)
run_options = stack_options(
    click.option(
        "--sites",
        "sites_level",
        type=click.Choice(list(SITE_LEVELS)),
        default="all",
        show_default=True,
        help="Which points of a layer to capture.",
    ),
    dtype_option,
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of every random number."),
)
input_options = stack_options(
    click.option("--prompt", "prompts", multiple=True, help="A prompt; repeat for several rows."),
    click.option(
        "--prompts-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Prompts: one a line, or a JSON list of strings.",
    ),
    click.option(
        "--chat", is_flag=True, help="Apply the tokenizer's chat template; the default is raw text."
    ),
    click.option(
        "--input-ids", multiple=True, metavar="1,2,3|FILE", help="Token ids of a row, or a JSON file of rows."
    ),
    click.option(
        "--seq-len",
        "seq_lens",
        callback=parse_lengths,
        metavar="96,61",
        help="Random ids: one row per length.",
    ),
    click.option(
        "--batch-size", type=click.IntRange(min=1), default=1, help="Repeat the random rows so many times."
    ),
    click.option(
        "--padding-side",
        type=click.Choice(["left", "right"]),
        default="right",
        show_default=True,
        help="Where shorter rows are padded.",
    ),
    click.option(
        "--pad-to", callback=parse_lengths, metavar="128,512", help="Pad to the smallest bucket that fits."
    ),
    click.option("--max-length", type=click.IntRange(min=1), help="Truncate every row to so many tokens."),
    click.option(
        "--start-positions",
        callback=parse_start_positions,
        metavar="0,4096,65536",
        help="Position of each row's first token: one for each row, or one for all; default 0.",
    ),
)
layer_option = click.option("--layer", type=click.IntRange(min=0), required=True, help="The layer, from 0.")
span_options = stack_options(
    click.option("--start-layer", type=click.IntRange(min=0), help="First layer."),
    click.option("--end-layer", type=click.IntRange(min=0), help="Last layer, included."),
    click.option("--layers", metavar="A:B", help="Layers A to B-1 (half-open), instead of the two above."),
)
memory_budget_option = click.option(
    "--memory-budget",
    callback=parse_size_option,
    metavar="12GB|12GiB",
    help="Stop before this process's own memory, mapped files not counted, would pass this; else no limit.",
)


def reading_options(side: str = "", whose: str = "") -> Callable[[Command], Command]:
    """--format and --map, or, for one of two sides, such as --gpu-format and --gpu-map."""
    return stack_options(
        click.option(
            f"--{side}format",
            type=click.Choice(list(FORMATS)),
            help=f"Which tool wrote {whose or 'the directory'}, where its files do not tell.",
        ),
        click.option(
            f"--{side}map",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            metavar="FILE.yaml",
            help=f"Where sites lie in {whose or 'the directory'}, if another tool wrote it.",
        ),
    )


output_options = stack_options(
    click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=remember_debug,
        help="Show tracebacks.",
    ),
    click.option(
        "--json", "as_json", is_flag=True, is_eager=True, callback=remember_json, help="Print JSON."
    ),
    click.option(
        "--quiet", is_flag=True, expose_value=False, callback=show_progress, help="Print no progress."
    ),
)


def read_reading(format_name: str | None, map_path: Path | None) -> DumpReading:
    """How another tool's directory is to be read, as the reading options say.

    Raises:
        UsageError: The map is wrong.
    """
    return DumpReading(format=format_name, names=NameMap() if map_path is None else NameMap.read(map_path))


def read_span(start_layer: int | None, end_layer: int | None, layers: str | None) -> Span | None:
    """The span that the span options describe; None where none was given.

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


def read_input_request(options: dict[str, Any]) -> InputRequest:
    """The input options of a command as one value.

    Raises:
        UsageError: They contradict each other.
    """
    return InputRequest(
        prompts=options["prompts"],
        prompts_file=options["prompts_file"],
        chat=options["chat"],
        input_ids=options["input_ids"],
        seq_lens=options["seq_lens"],
        batch_size=options["batch_size"],
        padding_side=options["padding_side"],
        pad_to=options["pad_to"],
        max_length=options["max_length"],
        start_positions=options["start_positions"],
        seed=options["seed"],
    )


plan_option = click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The plan: a file that mm2-split plan wrote.",
)
