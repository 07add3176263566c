"""`mm2-split extract`: slices of a plan, cut out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options
from minimax_tools.command_line.work import done_by
from minimax_tools.commands.options import plan_model_option, shard_size_option
from minimax_tools.slices.layout import DEFAULT_FOLDER, FileFormat


@click.command("extract", cls=Mm2Command)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Plan file, written by mm2-split plan.",
)
@click.option(
    "--plan-of-names",
    "names_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help='Instead of --plan, a JSON file that lists each node\'s tensors: {"node_001": {"layer_names": ["…"]}}. '
    "Needs --model.",
)
@click.option(
    "--node", "nodes", multiple=True, metavar="NAME", help="Node whose slice is cut. Repeat for several."
)
@click.option("--all-nodes", is_flag=True, help="Cut the slices of all nodes that hold something.")
@plan_model_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Folder of the slice; of several slices, their parent folder. Default: ./{DEFAULT_FOLDER}/NODE.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice([file_format.value for file_format in FileFormat]),
    help="Files to write: a safetensors checkpoint, or one PyTorch state dict. Default: safetensors; pth with "
    "--plan-of-names.",
)
@shard_size_option("one shard per shard of the checkpoint")
@click.option(
    "--digests",
    "with_digests",
    is_flag=True,
    help="Record each tensor's sha256. Reads every tensor once more.",
)
@output_options
@done_by("minimax_tools.commands.work.extract", "extract_slices")
def extract_command() -> None:
    """Cut nodes' slices out of a checkpoint, byte for byte, each into its own folder.

    --node verifies the slice against the headers of its files; --all-nodes verifies the whole plan against all files.

    Example: mm2-split extract --plan plan.json --node a100
    """
