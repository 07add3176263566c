"""Fetching a slice from the hub: the files that hold a node's tensors, or only the tensors' bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import fetch_files, is_on_hub
from minimax_tools.hub.transfer import NoRangesError
from minimax_tools.machine.files import refuse_occupied, remove_abandoned
from minimax_tools.machine.progress import Progress
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.cut import cut_slice
from minimax_tools.slices.download import Download, Repository
from minimax_tools.slices.folder import occupied_error, write_slice
from minimax_tools.slices.holding import Holding
from minimax_tools.slices.source import SliceSource, open_source
from minimax_tools.slices.sparse_source import remove_sparse, sparse_source


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedSlice:
    """A slice that was fetched."""

    node: str  # name of its node
    folder: Path  # the model's folder in the hub's cache, or the slice's own folder
    files: tuple[str, ...]  # names of the slice's files, relative to the folder
    size_bytes: int  # size of the files, or of the tensors if only their bytes were fetched
    bytes_fetched: int | None  # bytes of tensors that came from the hub now; None if whole files were fetched


def fetch_slice(
    plan: PartitionPlan, node: str, *, model: str | None = None, access: HubAccess | None = None
) -> FetchedSlice:
    """Fetch the files that hold a node's tensors, and those that describe the model, into the hub's cache.

    Files are verified by hash, and those that are here are not fetched again. If the model is a folder, its files are
    only looked up.

    Args:
        plan: The plan.
        node: Name of the node.
        model: Folder or hub id of the checkpoint; None for the plan's.
        access: The hub; None for the one that the environment names.

    Raises:
        UsageError: The plan has no such node.
        CheckpointError: The hub does not answer, or lacks a file that the plan names. `mm2-split verify` compares the
            files' content with the plan.
    """
    slice_ = plan.slice_of(node)
    source = open_source(model or plan.model, access=access)
    names = Download.of(slice_, source, Repository.of(source, plan, access=access)).names
    paths = fetch_files(source.model, names, access=access)
    return FetchedSlice(
        node=node,
        folder=source.folder,
        files=names,
        size_bytes=sum(path.stat().st_size for path in paths.values()),
        bytes_fetched=None,
    )


def fetch_slice_ranges(
    plan: PartitionPlan,
    node: str,
    output: Path,
    *,
    model: str | None = None,
    access: HubAccess | None = None,
    progress: Progress | None = None,
) -> FetchedSlice:
    """Fetch only the bytes of a node's tensors, and write them as `mm2-split extract` writes a slice.

    The digests in its slice.json are those of the bytes that came. A hub has hashes of whole files only, so these
    digests can be checked only on a machine that has the source.

    The folder `output` is new or empty, or holds this slice of the same commit. Other arguments are as for
    `fetch_slice`; `progress` reports each shard.

    Raises:
        UsageError: The plan has no such node, or `output` holds something else. Or the model is a folder, and `output`
            does not hold its slice yet.
        NoRangesError: The server sends whole files only, or the model has no safetensors.
        CheckpointError: The hub does not answer, its model is not the plan's, or another process fetches the slice.
    """
    slice_ = plan.slice_of(node)
    if not slice_.tensors:
        raise UsageError(f"node {node} holds nothing in this plan, so there is nothing to fetch")
    source = open_source(model or plan.model, access=access)
    # Kept after a failure: the next call continues from it.
    working_folder = output.absolute().with_name(f".{output.name}.fetched")
    existing = _find_existing(slice_, output, source.model)
    if existing is not None:
        # A killed run may have left something after it wrote the slice.
        remove_abandoned(output.parent, name=output.name)
        remove_sparse(working_folder)
        return existing
    # Headers are read only now that something must be fetched.
    source = _open_with_headers(source.model, access)
    with sparse_source(plan, node, source, working_folder, access=access, progress=progress) as fetched:
        written = write_slice(cut_slice(plan, node, fetched.source), output, with_digests=True)
    return FetchedSlice(
        node=node,
        folder=output,
        files=tuple(file.name for file in written.files),
        size_bytes=fetched.bytes_asked,
        bytes_fetched=fetched.bytes_fetched,
    )


def _find_existing(slice_: Slice, output: Path, model: str) -> FetchedSlice | None:
    """Return the slice if the folder holds it already; None if the folder is absent or empty.

    Raises:
        UsageError: The folder holds something else, or bytes other than its slice.json notes, or notes no digests.
    """
    if not output.is_dir() or not any(output.iterdir()):
        refuse_occupied(output)
        return None
    holding = Holding.found(slice_, output)
    difference = _find_difference(holding, slice_, model)
    if difference is not None:
        raise occupied_error(
            output, expected=f"the slice of node {slice_.node.name} of {model}", found=difference
        )
    return FetchedSlice(
        node=slice_.node.name,
        folder=output,
        files=holding.files,
        size_bytes=holding.size_bytes,
        bytes_fetched=0,
    )


def _find_difference(holding: Holding, slice_: Slice, model: str) -> str | None:
    """Return the first difference between the slice that a folder holds and that of `model`; None if there is none."""
    if holding.faults:
        return holding.faults[0]
    if holding.source != model:
        return f"one cut from {holding.source}"
    if holding.sizes.keys() != set(slice_.names):
        return "a slice of other tensors"
    if None in holding.noted.values():
        return (
            "a slice whose slice.json notes no digests, so that nobody can tell whether its bytes are right"
        )
    return None if holding.digests == holding.noted else "other bytes than its slice.json notes"


def _open_with_headers(model: str, access: HubAccess | None) -> SliceSource:
    if not is_on_hub(model):
        raise UsageError(
            f"{model} is no hub's model, so there is nothing to fetch by byte ranges",
            next_step="Cut the slice out of a folder: mm2-split extract. Of s3://, fetch whole files: leave out "
            "--byte-ranges.",
        )
    source = open_source(model, headers=True, access=access)
    if source.entries is None:
        raise NoRangesError(
            f"the byte ranges of the tensors of {model} are not known",
            found="a server without byte ranges, weights that are not safetensors, or a hub that may not be asked",
            next_step="Fetch whole files: leave out --byte-ranges.",
        )
    return source
