"""Probes of reading a checkpoint's layers and of dequantising, without a model; inputs and digests of other probes.

A probe is a function that `loading/probe.py` calls in a process of its own; it returns numbers and digests by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_loader import LayerLoader, grouped_storage
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_of
from minimax_tools.synthetic.random_weights import LEVELS
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

# Bytes of one call of a plain read: they fit the processor's cache, and calls cost little.
_PIECE_BYTES = 1 << 20
# Most bytes that are copied to measure the memory bandwidth.
_COPIED_BYTES = 1 << 30
# Largest number of float8_e4m3fn.
_FP8_MAX = 448.0


def load_layers(model: str, *, prefetch: bool) -> dict[str, float]:
    """Load all layers through `LayerLoader`, one after the other, into storage that is used again for later layers."""
    spec = ModelSpec.from_folder(Path(model))
    with CheckpointReader(Path(model)) as reader:
        began_s = time.perf_counter()
        new_storage = partial(grouped_storage, spec, dtype=torch.bfloat16, device=torch.device("cpu"))
        with LayerLoader(reader, new_storage, prefetch=prefetch) as loader:
            for layer in range(spec.num_hidden_layers):
                following = layer + 1
                loader.load(layer, then=following if following < spec.num_hidden_layers else None)
            return {"pass_s": time.perf_counter() - began_s, "bytes_read": reader.num_bytes_read}


def read_plainly(
    model: str,
    *,
    num_threads: int,
    memory_bytes: int,
    layers_only: bool,
    num_layers: int | None = None,
    past_cache: bool = False,
) -> dict[str, float]:
    """Read all tensors, or those of the layers, piece by piece into memory that is used again.

    Args:
        model: Folder of the checkpoint.
        num_threads: Number of reading threads.
        memory_bytes: Memory that all threads fill together before they reuse it.
        layers_only: True to leave out embedding, final norm and lm_head.
        num_layers: Number of first layers to read; None for all.
        past_cache: True to read around the page cache (O_DIRECT), in whole pages.
    """
    entries = [
        entry
        for entry in TensorIndex.from_folder(Path(model)).entries.values()
        # Tensors outside the layers count as those of layer 0.
        if num_layers is None or (layer_of(entry.name) or 0) < num_layers
    ]
    extents = list(
        _extents(entry for entry in entries if not layers_only or layer_of(entry.name) is not None)
    )
    flags = os.O_RDONLY | (os.O_DIRECT if past_cache else 0)
    descriptors = {path: os.open(path, flags) for path in {path for path, _, _ in extents}}
    # Each thread reads its pieces round and round into its own memory of whole pieces, at least one.
    share_bytes = max(memory_bytes // num_threads // _PIECE_BYTES, 1) * _PIECE_BYTES
    of_thread = threading.local()

    def read_piece(path: Path, offset: int, size: int) -> None:
        if not hasattr(of_thread, "memory"):
            # mmap: direct reads need memory that begins on a page. One page more, as rounding makes a piece longer.
            of_thread.memory = memoryview(mmap.mmap(-1, share_bytes + mmap.PAGESIZE))
            of_thread.next_slot = 0
        if past_cache:
            # Direct reads begin and end on a page: the offset is rounded down, the size up.
            skip = offset % mmap.PAGESIZE
            offset, size = offset - skip, size + skip
            size = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
        # A piece may run over its slot by the added page: nothing that was read is used.
        piece = of_thread.memory[of_thread.next_slot : of_thread.next_slot + size]
        of_thread.next_slot = (of_thread.next_slot + _PIECE_BYTES) % share_bytes
        done = 0
        while done < size:
            count = os.preadv(descriptors[path], [piece[done:]], offset + done)
            if count == 0:
                # The file ends within the last page.
                break
            done += count

    pieces = [
        (path, offset + start, min(_PIECE_BYTES, size - start))
        for path, offset, size in extents
        for start in range(0, size, _PIECE_BYTES)
    ]
    began_s = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        for job in [pool.submit(read_piece, *piece) for piece in pieces]:
            job.result()
    seconds = time.perf_counter() - began_s
    for descriptor in descriptors.values():
        os.close(descriptor)
    return {"pass_s": seconds, "bytes_read": sum(size for _, _, size in pieces)}


def dequantise_experts(
    *, num_experts: int, intermediate_size: int, hidden_size: int, rounds: int
) -> dict[str, float]:
    """Dequantise experts' matrices into the same BF16 memory in every round, by as many threads as torch has.

    Before each round torch copies a large tensor, which measures the memory bandwidth.
    """
    num_threads = torch.get_num_threads()
    shapes = [(intermediate_size, hidden_size)] * 2 + [(hidden_size, intermediate_size)]
    shapes *= num_experts
    codes = [_gaussian_codes(shape) for shape in shapes]
    scales = [torch.rand(scale_shape(shape)) / 100 + 1e-4 for shape in shapes]
    places = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    num_bytes = sum(code.nbytes for code in codes)
    # Filled: untouched memory has no pages.
    source = torch.full((min(_COPIED_BYTES, num_bytes),), 1, dtype=torch.uint8)
    target = torch.full_like(source, 2)
    rates, bandwidths = [], []
    with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as pool:
        for _ in range(rounds + 1):
            began_s = time.perf_counter()
            target.copy_(source)
            bandwidths.append(2 * source.nbytes / (time.perf_counter() - began_s))
            began_s = time.perf_counter()
            jobs = [
                pool.submit(dequantise, code, scale, out=place, dtype=torch.bfloat16)
                for code, scale, place in zip(codes, scales, places, strict=True)
            ]
            for job in jobs:
                job.result()
            rates.append(num_bytes / (time.perf_counter() - began_s))
    # The first round warms up.
    rate, bandwidth = median(rates[1:]), median(bandwidths[1:])
    # For each code one byte is read, and two of a BF16 value are written.
    return {"codes_per_s": rate, "moved_per_s": 3 * rate, "bandwidth": bandwidth}


def _gaussian_codes(shape: tuple[int, int]) -> torch.Tensor:
    """Draw FP8 codes as in a block of weights: normally distributed, scaled so that the largest is FP8's largest.

    `LEVELS` holds 256 equally likely values of the normal distribution.
    """
    levels = (LEVELS * (_FP8_MAX / float(LEVELS.max()))).float().to(torch.float8_e4m3fn).view(torch.uint8)
    # A random byte chooses a level.
    codes = bytearray(os.urandom(shape[0] * shape[1])).translate(bytes(levels.tolist()))
    return torch.frombuffer(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).view(shape)


def _extents(entries: Iterable[TensorEntry]) -> Iterator[tuple[Path, int, int]]:
    """Yield file, offset and size of each run of adjacent tensors, in the order of files and offsets."""
    # The run so far; an empty one, as at the beginning, is not yielded.
    path, start, stop = Path(), 0, 0
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.offset)):
        if (entry.file, entry.offset) != (path, stop):
            if stop > start:
                yield path, start, stop - start
            path, start, stop = entry.file, entry.offset, entry.offset
        stop += entry.size_bytes
    if stop > start:
        yield path, start, stop - start


def open_inputs(folder: Path, seq_lens: list[int]) -> tuple[ModelSpec, Inputs]:
    """Return the model's quantities, and rows of random tokens of these lengths."""
    spec = ModelSpec.from_folder(folder)
    return spec, build_inputs(InputRequest(seq_lens=tuple(seq_lens)), folder=folder, spec=spec)


def digest_of(logits: torch.Tensor) -> str:
    """Compute a digest of the logits' shape and bits."""
    bits = logits.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(json.dumps(list(logits.shape)).encode() + bits).hexdigest()
