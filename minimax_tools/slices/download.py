"""Download: which of a checkpoint's files a slice needs, told by the tensors they hold, and which of them are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.weight_files import SAFETENSORS_SUFFIX, WeightFiles
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import DESCRIBING_SUFFIXES, is_on_hub, work_on_hub
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.source import SliceSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadedFile:
    """A file that a slice needs.

    Args:
        name: Its path in the repository.
        expected_bytes: Its size there; None where nobody knows it.
        actual_bytes: Its size here; None where it is not here.
    """

    name: str
    expected_bytes: int | None
    actual_bytes: int | None

    @property
    def size_bytes(self) -> int:
        """What it takes, as far as is known."""
        return self.expected_bytes if self.expected_bytes is not None else self.actual_bytes or 0

    @property
    def is_complete(self) -> bool:
        """Whether it is here, in its size."""
        return self.actual_bytes is not None and self.expected_bytes in (None, self.actual_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """The files of a checkpoint's repository: those that are listed, and those that index and plan tell of.

    Args:
        folder: Where they are, or will be.
        sizes: By name: the plan's, else the repository's; None where neither tells it.
        weights: Those that hold weights.
        is_listed: Whether these are all: a hub that is not asked cannot say, nor a folder that lacks some.
    """

    folder: Path
    sizes: Mapping[str, int | None]
    weights: frozenset[str]
    is_listed: bool

    @classmethod
    def of(cls, source: SliceSource, plan: PartitionPlan, *, access: HubAccess | None = None) -> Repository:
        """The repository of a plan's checkpoint.

        Raises:
            CheckpointError: The hub does not answer.
        """
        listed, is_listed = _list(source, access)
        shards = {file for slice_ in plan.slices for file in slice_.files}
        if source.weight_map is not None:
            shards |= set(source.weight_map.values())
        elif (files := WeightFiles.among(listed.keys())) is not None:
            shards |= set(files.shards)
        sizes = {**dict.fromkeys(sorted(shards)), **listed, **_planned_sizes(plan)}
        return cls(
            folder=source.folder,
            sizes=dict(sorted(sizes.items())),
            weights=frozenset(shards),
            is_listed=is_listed and sizes.keys() == listed.keys(),
        )

    @property
    def size_bytes(self) -> int:
        """Of all files, as far as is known."""
        return sum(size or 0 for size in self.sizes.values())

    @property
    def is_known(self) -> bool:
        """Whether every file and its size is known."""
        return self.is_listed and None not in self.sizes.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The part of a repository that a slice needs.

    Args:
        weights: The files that hold some of its tensors, sorted.
        describing: Config, tokenizer and the like, which every slice needs, sorted.
        repository: What they are part of.
    """

    weights: tuple[DownloadedFile, ...]
    describing: tuple[DownloadedFile, ...]
    repository: Repository

    @classmethod
    def of(cls, slice_: Slice, source: SliceSource, repository: Repository) -> Download:
        """What a slice needs, and which of it is here.

        Places come from the plan; where it was made without headers, from the checkpoint's index; and where there
        is none, all weight files are needed.

        Raises:
            CheckpointError: The checkpoint has no weights, or its index lacks a tensor of the slice.
        """
        describing = {
            name for name in repository.sizes if "/" not in name and name.endswith(DESCRIBING_SUFFIXES)
        }
        return cls(
            weights=_find_here(_weight_files(slice_, source, repository), repository),
            describing=_find_here(describing, repository),
            repository=repository,
        )

    @property
    def files(self) -> tuple[DownloadedFile, ...]:
        """All of them, the weights first."""
        return self.weights + self.describing

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files."""
        return tuple(file.name for file in self.files)

    @property
    def patterns(self) -> tuple[str, ...]:
        """What a download by patterns would allow."""
        return (*(file.name for file in self.weights), *(f"*{suffix}" for suffix in DESCRIBING_SUFFIXES))

    @property
    def size_bytes(self) -> int:
        """Of the slice's files, as far as is known."""
        return sum(file.size_bytes for file in self.files)

    @property
    def actual_bytes(self) -> int:
        """Of those that are here."""
        return sum(file.actual_bytes or 0 for file in self.files)

    @property
    def is_known(self) -> bool:
        """Whether the size of every file is known."""
        return all(file.expected_bytes is not None for file in self.files)

    @property
    def reduction(self) -> float | None:
        """How much of the repository the slice does not need, 0 to 1; at least so much where not all of it is known.

        None where not even the slice's part is known.
        """
        return 1 - self.size_bytes / self.repository.size_bytes if self.is_known else None

    @property
    def is_complete(self) -> bool:
        """Whether every file is here."""
        return all(file.is_complete for file in self.files)


def _list(source: SliceSource, access: HubAccess | None) -> tuple[dict[str, int | None], bool]:
    """The files' sizes by name, and whether these are all that a repository has."""
    if is_on_hub(source.model):
        return work_on_hub(
            source.model,
            lambda snapshot: (
                # What is cached and not listed has the size that it has here.
                {
                    name: _size_here(snapshot.folder / name) if file.size_bytes is None else file.size_bytes
                    for name, file in snapshot.files.items()
                },
                snapshot.is_listed,
            ),
            access=access,
        )
    files = sorted(path for path in source.folder.rglob("*") if path.is_file())
    return {path.relative_to(source.folder).as_posix(): path.stat().st_size for path in files}, True


def _planned_sizes(plan: PartitionPlan) -> dict[str, int]:
    """Sizes of weight files as the plan's byte ranges give them: a shard ends with its last tensor."""
    sizes: dict[str, int] = {}
    for slice_ in plan.slices:
        for tensor in slice_.tensors:
            if (
                tensor.file is not None
                and tensor.stop is not None
                and tensor.file.endswith(SAFETENSORS_SUFFIX)
            ):
                sizes[tensor.file] = max(sizes.get(tensor.file, 0), tensor.stop)
    return sizes


def _weight_files(slice_: Slice, source: SliceSource, repository: Repository) -> set[str]:
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
            next_step="Make the plan anew: mm2-split plan.",
        )
    return {source.weight_map[name] for name in slice_.names}


def _find_here(names: set[str], repository: Repository) -> tuple[DownloadedFile, ...]:
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
