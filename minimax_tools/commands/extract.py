"""`mm2-split extract`: slices of a plan, cut out of a checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from minimax_tools.command_line.console import Mm2Command, print_json, print_text
from minimax_tools.command_line.options import output_options
from minimax_tools.command_line.progress import LayerProgress
from minimax_tools.commands.options import plan_model_option, plan_option, shard_size_option
from minimax_tools.errors import UsageError, format_count
from minimax_tools.machine.size import format_size
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.cut import DEFAULT_FOLDER, FileFormat, cut_slice
from minimax_tools.slices.folder import SliceFolder, write_slice
from minimax_tools.slices.source import open_source
from minimax_tools.slices.stored_weights import StoredWeights


@click.command("extract", cls=Mm2Command)
@plan_option
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
    default=FileFormat.SAFETENSORS.value,
    show_default=True,
    help="Files to write: a safetensors checkpoint, or one PyTorch state dict.",
)
@shard_size_option("one shard per shard of the checkpoint")
@click.option(
    "--digests",
    "with_digests",
    is_flag=True,
    help="Record each tensor's sha256. Reads every tensor once more.",
)
@output_options
def extract_command(
    plan_file: Path,
    nodes: tuple[str, ...],
    all_nodes: bool,
    model: str | None,
    output: Path | None,
    file_format: str,
    shard_size_bytes: int | None,
    with_digests: bool,
    as_json: bool,
) -> None:
    """Cut nodes' slices out of a checkpoint, byte for byte, each into its own folder.

    --node verifies the slice against the headers of its files; --all-nodes verifies the whole plan against all files.

    Example: mm2-split extract --plan plan.json --node a100
    """
    if bool(nodes) == all_nodes:
        raise UsageError("name the slices to cut in one way", expected="--node NAME or --all-nodes")
    whole_plan = _read_whole_plan(plan_file, model) if all_nodes else None
    # A node that was named twice is cut once.
    names = dict.fromkeys(nodes if whole_plan is None else [slice_.node.name for slice_ in whole_plan.used])
    slices = []
    for name in names:
        # The tensor lists of all slices take a hundred megabytes, so without --all-nodes only this node's is read.
        plan = whole_plan or PartitionPlan.read(plan_file, tensors_of=name)
        source = StoredWeights.of_slice(model or plan.model, plan.slice_of(name))
        cut = cut_slice(
            plan, name, source, file_format=FileFormat(file_format), shard_size_bytes=shard_size_bytes
        )
        # --output is the folder of a single --node, and the parent of the folders of several.
        is_single = not all_nodes and len(names) == 1
        folder = output if output is not None and is_single else (output or DEFAULT_FOLDER) / name
        with LayerProgress(len(cut.shards), label=name, unit="file") as progress:
            slices.append(write_slice(cut, folder, with_digests=with_digests, progress=progress))
    following = [
        shlex.join(
            (
                "mm2-split",
                "verify",
                "--plan",
                str(plan_file),
                "--node",
                name,
                "--slices",
                str(slice_.folder.parent),
            )
        )
        for name, slice_ in zip(names, slices, strict=True)
        # A slice is looked for in a folder of its node's name.
        if slice_.folder.name == name
    ]
    if as_json:
        record = {"plan": str(plan_file), "slices": [_as_values(slice_) for slice_ in slices]}
        print_json(record, next_commands=following)
    else:
        print_text("\n".join(map(_as_line, slices)), next_commands=following)


def _read_whole_plan(plan_file: Path, model: str | None) -> PartitionPlan:
    """Read a plan, and verify against the checkpoint that its slices cover all tensors."""
    plan = PartitionPlan.read(plan_file)
    source = open_source(model or plan.model)
    plan.validate(source.entries, source.architecture, folder=source.folder)
    return plan


def _as_values(slice_: SliceFolder) -> dict[str, Any]:
    layers = slice_.description.layers
    return {
        "node": slice_.description.node,
        "folder": str(slice_.folder),
        "layers": None if layers is None else [layers.start, layers.stop],
        "has_embedding": slice_.description.has_embedding,
        "has_head": slice_.description.has_head,
        "num_tensors": len(slice_.description.tensors),
        "size_bytes": slice_.size_bytes,
        "files": [file.name for file in slice_.files],
        "is_new": slice_.is_new,
    }


def _as_line(slice_: SliceFolder) -> str:
    tensors = format_count(len(slice_.description.tensors), "tensor")
    content = f"{tensors} in {format_count(len(slice_.files), 'file')}, {format_size(slice_.size_bytes)}"
    was_there = "" if slice_.is_new else ", was there already, byte for byte"
    return f"{slice_.description.node}: {slice_.folder}, {content}{was_there}"
