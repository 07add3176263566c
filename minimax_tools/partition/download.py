"""Download: which of a checkpoint's files a slice needs, and which of them are here whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.checkpoint.hub import is_on_hub, work_on_hub
from minimax_tools.hub.access import HubAccess
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.slice_files import SliceFiles
from minimax_tools.partition.source import Source


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
    """All files of a checkpoint's repository.

    Args:
        folder: Where they are, or will be.
        sizes: By name; None where it is not known.
        is_listed: Whether these are all files: a hub that is not asked cannot say.
    """

    folder: Path
    sizes: Mapping[str, int | None]
    is_listed: bool

    @classmethod
    def of(cls, source: Source, *, access: HubAccess | None = None) -> Repository:
        """The repository of a checkpoint.

        Raises:
            CheckpointError: The hub does not answer.
        """
        if is_on_hub(source.model):
            return work_on_hub(
                source.model,
                lambda snapshot: cls(
                    folder=snapshot.folder,
                    sizes={name: file.size_bytes for name, file in snapshot.files.items()},
                    is_listed=snapshot.is_listed,
                ),
                access=access,
            )
        sizes: dict[str, int | None] = {
            path.relative_to(source.folder).as_posix(): path.stat().st_size
            for path in sorted(source.folder.rglob("*"))
            if path.is_file()
        }
        if source.index is not None:
            sizes = {**dict.fromkeys(source.index.absent.values()), **sizes}
        return cls(folder=source.folder, sizes=sizes, is_listed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """The part of a repository that a slice needs.

    Args:
        files: The slice's files, the weights first.
        patterns: What a download by patterns would allow.
        num_repository_files: Of the whole repository.
        repository_bytes: Of the whole repository, as far as is known.
    """

    files: tuple[DownloadedFile, ...]
    patterns: tuple[str, ...]
    num_repository_files: int
    repository_bytes: int

    @classmethod
    def check(cls, slice_: Slice, plan: PartitionPlan, source: Source, repository: Repository) -> Download:
        """Look which of a slice's files are here, and whether in the size that the hub, or the plan, gives them.

        Raises:
            CheckpointError: The checkpoint's index lacks a tensor of the slice.
        """
        needed = SliceFiles.of(slice_, source, repository.sizes)
        planned = _planned_sizes(plan)
        files = tuple(
            DownloadedFile(
                name=name,
                expected_bytes=planned.get(name, repository.sizes.get(name)),
                actual_bytes=_size_here(repository.folder / name),
            )
            for name in needed.all
        )
        return cls(
            files=files,
            patterns=needed.patterns,
            num_repository_files=len(repository.sizes),
            repository_bytes=sum(size or planned.get(name, 0) for name, size in repository.sizes.items()),
        )

    @property
    def size_bytes(self) -> int:
        """Of the slice's files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def actual_bytes(self) -> int:
        """Of those that are here."""
        return sum(file.actual_bytes or 0 for file in self.files)

    @property
    def reduction(self) -> float:
        """How much of the repository the slice does not need, 0 to 1."""
        return 1 - self.size_bytes / self.repository_bytes if self.repository_bytes else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every file is here."""
        return all(file.is_complete for file in self.files)


def _planned_sizes(plan: PartitionPlan) -> dict[str, int]:
    """Sizes of weight files as the plan's byte ranges give them: a shard ends with its last tensor."""
    sizes: dict[str, int] = {}
    for slice_ in plan.slices:
        for tensor in slice_.tensors:
            if tensor.file is not None and tensor.stop is not None and tensor.file.endswith(".safetensors"):
                sizes[tensor.file] = max(sizes.get(tensor.file, 0), tensor.stop)
    return sizes


def _size_here(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
