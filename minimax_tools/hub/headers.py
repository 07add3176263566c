"""Headers of safetensors shards on a hub or in a bucket, read by byte ranges before any tensor is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
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
    find_header_faults,
    read_weight_map,
)
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.checkpoint_folder import Source, find_shards
from minimax_tools.hub.snapshot import NoRangesError, run_all

# Longest header that safetensors itself reads. A damaged file may state any length, and it would all be fetched.
_MAX_HEADER_BYTES = 100_000_000


def read_headers(source: Source) -> Mapping[str, TensorEntry]:
    """Read the tensor entries of a checkpoint by name; of each shard that is not here two short ranges are fetched.

    The model's index, if it has one, must be here already.

    Raises:
        NoRangesError: The server sends whole files only, or the weights are not safetensors.
    """
    shards = find_shards(source, layers=None)
    if any(not shard.endswith(SAFETENSORS_SUFFIX) for shard in shards):
        raise NoRangesError(
            f"the tensors of {source.name} cannot be listed by byte ranges",
            found="PyTorch's .bin files, which have no header",
            next_step="Fetch the model.",
        )
    headers = _read_shard_headers(source, shards)
    weight_map = read_weight_map(source.folder / INDEX_FILE) if INDEX_FILE in source.files else None
    faults = find_header_faults(headers, weight_map)
    if faults:
        raise faulty_checkpoint(source.folder, faults)
    return TensorIndex.of(source.folder, chain.from_iterable(headers.values())).entries


def fetch_header(
    read: Callable[[int, int], bytes], path: Path, *, size_bytes: int
) -> tuple[TensorEntry, ...]:
    """Fetch a header in two ranges: its length, then the header itself, which ends where the tensors' data start.

    `read` gives bytes from a start to a stop; `path` is the shard's place, for messages and entries.
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


def _read_shard_headers(source: Source, shards: Iterable[str]) -> dict[str, tuple[TensorEntry, ...]]:
    """Read the tensor entries of shards, by shard; headers of shards that are not here are fetched."""
    here = {shard for shard in shards if source.holds(shard)}
    headers = {shard: read_header(source.folder / shard) for shard in here}
    absent = sorted(set(shards) - here)
    # If the hub was not asked for its list (`is_listed`), it is not asked for headers either.
    unknown = [shard for shard in absent if shard not in source.files or not source.is_listed]
    if unknown:
        raise source.lacking(unknown)

    def fetch(shard: str) -> None:
        size_bytes = source.files[shard].size_bytes
        if size_bytes is None:
            raise CheckpointError(f"the hub does not say how long {shard} is")
        headers[shard] = fetch_header(
            partial(source.read, shard), source.folder / shard, size_bytes=size_bytes
        )

    run_all(fetch, absent)
    return dict(sorted(headers.items()))
