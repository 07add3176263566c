"""`mm2-gpu export`: goldens written as the reference captures of another tool."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import complete_captures, output_options
from minimax_tools.command_line.remote_paths import CapturePath
from minimax_tools.command_line.work import done_by
from minimax_tools.dumps.format_names import VLLM_NEURON


@click.command(
    "export",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-gpu export --format vllm-neuron --golden GOLDEN --float32-golden GOLDEN32 "
    "--output-dir REPORT",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([VLLM_NEURON]),
    required=True,
    help="Tool that reads the captures.",
)
@click.option(
    "--golden",
    type=CapturePath(),
    required=True,
    help="BF16 golden, certified.",
    shell_complete=complete_captures(GOLDEN_SIDE),
)
@click.option(
    "--float32-golden",
    type=CapturePath(),
    required=True,
    help="Golden of the same model and tokens, made with --dtype float32 and certified.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="New folder; the tool's own output_dir.",
)
@click.option(
    "--decode",
    "num_decoded",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="The last N tokens of each row were decoded: write a pass for each.",
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="SITE=MODULE",
    help="The port's name of a site's module, such as moe_delta=model.layers.{layer}.block_sparse_moe. Repeatable. "
    "Default: transformers' names.",
)
@click.option(
    "--allow-uncertified", is_flag=True, help="Take goldens without a certificate, or a partial one."
)
@output_options
@done_by("gpu_reference.commands.work.export", "export_goldens")
def export_command() -> None:
    """Write two goldens, in BF16 and in float32, as the reference captures of another tool.

    vLLM Neuron's accuracy debugger compares a port with Hugging Face in float32 and in BF16. It loads the model whole
    for both, and rounds MiniMax-M2's router to BF16. The files written here replace those captures.
    """
