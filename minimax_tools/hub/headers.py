"""Headers of a hub model's safetensors shards, read by byte ranges before any tensor is fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from minimax_tools.checkpoint.header import (
    LENGTH_BYTES,
    TensorEntry,
    data_start_of,
    parse_header,
    read_header,
)
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

# Limit of safetensors itself: the length that a header states may be wrong.
_MAX_HEADER_BYTES = 100_000_000


def read_hub_headers(snapshot: HubSnapshot) -> Mapping[str, TensorEntry]:
    """Read the tensor entries of a hub model by name; of each missing shard two short ranges are fetched.

    Args:
        snapshot: Snapshot with config and index already here.

    Raises:
        NoRangesError: The server sends whole files only, or the weights are not safetensors.
        NotCachedError: Shards are missing, and the hub is not asked.
        CheckpointError: Headers could not be fetched, or contradict each other or the index.
    """
    shards = find_shards(snapshot, None)
    if any(not shard.endswith(SAFETENSORS_SUFFIX) for shard in shards):
        raise NoRangesError(
            f"the tensors of {snapshot.commit.model} cannot be listed by byte ranges",
            found="PyTorch's .bin files, which have no header",
            next_step="Fetch the model.",
        )
    headers = read_shard_headers(snapshot, shards)
    entries = {entry.name: entry for header in headers.values() for entry in header}
    weight_map = weight_map_of(
        (entry for header in headers.values() for entry in header), folder=snapshot.folder
    )
    if INDEX_FILE in snapshot.files:
        faults = find_index_faults(read_weight_map(snapshot.folder / INDEX_FILE), headers)
        if faults:
            raise faulty_checkpoint(snapshot.folder, faults)
    return MappingProxyType({name: entries[name] for name in sorted(weight_map)})


def read_shard_headers(snapshot: HubSnapshot, shards: Iterable[str]) -> Mapping[str, tuple[TensorEntry, ...]]:
    """Read the tensor entries of shards of a hub model, by shard; missing shards are read by byte ranges.

    Raises:
        NoRangesError: The server sends whole files only.
        NotCachedError: A shard is missing, and the hub is not asked.
        CheckpointError: Headers could not be fetched, or are damaged.
    """
    absent, headers = [], {}
    for shard in sorted(shards):
        path = snapshot.folder / shard
        if shard in snapshot.files and snapshot.commit.holds(snapshot.files[shard]):
            headers[shard] = read_header(path)
        else:
            absent.append(shard)
    if absent and not snapshot.is_listed:
        raise snapshot.lacking(absent)
    unknown = [shard for shard in absent if shard not in snapshot.files]
    if unknown:
        raise snapshot.lacking(unknown)
    stop = threading.Event()
    ranges = HubRanges(snapshot.commit, stop=stop)

    def read(file: HubFile) -> None:
        headers[file.name] = _read_remote_header(ranges, file, snapshot)

    run_all(
        read,
        [snapshot.files[shard] for shard in absent],
        num_workers=snapshot.commit.access.num_workers,
        stop=stop,
    )
    return MappingProxyType(dict(sorted(headers.items())))


def _read_remote_header(ranges: HubRanges, file: HubFile, snapshot: HubSnapshot) -> tuple[TensorEntry, ...]:
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
    text = ranges.read(file, LENGTH_BYTES, data_start)
    return parse_header(path, text, file_size_bytes=file.size_bytes)
