"""Headers of a hub model's safetensors shards, read by byte ranges before any tensor is fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

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
from minimax_tools.hub.checkpoint_folder import find_shards
from minimax_tools.hub.ranges import HubRanges, NoRangesError
from minimax_tools.hub.snapshot import HubSnapshot, run_all

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
        raise NoRangesError(
            f"the tensors of {snapshot.commit.model} cannot be listed by byte ranges",
            found="PyTorch's .bin files, which have no header",
            next_step="Fetch the model.",
        )
    headers = _read_shard_headers(snapshot, shards)
    entries = [entry for header in headers.values() for entry in header]
    # Refuses tensors that lie in two shards.
    weight_map_of(entries, folder=snapshot.folder)
    if INDEX_FILE in snapshot.files:
        faults = find_index_faults(read_weight_map(snapshot.folder / INDEX_FILE), headers)
        if faults:
            raise faulty_checkpoint(snapshot.folder, faults)
    return TensorIndex.of(snapshot.folder, entries).entries


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
    stop = threading.Event()
    ranges = HubRanges(snapshot.commit, stop_event=stop)

    def fetch(file: HubFile) -> None:
        headers[file.name] = _fetch_header(ranges, file, snapshot)

    num_workers = snapshot.commit.access.num_workers
    run_all(fetch, [snapshot.files[shard] for shard in absent], num_workers=num_workers, stop=stop)
    return dict(sorted(headers.items()))


def _fetch_header(ranges: HubRanges, file: HubFile, snapshot: HubSnapshot) -> tuple[TensorEntry, ...]:
    """Fetch a header in two ranges: its length, then the header itself, which ends where the tensors' data start."""
    path = snapshot.folder / file.name
    if file.size_bytes is None:
        raise CheckpointError(f"the hub does not say how long {file.name} is")
    prefix = ranges.read(file, 0, min(LENGTH_BYTES, file.size_bytes))
    data_start = data_start_of(path, prefix, file_size_bytes=file.size_bytes)
    if data_start - LENGTH_BYTES > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged",
            expected=f"a header of at most {_MAX_HEADER_BYTES} bytes",
            found=f"one of {data_start - LENGTH_BYTES}",
            next_step="Check the id; if it is right, tell the model's owner.",
        )
    header_json = ranges.read(file, LENGTH_BYTES, data_start)
    return parse_header(path, header_json, file_size_bytes=file.size_bytes)
