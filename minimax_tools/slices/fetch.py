"""Fetching a slice from the hub: the files that hold a node's tensors, or only the tensors' bytes.

Sparse copies of a hub's shards: files of the shards' sizes that hold only one slice's bytes.

The other bytes are holes, so the files take only the slice's size on the disk. The slice is cut out of them as out
of the whole checkpoint. A journal beside each file lists the pieces that were fetched, so an interrupted fetch resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from minimax_tools.checkpoint.header import ByteRange, TensorEntry, join_ranges
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.access import HubAccess, HubFile
from minimax_tools.hub.checkpoint_folder import DESCRIBING_SUFFIXES, fetch_files, hub_snapshot, is_on_hub
from minimax_tools.hub.snapshot import HubSnapshot, run_all
from minimax_tools.hub.transfer import NoRangesError, read_range
from minimax_tools.json_codec import decode
from minimax_tools.machine.files import locked_folder, refuse_occupied, remove_abandoned
from minimax_tools.machine.json_file import parse_json
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.machine.size import format_size
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.cut import cut_slice
from minimax_tools.slices.download import Download, Repository
from minimax_tools.slices.folder import occupied_error, write_slice
from minimax_tools.slices.holding import Holding
from minimax_tools.slices.source import SliceSource, open_source

# Most bytes of a piece. The journal is written after so many bytes, so an interrupt loses little more of a shard.
_PIECE_BYTES = 64 << 20
_JOURNAL_SUFFIX = ".fetched"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSource:
    """The fetched bytes of a slice."""

    source: SliceSource  # the checkpoint, its files replaced by the sparse ones
    bytes_asked: int  # bytes of the slice's tensors
    bytes_fetched: int  # bytes that came from the hub now; fewer if some were here already


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
    """Fetch only the bytes of a node's tensors from the hub, for use inside the `with` block.

    All headers of `source` must be known. The sparse files lie in `folder`, and pieces from an earlier call are used.
    If the block ends well, the folder is removed. `progress` reports each shard.

    Raises:
        NoRangesError: The server sends whole files only.
        CheckpointError: The plan is not this checkpoint's, the hub does not answer, there is no room, or another
            process fetches into the folder.
    """
    assert source.entries is not None, "the caller has the headers"
    plan.validate(source.entries, source.architecture, folder=source.folder)
    names = plan.slice_of(node).names
    entries = sorted((source.entries[name] for name in names), key=lambda entry: entry.position)
    with _locked(folder):
        bytes_fetched = _fetch_into(folder, source, entries, access, progress or NoProgress())
        sparse_entries = {
            name: replace(entry, file=folder / entry.file.relative_to(source.folder))
            for name, entry in source.entries.items()
        }
        index = TensorIndex.of(folder, (sparse_entries[name] for name in names))
        yield SparseSource(
            source=replace(source, folder=folder, index=index, entries=sparse_entries),
            bytes_asked=sum(entry.size_bytes for entry in entries),
            bytes_fetched=bytes_fetched,
        )
        # Not reached if the block raised: the next call resumes.
        shutil.rmtree(folder)


def remove_sparse(folder: Path) -> None:
    """Remove a folder of sparse files, unless there is none or another process fetches into it."""
    with suppress(OSError), locked_folder(folder):
        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes, which would trust the same journal."""
    # Errors of locking are translated, errors of the block are not.
    with ExitStack() as lock:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked_folder(folder))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process fetches into {folder}", next_step="Wait for it, or choose another --output."
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
    """Fetch the tensors, copy config, index and tokenizer, and return the bytes of tensors that came."""
    try:
        snapshot = hub_snapshot(source.model, access=access)
        bytes_fetched = _fetch_shards(entries, snapshot, folder, progress)
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
        next_step="Make room there, change its permissions, or choose another --output.",
    )


