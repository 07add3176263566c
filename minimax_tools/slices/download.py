"""Download: the files of a checkpoint that a slice needs, how many of them are here, and fetching the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.weight_files import SAFETENSORS_SUFFIX, WeightFiles
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import (
    DESCRIBING_SUFFIXES,
    described_source,
    fetch_files,
    find_describing,
)
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.source import SliceSource, open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadedFile:
    """A file that a slice needs."""

    name: str  # its path in the repository
    expected_bytes: int | None  # its size in the repository; None if unknown
    actual_bytes: int | None  # its size on this machine; None if it is not here

    @property
    def size_bytes(self) -> int:
        """Size in the repository, else on this machine, else 0."""
        if self.expected_bytes is not None:
            return self.expected_bytes
        return 0 if self.actual_bytes is None else self.actual_bytes

    @property
    def is_complete(self) -> bool:
        """True if it is here with the expected size, or with any size if none is known."""
        return self.actual_bytes is not None and self.expected_bytes in (None, self.actual_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """The known files of a checkpoint's repository, by the listing of hub or folder, the index file and the plan."""

    folder: Path  # folder of the files, even before they are fetched
    # Bytes of each file by name, from the plan or the listing; None if unknown.
    sizes: Mapping[str, int | None]
    weights: frozenset[str]  # names of the files that hold weights
    # True if these are certainly all files. False if the hub was not asked, or a folder lacks some.
    is_listed: bool

    @classmethod
    def of(cls, source: SliceSource, plan: PartitionPlan, *, access: HubAccess | None = None) -> Repository:
        """Find the files of a plan's checkpoint; of a hub's model, config, index and tokenizer are fetched.

        Raises:
            CheckpointError: The hub does not answer.
        """
        listed, is_listed = _list_files(source, access)
        shards = {file for slice_ in plan.slices for file in slice_.files}
        files = WeightFiles.among(listed.keys())
        if source.weight_map is not None:
            shards |= set(source.weight_map.values())
        elif files is not None:
            shards |= set(files.shards)
        # The plan counts most: a file that is listed in a folder may be cut short.
        sizes = {**dict.fromkeys(sorted(shards)), **listed, **_planned_sizes(plan)}
        return cls(
            folder=source.folder,
            sizes=dict(sorted(sizes.items())),
            weights=frozenset(shards),
            is_listed=is_listed and sizes.keys() == listed.keys(),
        )

    @property
    def size_bytes(self) -> int:
        """Size of all files whose size is known."""
        return sum(size or 0 for size in self.sizes.values())

    @property
    def is_known(self) -> bool:
        """True if all files and their sizes are known."""
        return self.is_listed and None not in self.sizes.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The part of a repository that a slice needs."""

    weights: tuple[DownloadedFile, ...]  # files that hold some of its tensors, sorted
    # Config, tokenizer and other describing files, which every slice needs, sorted.
    describing: tuple[DownloadedFile, ...]
    repository: Repository  # the whole repository

    @classmethod
    def of(cls, slice_: Slice, source: SliceSource, repository: Repository) -> Download:
        """Find the files that a slice needs.

        The plan names the weight files. A plan that was made without headers does not: then the checkpoint's index
        file names them. Without an index file the slice needs all weight files.

        Raises:
            CheckpointError: The checkpoint has no weights, or its index file lacks a tensor of the slice.
        """
        return cls(
            weights=_describe_files(_find_weight_files(slice_, source, repository), repository),
            describing=_describe_files(find_describing(repository.sizes.keys()), repository),
            repository=repository,
        )

    @property
    def files(self) -> tuple[DownloadedFile, ...]:
        """Needed files, the weights first."""
        return self.weights + self.describing

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all files."""
        return tuple(file.name for file in self.files)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns that select the files, for the option `allow_patterns` of huggingface_hub's downloads."""
        return (*(file.name for file in self.weights), *(f"*{suffix}" for suffix in DESCRIBING_SUFFIXES))

    @property
    def size_bytes(self) -> int:
        """Size of the slice's files, as far as known."""
        return sum(file.size_bytes for file in self.files)

    @property
    def actual_bytes(self) -> int:
        """Size of the slice's files on this machine."""
        return sum(file.actual_bytes or 0 for file in self.files)

    @property
    def is_known(self) -> bool:
        """True if the expected size of every file is known."""
        return all(file.expected_bytes is not None for file in self.files)

    @property
    def reduction(self) -> float | None:
        """Fraction of the repository that the slice does not need, 0 to 1; None if the slice's size is unknown.

        A lower bound if not all of the repository is known.
        """
        return 1 - self.size_bytes / self.repository.size_bytes if self.is_known else None

    @property
    def is_complete(self) -> bool:
        """True if every file is here with the expected size."""
        return all(file.is_complete for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A weight file that several nodes fetch, since it holds tensors of each."""

    name: str  # its path in the repository
    size_bytes: int  # size in the repository, else on this machine, else 0
    nodes: tuple[str, ...]  # names of the nodes


def find_shared_files(downloads: Mapping[str, Download]) -> tuple[SharedFile, ...]:
    """Return the weight files that several of the nodes fetch, by name; `downloads` has each node's."""
    nodes: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for node, download in downloads.items():
        for file in download.weights:
            nodes.setdefault(file.name, []).append(node)
            sizes[file.name] = file.size_bytes
    return tuple(
        SharedFile(name=name, size_bytes=sizes[name], nodes=tuple(nodes[name]))
        for name in sorted(nodes)
        if len(nodes[name]) > 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedSlice:
    """A slice whose files were fetched."""

    node: str  # name of its node
    folder: Path  # the model's folder in the hub's cache
    files: tuple[str, ...]  # names of the slice's files, relative to the folder
    size_bytes: int  # size of the files


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
    )


def _list_files(source: SliceSource, access: HubAccess | None) -> tuple[dict[str, int | None], bool]:
    """Return bytes by file name, and whether these are all files of the repository."""
    remote = described_source(source.model, access=access)
    if remote is not None:
        sizes = {
            # The hub does not tell the size of a file that is only found in the cache.
            name: _size_here(remote.folder / name) if file.size_bytes is None else file.size_bytes
            for name, file in remote.files.items()
        }
        return sizes, remote.is_listed
    files = sorted(path for path in source.folder.rglob("*") if path.is_file())
    return {path.relative_to(source.folder).as_posix(): path.stat().st_size for path in files}, True


def _planned_sizes(plan: PartitionPlan) -> dict[str, int]:
    """Return the sizes of safetensors files by the plan's byte ranges: a shard ends with its last tensor."""
    sizes: dict[str, int] = {}
    for slice_ in plan.slices:
        for tensor in slice_.tensors:
            file, stop = tensor.file, tensor.stop
            if file is not None and stop is not None and file.endswith(SAFETENSORS_SUFFIX):
                sizes[file] = max(sizes.get(file, 0), stop)
    return sizes


def _find_weight_files(slice_: Slice, source: SliceSource, repository: Repository) -> set[str]:
    """Return the names of the weight files that a slice needs, as `Download.of` says."""
    if not slice_.tensors:
        return set()
    if slice_.files:
        return set(slice_.files)
    if not repository.weights:
        raise CheckpointError(f"{source.model} holds no weights", next_step="Check the model.")
    if source.weight_map is None:
        return set(repository.weights)
    missing = [name for name in slice_.names if name not in source.weight_map]
    if missing:
        raise CheckpointError(
            f"the index of {source.model} lacks tensors of node {slice_.node.name}",
            found=list_faults(missing),
            next_step="Make a new plan: mm2-split plan.",
        )
    return {source.weight_map[name] for name in slice_.names}


def _describe_files(names: set[str], repository: Repository) -> tuple[DownloadedFile, ...]:
    return tuple(
        DownloadedFile(
            name=name,
            expected_bytes=repository.sizes[name],
            actual_bytes=_size_here(repository.folder / name),
        )
        for name in sorted(names)
    )


def _size_here(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
