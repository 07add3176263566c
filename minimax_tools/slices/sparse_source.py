"""A slice's byte ranges of a hub's shards, in files of the shards' sizes whose other bytes are holes.

Such a folder takes the disk as much as the slice. To whoever reads only the slice it is the checkpoint: the slice is
cut out of it as out of a whole one. What is there already is noted beside each shard, so that a fetch that was
broken off goes on, with the piece it was at.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TextIO

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess, HubFile
from minimax_tools.hub.checkpoint_folder import DESCRIBING_SUFFIXES, work_on_hub
from minimax_tools.hub.ranges import HubRanges
from minimax_tools.hub.snapshot import HubSnapshot, run_all
from minimax_tools.machine.new_folder import held
from minimax_tools.machine.size import word_size
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.byte_ranges import ByteRange, join_ranges
from minimax_tools.slices.source import SliceSource

# What is lost at most of a shard when a fetch breaks off.
_PIECE_BYTES = 64 << 20
_JOURNAL_SUFFIX = ".fetched"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSource:
    """A slice's bytes, fetched.

    Args:
        source: The checkpoint, as far as the slice goes.
        bytes_asked: Of the slice's tensors.
        bytes_fetched: That came from the hub now; less where some were here.
    """

    source: SliceSource
    bytes_asked: int
    bytes_fetched: int


@contextmanager
def sparse_source(
    plan: PartitionPlan,
    node: str,
    source: SliceSource,
    folder: Path,
    *,
    access: HubAccess | None = None,
    progress: Progress | None = None,
) -> Iterator[SparseSource]:
    """Fetch the bytes of a node's tensors from the hub, and no others; while the block lasts they are there.

    Args:
        plan: Who holds what.
        node: Whose.
        source: The hub's checkpoint, its headers known.
        folder: Where the files of holes go; what an earlier call left there is used. It is removed when the block
            ends well.
        access: The hub; None for the one that the environment names.
        progress: Told of each shard.

    Raises:
        NoRangesError: The server sends whole files only.
        CheckpointError: The plan is not this checkpoint's, the hub does not answer, there is no room, or another
            process is at it.
    """
    assert source.entries is not None, "the caller has the headers"
    plan.validate(source.entries, source.architecture, folder=source.folder)
    names = plan.slice_of(node).names
    entries = sorted((source.entries[name] for name in names), key=lambda entry: entry.position)
    with _claimed(folder):
        bytes_fetched = _fetch_into(
            folder, source, entries, access, NoProgress() if progress is None else progress
        )
        every = {
            name: replace(entry, file=folder / entry.file.relative_to(source.folder))
            for name, entry in source.entries.items()
        }
        index = TensorIndex(folder=folder, entries={entry.name: every[entry.name] for entry in entries})
        yield SparseSource(
            source=replace(source, folder=folder, index=index, entries=every),
            bytes_asked=sum(entry.size_bytes for entry in entries),
            bytes_fetched=bytes_fetched,
        )
        shutil.rmtree(folder)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder: two that write into it would each trust the other's journal."""
    with ExitStack() as claim:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            claim.enter_context(held(folder))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process fetches into {folder}", next_step="Wait for it, or name another --output."
            ) from error
        except OSError as error:
            raise _cannot_store(folder, error) from error
        yield


def _fetch_into(
    folder: Path,
    source: SliceSource,
    entries: Sequence[TensorEntry],
    access: HubAccess | None,
    progress: Progress,
) -> int:
    """Fetch the tensors and what describes the model; gives how many bytes of tensors came."""

    def fetch(snapshot: HubSnapshot) -> int:
        return _fetch_all(entries, snapshot, folder, progress)

    try:
        bytes_fetched = work_on_hub(source.model, fetch, access=access)
        for path in source.folder.iterdir():
            if path.is_file() and path.name.endswith(DESCRIBING_SUFFIXES):
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise _cannot_store(folder, error) from error
    return bytes_fetched


def _cannot_store(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the slice cannot be stored in {folder}",
        found=str(error),
        next_step="Make room there or mend its permissions, or name another --output.",
    )


