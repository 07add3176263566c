"""`mm2-split extract`: slices of a plan, cut out of a checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import output_options
from minimax_tools.commands.options import plan_model_option, shard_size_option
from minimax_tools.errors import UsageError, format_count
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.machine.size import format_size
from minimax_tools.slices.description import DEFAULT_FOLDER, FileFormat

if TYPE_CHECKING:
    from minimax_tools.slices.folder import SliceFolder


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
def extract_command(
    plan_file: Path | None,
    names_file: Path | None,
    nodes: tuple[str, ...],
    all_nodes: bool,
    model: str | None,
    output: Path | None,
    file_format: str | None,
    shard_size_bytes: int | None,
    with_digests: bool,
    as_json: bool,
) -> None:
    """Cut nodes' slices out of a checkpoint, byte for byte, each into its own folder.

    --node verifies the slice against the headers of its files; --all-nodes verifies the whole plan against all files.

    Example: mm2-split extract --plan plan.json --node a100
    """
    with loading():
        from minimax_tools.slices.folder import write_slice
        from minimax_tools.slices.slice_plans import named_cuts, stage_cuts

    if bool(nodes) == all_nodes:
        raise UsageError("name the slices to cut in one way", expected="--node NAME or --all-nodes")
    if (plan_file is None) == (names_file is None):
        raise UsageError("name the plan in one way", expected="--plan FILE or --plan-of-names FILE")
    # A node that was named twice is cut once.
    names = tuple(dict.fromkeys(nodes))
    make_cuts, path, usual_format = (
        (stage_cuts, plan_file, "safetensors") if names_file is None else (named_cuts, names_file, "pth")
    )
    assert path is not None, "one of two plans is named"
    cuts = make_cuts(
        path,
        names,
        model=model,
        file_format=FileFormat(file_format or usual_format),
        shard_size_bytes=shard_size_bytes,
    )
    slices = []
    for cut in cuts:
        name = cut.description.node
        # --output is the folder of a single --node, and the parent of the folders of several.
        folder = output if output is not None and len(names) == 1 else (output or DEFAULT_FOLDER) / name
        with LayerProgress(len(cut.shards), label=name, unit="file") as progress:
            slices.append(write_slice(cut, folder, with_digests=with_digests, progress=progress))
    # The first slices may be hours old.
    for slice_ in slices:
        slice_.require_files()
    # `mm2-split verify` takes a plan of stages, and looks for a slice in a folder of its node's name.
    following = [
        _verify(plan_file, slice_.folder)
        for slice_ in slices
        if plan_file is not None and slice_.folder.name == slice_.description.node
    ]
    if as_json:
        record = {"plan": str(plan_file or names_file), "slices": [_as_values(slice_) for slice_ in slices]}
        print_json(record, next_commands=following)
    else:
        print_text("\n".join(map(_as_line, slices)), next_commands=following)


def _verify(plan_file: Path, folder: Path) -> str:
    """Return the command that verifies the slice in a folder of its node's name."""
    words = ("--plan", str(plan_file), "--node", folder.name, "--slices", str(folder.parent))
    return shlex.join(("mm2-split", "verify", *words))


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
