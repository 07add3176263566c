"""Bytes of files through the page cache and past it, and layers read ahead: the same bytes, the cache as promised."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.shard_files import ReadAhead, ShardFiles, stored_layer_bytes
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

PIECE = 1 << 20
NUM_BYTES = 3 * PIECE + 12_345
NUM_PAGES = -(-NUM_BYTES // mmap.PAGESIZE)


@pytest.fixture(scope="module")
def content() -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(NUM_BYTES)), dtype=torch.uint8)


@pytest.fixture
def path(content: torch.Tensor, tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(content.numpy().tobytes())
    return path


@pytest.fixture
def files() -> Iterator[ShardFiles]:
    files = ShardFiles()
    yield files
    files.close()


def drop(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached_pages(path: Path) -> set[int]:
    """The pages of a file that the page cache holds; asking (mincore) fetches none."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        resident = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(view))
        failed = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(view)), resident)
        del anchor
    assert not failed, os.strerror(ctypes.get_errno())
    return {page for page, state in enumerate(resident) if state & 1}


@pytest.fixture
def droppable(path: Path) -> Path:
    drop(path)
    if len(cached_pages(path)) > NUM_PAGES // 2:
        pytest.skip("this file system keeps its files in memory (tmpfs?): nothing can be read past its cache")
    return path


def make_memory(offset: int, size: int, *, as_in_file: bool) -> torch.Tensor:
    """Memory that lies in its page as the bytes in the file's, or a byte off; filled, so that bytes left out show."""
    whole = torch.full((size + mmap.PAGESIZE + 1,), 7, dtype=torch.uint8)
    start = (offset - whole.data_ptr()) % mmap.PAGESIZE + (not as_in_file)
    return whole[start : start + size]


RANGES = [(0, NUM_BYTES), (0, 1), (4095, 2), (4096, 4096), (1, PIECE), (PIECE - 1, PIECE + 2)]
RANGES += [(777, 2 * PIECE + 4321), (NUM_BYTES - 1, 1), (NUM_BYTES - 5000, 5000)]


@pytest.mark.parametrize(("offset", "size"), RANGES)
def test_bytes_are_those_of_the_file(
    offset: int, size: int, files: ShardFiles, path: Path, content: torch.Tensor
) -> None:
    for is_cold, past_cache, as_in_file in itertools.product([False, True], repeat=3):
        if is_cold:
            drop(path)
        memory = make_memory(offset, size, as_in_file=as_in_file)
        assert files.read_into(path, offset, memory, past_cache=past_cache) == size
        assert torch.equal(memory, content[offset : offset + size])


@pytest.mark.parametrize("num_more", [1, PIECE], ids=["a byte", "a piece"])
@pytest.mark.parametrize("offset", [0, 5, NUM_BYTES - 10_000, NUM_BYTES - 10, NUM_BYTES, NUM_BYTES + 9999])
def test_a_file_that_ends_early_gives_what_it_has(
    offset: int, num_more: int, files: ShardFiles, path: Path, content: torch.Tensor
) -> None:
    """Asked for a byte more, a direct read ends within its last page."""
    for past_cache, as_in_file in itertools.product([False, True], repeat=2):
        drop(path)
        memory = make_memory(offset, max(NUM_BYTES - offset, 0) + num_more, as_in_file=as_in_file)
        count = files.read_into(path, offset, memory, past_cache=past_cache)
        assert count == max(NUM_BYTES - offset, 0)
        assert torch.equal(memory[:count], content[offset:])
        if not (as_in_file and past_cache):
            # A direct read fills memory that lies as the file's to its end: the system writes zeros there.
            assert (memory[count:] == 7).all(), "nothing is written past the file's end"


