"""`mm2-split extract` at work: slices of a plan, cut and verified."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Protocol

from minimax_tools.command_line.console import print_json, print_text
from minimax_tools.errors import UsageError, format_count
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.machine.size import format_size
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.cut import SliceCut, cut_slice
from minimax_tools.slices.folder import SliceFolder, write_slice
from minimax_tools.slices.layout import DEFAULT_FOLDER, FileFormat
from minimax_tools.slices.source import open_source
from minimax_tools.slices.splitter import ModelSplitter, SplitConfig, read_split_plans
from minimax_tools.slices.stored_weights import StoredWeights


def extract_slices(
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
    """Cut slices out of a checkpoint, and print them."""
    if bool(nodes) == all_nodes:
        raise UsageError("name the slices to cut in one way", expected="--node NAME or --all-nodes")
    if (plan_file is None) == (names_file is None):
        raise UsageError("name the plan in one way", expected="--plan FILE or --plan-of-names FILE")
    if plan_file is not None:
        plan: _Plan = _StagePlan(plan_file, model, FileFormat(file_format or "safetensors"))
    else:
        assert names_file is not None, "one of two plans is named"
        plan = _NamesPlan(names_file, model, FileFormat(file_format or "pth"))
    # A node that was named twice is cut once.
    names = dict.fromkeys(plan.read_all_nodes() if all_nodes else nodes)
    slices = []
    for name in names:
        cut = plan.cut(name, shard_size_bytes=shard_size_bytes)
        # --output is the folder of a single --node, and the parent of the folders of several.
        is_single = not all_nodes and len(names) == 1
        folder = output if output is not None and is_single else (output or DEFAULT_FOLDER) / name
        with LayerProgress(len(cut.shards), label=name, unit="file") as progress:
            slices.append(write_slice(cut, folder, with_digests=with_digests, progress=progress))
    # The first slices may be hours old.
    for slice_ in slices:
        slice_.require_files()
    # `mm2-split verify` takes a plan of stages, and looks for a slice in a folder of its node's name.
    following = [
        _verify(plan_file, name, slice_.folder.parent)
        for name, slice_ in zip(names, slices, strict=True)
        if plan_file is not None and slice_.folder.name == name
    ]
    if as_json:
        record = {"plan": str(plan_file or names_file), "slices": [_as_values(slice_) for slice_ in slices]}
        print_json(record, next_commands=following)
    else:
        print_text("\n".join(map(_as_line, slices)), next_commands=following)


class _Plan(Protocol):
    """A plan that slices are cut by."""

    def read_all_nodes(self) -> tuple[str, ...]:
        """Return the nodes that hold something, after checking that their slices make up the checkpoint."""

    def cut(self, node: str, *, shard_size_bytes: int | None) -> SliceCut:
        """Cut a node's slice."""


class _StagePlan:
    """A plan that `mm2-split plan` wrote."""

    def __init__(self, path: Path, model: str | None, file_format: FileFormat) -> None:
        self._path = path
        self._model = model
        self._file_format = file_format
        # The tensor lists of all slices take a hundred megabytes, so without --all-nodes only one node's is read.
        self._whole_plan: PartitionPlan | None = None

    def read_all_nodes(self) -> tuple[str, ...]:
        self._whole_plan = _read_whole_plan(self._path, self._model)
        return tuple(slice_.node.name for slice_ in self._whole_plan.used)

    def cut(self, node: str, *, shard_size_bytes: int | None) -> SliceCut:
        plan = self._whole_plan or PartitionPlan.read(self._path, tensors_of=node)
        source = StoredWeights.of_slice(self._model or plan.model, plan.slice_of(node))
        return cut_slice(plan, node, source, file_format=self._file_format, shard_size_bytes=shard_size_bytes)


class _NamesPlan:
    """A plan that lists each node's tensors by name, as `ModelSplitter` takes it."""

    def __init__(self, path: Path, model: str | None, file_format: FileFormat) -> None:
        if model is None:
            raise UsageError(
                "a plan of names does not say of which checkpoint it is", expected="--model FOLDER"
            )
        self._config = SplitConfig(model_name=model, model_path=model, split_plan=read_split_plans(path))
        self._splitter = ModelSplitter(file_format=file_format)

    def read_all_nodes(self) -> tuple[str, ...]:
        headers = StoredWeights.of(str(self._config.model_path)).headers
        ModelSplitter.validate_split_plan({*headers.names, *headers.absent}, self._config.split_plan)
        return tuple(self._config.split_plan)

    def cut(self, node: str, *, shard_size_bytes: int | None) -> SliceCut:
        return self._splitter.cut_shard(self._config, node, shard_size_bytes=shard_size_bytes)


def _verify(plan_file: Path | None, node: str, slices: Path) -> str:
    """Return the command that verifies a slice."""
    return shlex.join(
        ("mm2-split", "verify", "--plan", str(plan_file), "--node", node, "--slices", str(slices))
    )


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