def _fetch_all(
    entries: Iterable[TensorEntry], snapshot: HubSnapshot, folder: Path, progress: Progress
) -> int:
    shards: dict[str, list[ByteRange]] = {}
    for found in join_ranges(entries):
        shards.setdefault(found.file.relative_to(snapshot.folder).as_posix(), []).append(found)
    missing = [name for name in shards if name not in snapshot.files]
    if missing or not snapshot.is_listed:
        raise snapshot.lacking(missing or sorted(shards))
    _require_room(shards, folder)
    stop = threading.Event()
    ranges = HubRanges(snapshot.commit, stop=stop)
    fetched: dict[str, int] = {}

    def fetch(file: HubFile) -> None:
        sparse = _SparseFile(folder / file.name, version=file.content_hash or snapshot.commit.commit)
        fetched[file.name] = sparse.fetch(shards[file.name], file, ranges)
        progress.advance(len(fetched), num_bytes=fetched[file.name])

    run_all(
        fetch,
        [snapshot.files[name] for name in shards],
        num_workers=snapshot.commit.access.num_workers,
        stop=stop,
    )
    return sum(fetched.values())


def _require_room(shards: Mapping[str, Iterable[ByteRange]], folder: Path) -> None:
    needed_bytes = sum(found.stop - found.start for ranges in shards.values() for found in ranges)
    here_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    free_bytes = shutil.disk_usage(folder).free
    # Once here, and once more in the slice's own folder.
    if 2 * needed_bytes - here_bytes > free_bytes:
        raise CheckpointError(
            f"the disk at {folder} is too small for the slice",
            expected=f"{word_size(2 * needed_bytes - here_bytes)}: the slice is written twice",
            found=f"{word_size(free_bytes)} free",
            next_step="Make room, or name another --output.",
        )


class _SparseFile:
    """One shard's file of holes, with the journal of the pieces that are in it.

    Args:
        path: The file.
        version: Of the shard on the hub: what was fetched of another is thrown away.
    """

    def __init__(self, path: Path, *, version: str) -> None:
        self._path = path
        self._journal = path.with_name(path.name + _JOURNAL_SUFFIX)
        self._version = version

    def fetch(self, wanted: Iterable[ByteRange], file: HubFile, ranges: HubRanges) -> int:
        """Fetch what is missing of some ranges; gives how many bytes came."""
        done = self._read_journal()
        if not done:
            self._path.unlink(missing_ok=True)
        num_bytes = 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("r+b" if done else "w+b") as output, self._journal.open("a") as journal:
            if not done:
                journal.truncate(0)
            output.truncate(file.size_bytes)
            fresh: list[tuple[int, int]] = []
            for start, stop in _pieces(wanted):
                if (start, stop) in done:
                    continue
                output.seek(start)
                for piece in ranges.stream(file, start, stop):
                    num_bytes += output.write(piece)
                fresh.append((start, stop))
                if sum(stop - start for start, stop in fresh) >= _PIECE_BYTES:
                    self._note(fresh, output, journal)
            self._note(fresh, output, journal)
        return num_bytes

    def _note(self, fresh: list[tuple[int, int]], output: BinaryIO, journal: TextIO) -> None:
        """Write into the journal what is on the disk now, and forget it."""
        output.flush()
        os.fsync(output.fileno())
        journal.writelines(json.dumps([self._version, start, stop]) + "\n" for start, stop in fresh)
        journal.flush()
        fresh.clear()

    def _read_journal(self) -> set[tuple[int, int]]:
        """The pieces that are here of this version."""
        if not self._path.is_file() or not self._journal.is_file():
            return set()
        done = set()
        for line in self._journal.read_text(encoding="utf-8").splitlines():
            try:
                version, start, stop = json.loads(line)
            except ValueError:
                # The line that was being written.
                continue
            if version != self._version:
                return set()
            done.add((int(start), int(stop)))
        return done


def _pieces(wanted: Iterable[ByteRange]) -> Iterator[tuple[int, int]]:
    for found in wanted:
        for start in range(found.start, found.stop, _PIECE_BYTES):
            yield start, min(start + _PIECE_BYTES, found.stop)