def _fetch_shards(
    entries: Iterable[TensorEntry], snapshot: HubSnapshot, folder: Path, progress: Progress
) -> int:
    """Fetch the tensors' bytes of all shards, several shards at once; return the number of bytes that came."""
    shards: dict[str, list[ByteRange]] = {}
    for byte_range in join_ranges(entries):
        name = byte_range.file.relative_to(snapshot.folder).as_posix()
        shards.setdefault(name, []).append(byte_range)
    missing = [name for name in shards if name not in snapshot.files]
    if missing or not snapshot.is_listed:
        raise snapshot.lacking(missing or sorted(shards))
    _check_room(shards, folder)
    stop = threading.Event()
    fetched: dict[str, int] = {}

    def fetch(file: HubFile) -> None:
        # Where the hub tells no hash of a file, its commit is the version.
        sparse = _SparseFile(folder / file.name, version=file.content_hash or snapshot.commit.commit)
        read = partial(read_range, snapshot.commit, file)
        fetched[file.name] = sparse.fetch(shards[file.name], read, size_bytes=file.size_bytes, stop=stop)
        progress.advance(len(fetched), num_bytes=fetched[file.name])

    run_all(
        fetch,
        [snapshot.files[name] for name in shards],
        num_workers=snapshot.commit.access.num_workers,
        stop=stop,
    )
    return sum(fetched.values())


def _check_room(shards: Mapping[str, Iterable[ByteRange]], folder: Path) -> None:
    slice_bytes = sum(piece.stop - piece.start for ranges in shards.values() for piece in ranges)
    # Blocks have 512 bytes; holes have no blocks.
    here_bytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    free_bytes = shutil.disk_usage(folder).free
    # The slice is written here, and again in its own folder.
    missing_bytes = 2 * slice_bytes - here_bytes
    if missing_bytes > free_bytes:
        raise CheckpointError(
            f"the disk at {folder} is too small for the slice",
            expected=f"{format_size(missing_bytes)}: the slice is written twice",
            found=f"{format_size(free_bytes)} free",
            next_step="Make room, or choose another --output.",
        )


class _SparseFile:
    """The sparse copy of one shard, with the journal of its fetched pieces.

    Args:
        path: The file.
        version: Version of the shard on the hub; pieces of another version are discarded.
    """

    def __init__(self, path: Path, *, version: str) -> None:
        self._path = path
        self._journal = path.with_name(path.name + _JOURNAL_SUFFIX)
        self._version = version

    def fetch(
        self,
        wanted: Iterable[ByteRange],
        read: Callable[[int, int], bytes],
        *,
        size_bytes: int | None,
        stop: threading.Event,
    ) -> int:
        """Fetch the missing pieces of some byte ranges, and return the number of bytes that came.

        `read` gives bytes from a start to a stop; `size_bytes` is the shard's. Once `stop` is set nothing is written.
        """
        done = self._read_journal()
        num_bytes = 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("r+b" if done else "w+b") as output, self._journal.open("a") as journal:
            if not done:
                journal.truncate(0)
            # Extend the file to the shard's size: what is never written is a hole.
            output.truncate(size_bytes)
            unnoted: list[tuple[int, int]] = []
            for start, end in _cut_pieces(wanted):
                if (start, end) in done:
                    continue
                piece = read(start, end)
                if stop.is_set():
                    return num_bytes
                output.seek(start)
                num_bytes += output.write(piece)
                unnoted.append((start, end))
                if sum(end - start for start, end in unnoted) >= _PIECE_BYTES:
                    self._note(unnoted, output, journal)
            self._note(unnoted, output, journal)
        return num_bytes

    def _note(self, unnoted: list[tuple[int, int]], output: BinaryIO, journal: TextIO) -> None:
        """Sync the pieces to the disk, add them to the journal, and clear the list."""
        # In this order the journal never names bytes that a power failure could lose.
        output.flush()
        os.fsync(output.fileno())
        journal.writelines(json.dumps([self._version, start, stop]) + "\n" for start, stop in unnoted)
        journal.flush()
        unnoted.clear()

    def _read_journal(self) -> set[tuple[int, int]]:
        """Return the pieces (start, stop) that are here; none if any is of another version."""
        if not self._path.is_file() or not self._journal.is_file():
            return set()
        done = set()
        for line in self._journal.read_bytes().splitlines():
            try:
                version, start, stop = decode(tuple[str, int, int], parse_json(line))
            except ValueError:
                # The last line may be incomplete, and a disk that lost power may have spoilt any.
                continue
            if version != self._version:
                return set()
            done.add((start, stop))
        return done


def _cut_pieces(wanted: Iterable[ByteRange]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of pieces of at most `_PIECE_BYTES`, in order."""
    for byte_range in wanted:
        for start in range(byte_range.start, byte_range.stop, _PIECE_BYTES):
            yield start, min(start + _PIECE_BYTES, byte_range.stop)


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
