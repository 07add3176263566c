"""Reading ahead: a layer's bytes, and no others, come into the system's page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy
import pytest
import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.shard_files import ReadAhead, stored_layer_bytes
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

# A layer is 12 MB: several of the pieces that are read at once.
MODEL = SyntheticModel(num_hidden_layers=3, hidden_size=512, intermediate_size=512, num_local_experts=8)

LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> TensorIndex:
    """Three layers in BF16, in shards that end within layers."""
    folder = tmp_path_factory.mktemp("read_ahead") / "model"
    synthesize(folder, model=MODEL, dtype=torch.bfloat16, shard_size_bytes=15_000_000, seed=0)
    return TensorIndex.from_folder(folder)


def drop_from_memory(index: TensorIndex) -> None:
    """Let the system forget the shards; skip where it does not."""
    for file in index.files:
        with file.open("rb") as shard:
            os.fsync(shard.fileno())
            os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(cached_share(index, layer) > 0.1 for layer in index.layers):
        pytest.skip("this file system keeps files in memory, or does not tell whether it does")


def cached_share(index: TensorIndex, layer: int) -> float:
    """Return the share of a layer's pages that are in the page cache; the call itself loads none."""
    pages = [
        page
        for name in index.layer_names(layer)
        for page in cached_pages(index[name].file, *span(index[name]))
    ]
    return sum(pages) / len(pages)


def span(entry: TensorEntry) -> tuple[int, int]:
    return entry.offset, entry.offset + entry.size_bytes


def cached_pages(file: Path, start: int, stop: int) -> list[bool]:
    """Return, for each page of these bytes, whether it is in memory."""
    with file.open("rb") as shard, mmap.mmap(shard.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = numpy.frombuffer(mapped, dtype=numpy.uint8)
        states = (ctypes.c_ubyte * -(-len(whole) // mmap.PAGESIZE))()
        failed = LIBC.mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(whole)), states)
        del whole
        assert not failed, os.strerror(ctypes.get_errno())
    return [bool(state & 1) for state in states[start // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)]]


@pytest.mark.skipif(
    not hasattr(LIBC, "mincore"), reason="this system does not tell what is in its page cache"
)
class TestPageCache:
    def test_holds_the_requested_layer_and_not_the_others(self, index: TensorIndex) -> None:
        drop_from_memory(index)
        with ReadAhead(index) as ahead:
            ahead.request(1).result(timeout=60)
        assert cached_share(index, 1) == 1
        # The system reads on a little past what is asked for.
        assert cached_share(index, 0) < 0.5
        assert cached_share(index, 2) < 0.5

    def test_layers_come_in_the_order_of_the_requests(self, index: TensorIndex) -> None:
        drop_from_memory(index)
        with ReadAhead(index) as ahead:
            first, second = ahead.request(2), ahead.request(0)
            second.result(timeout=60)
            assert first.done()
        assert min(cached_share(index, 2), cached_share(index, 0)) == 1


def test_layer_is_fetched_once(index: TensorIndex) -> None:
    with ReadAhead(index) as ahead:
        assert ahead.request(1) is ahead.request(1)


def test_closing_drops_what_has_not_begun(index: TensorIndex) -> None:
    ahead = ReadAhead(index)
    requests = [ahead.request(layer) for layer in index.layers]
    ahead.close()
    assert all(request.done() for request in requests)


def test_damaged_shard_is_left_to_whoever_reads_the_layer(index: TensorIndex, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in index.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damaged = TensorIndex.from_folder(folder)
    for file in damaged.files[1:]:
        file.unlink()
    os.truncate(damaged.files[0], 1_000_000)
    with ReadAhead(damaged) as ahead:
        assert ahead.request(0).result(timeout=60) is None
        assert ahead.request(2).result(timeout=60) is None


def test_stored_bytes_of_a_layer_are_what_reading_it_reads(index: TensorIndex) -> None:
    with CheckpointReader(index.folder, index=index) as reader:
        for name in index.layer_names(1):
            reader.read(name)
        assert reader.num_bytes_read == stored_layer_bytes(index, 1) > 0
