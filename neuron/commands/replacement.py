"""The command `mm2-test replacement`: the golden's stream in the files of NxDI and vLLM Neuron, and a search by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import (
    captures_option,
    grouped_as,
    model_option,
    output_options,
    stack_options,
)
from minimax_tools.command_line.work import done_by
from minimax_tools.dumps.format_names import NXDI, VLLM_NEURON
from neuron.options import golden_option

# NxDI's kernels take lengths that are multiples of this.
LENGTH_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementOptions:
    """The options of the command. Their help texts explain them."""

    model: str
    golden: Path
    tool: str
    layer: int | None
    num_decoded: int | None
    bucket: int | None
    is_exhaustive: bool
    is_anew: bool
    output_dir: Path
    captures: Path
    as_json: bool


@click.command(
    "replacement",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test replacement --model DIR --golden GOLDEN --format nxdi --output-dir replaced",
)
@stack_options(
    model_option,
    golden_option("Golden capture of the whole model: gives the stream and the prompts.", required=True),
    click.option(
        "--format",
        "tool",
        type=click.Choice([NXDI, VLLM_NEURON]),
        required=True,
        help="Tool that runs the port.",
    ),
    click.option(
        "--layer",
        type=click.IntRange(min=0),
        help="Layer whose input is to be replaced in the next run; the number of layers for the final norm's. Default: "
        "the one that the search needs next.",
    ),
    click.option(
        "--decode",
        "num_decoded",
        type=click.IntRange(min=0),
        metavar="N",
        help="Decode the last N tokens of each prompt one at a time; more of them show smaller mistakes. "
        "Default: 32, or half of the shortest prompt.",
    ),
    click.option(
        "--bucket",
        type=click.IntRange(min=1),
        metavar="C",
        help="With nxdi: columns of a prefill in the compiled graph, its max_context_length. Default: the prompts' "
        f"length, up to a multiple of {LENGTH_MULTIPLE}.",
    ),
    click.option(
        "--exhaustive",
        "is_exhaustive",
        is_flag=True,
        help="Ask for a run at every layer, from the last on. Default: halve the layers.",
    ),
    click.option(
        "--anew",
        "is_anew",
        is_flag=True,
        help="Drop the logits in the folder: the port has been mended since. Its other files stay.",
    ),
    click.option(
        "--output-dir",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        help="Folder for the files, and for the logits of the runs.",
    ),
    captures_option,
    output_options,
    grouped_as("options", ReplacementOptions),
)
@done_by("neuron.commands.work.replacement", "replace_stream")
def replacement_command() -> None:
    """Bisect a port that is compiled whole: run it by hand, with the golden's stream in place of its own.

    Writes the stream in the files of the tool's tensor replacement, and prints the lines to paste for one run. After
    the run give the same command again: it judges the logits, and asks for the next run, until the last wrong layer is
    named. Judged logits stay in the folder, until --anew drops them for a port that has been mended.

    Exits with 3 while a run is missing, with 1 if a part of the model is wrong, with 0 if none is.
    """