def test_what_was_just_written_is_read_past_the_cache_too(files: ShardFiles, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(PIECE)
        file.write(b"new bytes")
    memory = torch.empty(9, dtype=torch.uint8)
    files.read_into(path, PIECE, memory, past_cache=True)
    assert memory.numpy().tobytes() == b"new bytes"


def test_cache_is_left_as_it_was(files: ShardFiles, droppable: Path) -> None:
    def fetched() -> int:
        drop(droppable)
        before = cached_pages(droppable)
        files.read_into(droppable, 0, torch.empty(2 * PIECE, dtype=torch.uint8), past_cache=True)
        return len(cached_pages(droppable) - before)

    # To ask for a byte fetches its page, and a disk that is quicker than the answer makes the range pass for cached.
    assert min(fetched() for _ in range(10)) <= 1


def test_small_read_fetches_its_pages_alone(files: ShardFiles, droppable: Path) -> None:
    page = PIECE // mmap.PAGESIZE
    before = cached_pages(droppable)
    memory = torch.empty(mmap.PAGESIZE + 1, dtype=torch.uint8)
    files.read_into(droppable, PIECE, memory, past_cache=True)
    assert cached_pages(droppable) - before == {page, page + 1}


def test_cache_is_filled_by_a_read_through_it(files: ShardFiles, droppable: Path) -> None:
    files.read_into(droppable, 0, torch.empty(2 * PIECE, dtype=torch.uint8), past_cache=False)
    assert cached_pages(droppable) >= set(range(2 * PIECE // mmap.PAGESIZE))


def test_a_file_that_is_not_there_is_an_error(files: ShardFiles, tmp_path: Path) -> None:
    for past_cache in (False, True):
        with pytest.raises(FileNotFoundError, match="absent"):
            files.read_into(tmp_path / "absent", 0, torch.empty(1, dtype=torch.uint8), past_cache=past_cache)


def test_closed_files_are_opened_anew(files: ShardFiles, path: Path, content: torch.Tensor) -> None:
    memory = torch.empty(10, dtype=torch.uint8)
    files.read_into(path, 0, memory, past_cache=True)
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    files.close()
    assert len(os.listdir("/proc/self/fd")) < num_open  # noqa: PTH208
    files.read_into(path, 5, memory, past_cache=True)
    assert torch.equal(memory, content[5:15])


# A layer is 12 MB: several of the pieces that are read at once.
MODEL = SyntheticModel(num_hidden_layers=3, hidden_size=512, intermediate_size=512, num_local_experts=8)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> TensorIndex:
    """Three layers in BF16, in shards that end within layers."""
    folder = tmp_path_factory.mktemp("read_ahead") / "model"
    synthesize(folder, model=MODEL, dtype=torch.bfloat16, shard_size_bytes=15_000_000, seed=0)
    return TensorIndex.from_folder(folder)


def drop_from_memory(index: TensorIndex) -> None:
    """Let the system forget the shards; skip where it does not."""
    for file in index.files:
        drop(file)
    if any(cached_share(index, layer) > 0.1 for layer in index.layers):
        pytest.skip("this file system keeps its files in memory")


def cached_share(index: TensorIndex, layer: int) -> float:
    """The share of a layer's pages that are in the page cache."""
    pages = set()
    for name in index.layer_names(layer):
        entry = index[name]
        stop = -(-(entry.offset + entry.size_bytes) // mmap.PAGESIZE)
        pages |= {(entry.file, page) for page in range(entry.offset // mmap.PAGESIZE, stop)}
    cached = {(file, page) for file in index.files for page in cached_pages(file)}
    return len(pages & cached) / len(pages)


def test_holds_the_requested_layer_and_not_the_others(index: TensorIndex) -> None:
    drop_from_memory(index)
    with ReadAhead(index) as ahead:
        ahead.request(1).result(timeout=60)
    assert cached_share(index, 1) == 1
    # The system reads on a little past what is asked for.
    assert cached_share(index, 0) < 0.5
    assert cached_share(index, 2) < 0.5


def test_layers_come_in_the_order_of_the_requests(index: TensorIndex) -> None:
    drop_from_memory(index)
    with ReadAhead(index) as ahead:
        first, second = ahead.request(2), ahead.request(0)
        second.result(timeout=60)
        assert first.done()
    assert min(cached_share(index, 2), cached_share(index, 0)) == 1


def test_layer_is_fetched_once_and_closing_drops_what_has_not_begun(index: TensorIndex) -> None:
    ahead = ReadAhead(index)
    assert ahead.request(1) is ahead.request(1)
    requests = [ahead.request(layer) for layer in index.layers]
    ahead.close()
    assert all(request.done() for request in requests)


def test_damaged_shard_is_left_to_whoever_reads_the_layer(index: TensorIndex, tmp_path: Path) -> None:
    damaged = TensorIndex.from_folder(shutil.copytree(index.folder, tmp_path / "model"))
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
