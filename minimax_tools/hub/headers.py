"""Headers of safetensors shards on a hub or in a bucket, read by byte ranges before any tensor is fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from minimax_tools.checkpoint.header import (
    LENGTH_BYTES,
    TensorEntry,
    data_start_of,
    parse_header,
    read_header,
)
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import (
    INDEX_FILE,
    SAFETENSORS_SUFFIX,
    faulty_checkpoint,
    find_index_faults,
    read_weight_map,
    weight_map_of,
)
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubFile
from minimax_tools.hub.checkpoint_folder import find_bucket_shards, find_shards
from minimax_tools.hub.snapshot import HubSnapshot, run_all
from minimax_tools.hub.transfer import NoRangesError, read_range

# Longest header that safetensors itself reads. A damaged file may state any length, and it would all be fetched.
_MAX_HEADER_BYTES = 100_000_000


def read_hub_headers(snapshot: HubSnapshot) -> Mapping[str, TensorEntry]:
    """Read the tensor entries of a hub model by name; of each shard that is not cached two short ranges are fetched.

    The model's index, if it has one, must be cached already.

    Raises:
        NoRangesError: The server sends whole files only, or the weights are not safetensors.
        NotCachedError: Shards are not cached, and the hub is not asked.
        CheckpointError: Headers could not be fetched, or contradict each other or the index.
    """
    shards = find_shards(snapshot, layers=None)
    if any(not shard.endswith(SAFETENSORS_SUFFIX) for shard in shards):
        raise _no_headers(snapshot.commit.model)
    headers = _read_shard_headers(snapshot, shards)
    return _join(headers, snapshot.folder, has_index=INDEX_FILE in snapshot.files)


def read_bucket_headers(model: str) -> Mapping[str, TensorEntry]:
    """Read the tensor entries of a model in a bucket of S3 by name; of each shard two short ranges are fetched.

    Raises:
        NoRangesError: The weights are not safetensors.
        CheckpointError: Headers contradict each other or the index.
        RemoteError: They could not be fetched.
    """
    checkpoint, shards = find_bucket_shards(model)
    if any(not shard.endswith(SAFETENSORS_SUFFIX) for shard in shards):
        raise _no_headers(model)
    headers = {
        shard: fetch_header(
            partial(checkpoint.source.read, checkpoint.files[shard]),
            checkpoint.folder / shard,
            size_bytes=checkpoint.files[shard].size_bytes,
        )
        for shard in sorted(shards)
    }
    return _join(headers, checkpoint.folder, has_index=INDEX_FILE in checkpoint.files)


def fetch_header(
    read: Callable[[int, int], bytes], path: Path, *, size_bytes: int
) -> tuple[TensorEntry, ...]:
    """Fetch a header in two ranges: its length, then the header itself, which ends where the tensors' data start.

    `read` gives bytes from a start to a stop; `path` is the shard's place, for messages and entries.

    Raises:
        CheckpointError: The header is damaged.
    """
    data_start = data_start_of(path, read(0, min(LENGTH_BYTES, size_bytes)), file_size_bytes=size_bytes)
    if data_start - LENGTH_BYTES > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged",
            expected=f"a header of at most {_MAX_HEADER_BYTES} bytes",
            found=f"one of {data_start - LENGTH_BYTES}",
            next_step="Check the id; if it is right, tell the model's owner.",
        )
    return parse_header(path, read(LENGTH_BYTES, data_start), file_size_bytes=size_bytes)


def _join(
    headers: Mapping[str, tuple[TensorEntry, ...]], folder: Path, *, has_index: bool
) -> Mapping[str, TensorEntry]:
    """Join the headers of all shards, and check them against each other and the index in `folder`."""
    entries = [entry for header in headers.values() for entry in header]
    # Refuses tensors that lie in two shards.
    weight_map_of(entries, folder=folder)
    if has_index:
        faults = find_index_faults(read_weight_map(folder / INDEX_FILE), headers)
        if faults:
            raise faulty_checkpoint(folder, faults)
    return TensorIndex.of(folder, entries).entries


def _no_headers(model: str) -> NoRangesError:
    return NoRangesError(
        f"the tensors of {model} cannot be listed by byte ranges",
        found="PyTorch's .bin files, which have no header",
        next_step="Fetch the model.",
    )


def _read_shard_headers(snapshot: HubSnapshot, shards: Iterable[str]) -> dict[str, tuple[TensorEntry, ...]]:
    """Read the tensor entries of shards, by shard; headers of shards that are not cached are fetched."""
    absent, headers = [], {}
    for shard in sorted(shards):
        if shard in snapshot.files and snapshot.commit.holds(snapshot.files[shard]):
            headers[shard] = read_header(snapshot.folder / shard)
        else:
            absent.append(shard)
    # If the hub was not asked for its list (`is_listed`), it is not asked for headers either.
    unknown = [shard for shard in absent if shard not in snapshot.files or not snapshot.is_listed]
    if unknown:
        raise snapshot.lacking(unknown)

    def fetch(file: HubFile) -> None:
        if file.size_bytes is None:
            raise CheckpointError(f"the hub does not say how long {file.name} is")
        headers[file.name] = fetch_header(
            partial(read_range, snapshot.commit, file),
            snapshot.folder / file.name,
            size_bytes=file.size_bytes,
        )

    run_all(
        fetch,
        [snapshot.files[shard] for shard in absent],
        num_workers=snapshot.commit.access.num_workers,
        stop=threading.Event(),
    )
    return dict(sorted(headers.items()))
