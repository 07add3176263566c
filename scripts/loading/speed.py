"""Figures of time: loading, dequantising, streaming, offloading; goldens of the true size, on a GPU too.

A ratio compares two runs of one round, which follow each other; the figure is the median of the rounds. Seconds begin
after the imports of a process, on both sides of a ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from figures import Figure
from page_cache import CacheState, drop_cache
from peaks import tree_bytes

from loading.bench import (
    DEQUANTISE,
    FORWARD_OFFLOADED,
    FORWARD_STREAMED,
    LOAD_LAYERS,
    READ_PLAINLY,
    Checkpoint,
    LoadingBench,
    ProbeResult,
    bf16_layer_bytes,
    say,
    stop,
)
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.model.weight_names import EMBEDDING, layer_of
from minimax_tools.synthetic.checkpoint import FP8
from minimax_tools.synthetic.toy_model import PRESETS

# A golden "without reads" still reads two layers. So the time of a layer is taken from goldens of two lengths.
_FEW_LAYERS, _MORE_LAYERS = 2, 6
_GPU = "cuda:0"
_LAYERS_ON_GPU = 3
# One copy to the GPU, and how often it is timed.
_COPIED_BYTES, _COPIES = 2 << 30, 5
# More threads than this gain nothing when a file is read from the page cache.
_READING_THREADS = 8


def measure_warm_load(bench: LoadingBench, checkpoint: Checkpoint) -> Iterator[Figure]:
    """Yield the time of `LayerLoader` for all layers over that of a plain read of the same bytes from the page cache.

    The plain read is the faster of two: one thread with a buffer that fits the processor's cache, or all threads with
    as much memory as a layer takes.
    """
    rates, ratios, raw_rates = [], [], []
    for _ in range(bench.scale.rounds):
        load = bench.probe(
            LOAD_LAYERS,
            cache=CacheState.WARM,
            checkpoint=checkpoint,
            model=str(checkpoint.folder),
            prefetch=False,
        )
        read_s = min(
            _read_s(bench, checkpoint, CacheState.WARM, num_threads=1),
            _read_s(bench, checkpoint, CacheState.WARM, memory_bytes=checkpoint.layer_bytes),
        )
        num_bytes, load_s = load.values["bytes_read"], load.values["pass_s"]
        rates.append(num_bytes / load_s)
        raw_rates.append(num_bytes / read_s)
        ratios.append(load_s / read_s)
    yield Figure.at_most("warm_load_over_raw_read", median(ratios), 1.3)
    yield Figure.plain("warm_load_gb_per_s", median(rates) / 1e9)
    yield Figure.plain("raw_warm_read_gb_per_s", median(raw_rates) / 1e9)


def measure_dequantising(bench: LoadingBench) -> Iterator[Figure]:
    """Yield the speed of dequantising FP8 experts of the true size, and its share of the memory bandwidth."""
    num_experts, intermediate_size, hidden_size = bench.scale.expert
    rates = bench.probe(
        DEQUANTISE,
        num_experts=num_experts,
        intermediate_size=intermediate_size,
        hidden_size=hidden_size,
        rounds=2 * bench.scale.rounds + 1,
    ).values
    yield Figure.at_least("fp8_dequantise_gb_per_s", rates["codes_per_s"] / 1e9, 4)
    yield Figure.plain("fp8_dequantise_share_of_memory_bandwidth", rates["moved_per_s"] / rates["bandwidth"])
    yield Figure.plain("memory_bandwidth_gb_per_s", rates["bandwidth"] / 1e9)


def measure_stream(bench: LoadingBench, checkpoint: Checkpoint, *, suffix: str = "") -> Iterator[Figure]:
    """Yield the time of a whole streamed, cold golden over its bound, the longer of two times; `suffix` ends the names.

    - The cold read: a plain read of all tensors by all threads, through the page cache or past it, whichever is faster.
    - The golden without its reads: the same command on a warm cache, whose reader leaves out the matrices from the
      third layer on.
    """
    options = ("--stream", "on", "--prefetch", "--noise-floor", "full")
    runs: list[ProbeResult] = []
    ratios, idle_s, read_s = [], [], []
    for _ in range(bench.scale.rounds):
        with bench.folder("captures") as captures:
            run = bench.golden(checkpoint, captures / "cold", *options, cache=CacheState.COLD)
            idle = bench.golden(checkpoint, captures / "idle", *options, cache=CacheState.WARM, idle=True)
        runs.append(run)
        idle_s.append(idle.seconds)
        read_s.append(
            min(
                _read_s(bench, checkpoint, CacheState.COLD, layers_only=False, past_cache=past_cache)
                for past_cache in (False, True)
            )
        )
        ratios.append(run.seconds / max(idle_s[-1], read_s[-1]))
    stored_bytes = checkpoint.stored_bytes
    yield Figure.at_most(f"stream_over_bound{suffix}", median(ratios), 1.15)
    yield Figure.plain(f"stream_cold_s{suffix}", median(run.seconds for run in runs))
    yield Figure.plain(f"stream_without_reads_s{suffix}", median(idle_s))
    yield Figure.plain(f"raw_cold_read_s{suffix}", median(read_s))
    read = max(run.values["bytes_read"] for run in runs) / stored_bytes
    # Less than 1: of the embedding only the rows of the tokens are read.
    yield Figure.at_most(f"bytes_read_over_stored{suffix}", read, 1.005)
    yield Figure.exactly(f"extra_disk_bytes{suffix}", max(run.extra_disk_bytes for run in runs), 0)
    yield Figure.plain(f"rchar_over_stored{suffix}", max(run.rchar for run in runs) / stored_bytes)


def measure_offload(bench: LoadingBench, checkpoint: Checkpoint) -> Iterator[Figure]:
    """Yield the time that the logits take by accelerate's disk offload over that by streaming, and the disk space."""
    arguments: dict[str, Any] = {"model": str(checkpoint.folder), "seq_lens": list(bench.seq_lens)}
    streams: list[ProbeResult] = []
    offloads: list[ProbeResult] = []
    ratios: dict[CacheState, list[float]] = {CacheState.WARM: [], CacheState.COLD: []}
    for _ in range(bench.scale.rounds):
        for cache, ratios_of_cache in ratios.items():
            stream = bench.probe(FORWARD_STREAMED, cache=cache, checkpoint=checkpoint, **arguments)
            with bench.folder("offload") as folder:
                # The offload folder is read too, which may drop the checkpoint from the cache.
                cache.prepare(checkpoint.shards)
                offload = bench.probe(FORWARD_OFFLOADED, offload_folder=str(folder), **arguments)
            ratios_of_cache.append(offload.values["whole_s"] / stream.values["whole_s"])
            streams.append(stream)
            offloads.append(offload)
    layer_bytes = checkpoint.layer_bytes
    equal = len({run.values["logits"] for run in (*streams, *offloads)}) == 1
    yield Figure.at_least("offload_over_stream", median(ratios[CacheState.COLD]), 5)
    yield Figure.at_least("offload_over_stream_warm", median(ratios[CacheState.WARM]), 5)
    yield Figure.plain("streamed_logits_s", median(run.values["whole_s"] for run in streams))
    yield Figure.plain("offload_load_s", median(run.values["load_s"] for run in offloads))
    yield Figure.plain("offload_forward_s", median(run.values["forward_s"] for run in offloads))
    yield Figure.exactly("offload_logits_equal_streamed", float(equal), 1)
    yield Figure.plain("extra_disk_gb_of_offload", max(run.extra_disk_bytes for run in offloads) / 1e9)
    for kind, peak_bytes in (
        ("anonymous", median(run.peak_bytes for run in offloads)),
        ("resident", median(run.peak_resident_bytes for run in offloads)),
    ):
        yield Figure.plain(f"peak_{kind}_over_layer_offload", peak_bytes / layer_bytes)


def _read_s(
    bench: LoadingBench,
    checkpoint: Checkpoint,
    cache: CacheState,
    *,
    num_threads: int | None = None,
    memory_bytes: int = 0,
    layers_only: bool = True,
    past_cache: bool = False,
) -> float:
    """Measure the seconds of `loading.reads.read_plainly`, by default with torch's threads and small buffers."""
    measured = bench.probe(
        READ_PLAINLY,
        cache=cache,
        checkpoint=checkpoint,
        model=str(checkpoint.folder),
        num_threads=num_threads or torch.get_num_threads(),
        memory_bytes=memory_bytes,
        layers_only=layers_only,
        past_cache=past_cache,
    )
    return float(measured.values["pass_s"])


def measure_full_size(bench: LoadingBench, folder: Path, *, num_layers: int | None) -> Iterator[Figure]:
    """Yield the figures of a streamed, cold golden of a checkpoint of the true size.

    `full_size_stream_over_bound` is the golden's time over the longer of two times: a plain read past the cache, at the
    speed of the first layers, and the layers without their reads. Memory counts in layers of BF16 weights. The golden
    has the first `num_layers` layers; None stands for all layers and the head.
    """
    checkpoint = Checkpoint.of(folder)
    wanted = range(checkpoint.num_layers if num_layers is None else num_layers)
    stored_bytes = _stored_bytes(checkpoint, wanted)
    run, capture_bytes = _golden_of(bench, checkpoint, num_layers)
    few, more = (
        _golden_of(bench, checkpoint, count, idle=True)[0].seconds for count in (_FEW_LAYERS, _MORE_LAYERS)
    )
    without_reads_s = len(wanted) * (more - few) / (_MORE_LAYERS - _FEW_LAYERS)
    drop_cache(checkpoint.shards)
    read = bench.probe(
        READ_PLAINLY,
        model=str(folder),
        num_threads=torch.get_num_threads(),
        memory_bytes=0,
        layers_only=True,
        num_layers=_FEW_LAYERS,
        past_cache=True,
    ).values
    read_s = stored_bytes * read["pass_s"] / read["bytes_read"]
    peak = run.peak_bytes / bf16_layer_bytes(PRESETS["m2"])
    yield Figure.plain("full_size_num_layers", len(wanted))
    yield Figure.plain("full_size_s", run.seconds)
    yield Figure.plain("full_size_gb_per_s", run.values["bytes_read"] / run.seconds / 1e9)
    yield Figure.plain("full_size_raw_cold_read_s", read_s)
    yield Figure.plain("full_size_without_reads_s", without_reads_s)
    yield Figure.plain("full_size_stream_over_bound", run.seconds / max(read_s, without_reads_s))
    yield Figure.plain("full_size_peak_anonymous_over_layer", peak)
    yield Figure.plain("full_size_bytes_read_over_stored", run.values["bytes_read"] / stored_bytes)
    yield Figure.plain("full_size_disk_read_over_stored", run.disk_bytes / stored_bytes)
    yield Figure.plain("full_size_capture_gb", capture_bytes / 1e9)


def _golden_of(
    bench: LoadingBench, checkpoint: Checkpoint, num_layers: int | None, *, idle: bool = False
) -> tuple[ProbeResult, int]:
    """Make a cold golden of the first layers, None for all; return the result and the size of the capture.

    An `idle` golden leaves out most of its reading.
    """
    command = ("extract-all",) if num_layers is None else ("multi-layer", "--layers", f"0:{num_layers}")
    drop_cache(checkpoint.shards)
    with bench.folder("captures") as captures:
        options = ("--stream", "on", "--noise-floor", "stats")
        run = bench.golden(checkpoint, captures / "golden", *options, command=command, idle=idle)
        return run, tree_bytes(captures)


def _stored_bytes(checkpoint: Checkpoint, layers: range) -> int:
    """Compute the stored size of these layers and the embedding; for all layers, of the whole checkpoint."""
    if len(layers) == checkpoint.num_layers:
        return checkpoint.stored_bytes
    return sum(
        entry.size_bytes
        for entry in TensorIndex.from_folder(checkpoint.folder).entries.values()
        if entry.name == EMBEDDING or layer_of(entry.name) in layers
    )


def measure_on_gpu(bench: LoadingBench) -> Iterator[Figure]:
    """Yield the times of goldens of true-size layers on a GPU, streamed from the page cache and whole on the card.

    The bound of a stream is the longer of two times: the stored bytes of the layers over the rate of a copy from pinned
    memory to the GPU, and a plain warm read of the same bytes.
    """
    if not torch.cuda.is_available():
        stop("this machine has no CUDA device that torch sees")
    say(torch.cuda.get_device_name(0))
    model = replace(bench.scale.large, num_hidden_layers=_LAYERS_ON_GPU)
    with bench.checkpoint("gpu", dtype=FP8, model=model) as checkpoint:
        rate = _copy_rate()
        threads = min(_READING_THREADS, torch.get_num_threads())
        read_s = _read_s(bench, checkpoint, CacheState.WARM, num_threads=threads, layers_only=False)
        bound_s = max(checkpoint.stored_bytes / rate, read_s)
        yield Figure.plain("host_to_gpu_gb_per_s", rate / 1e9)
        yield Figure.plain("warm_read_gb_per_s", checkpoint.stored_bytes / read_s / 1e9)
        yield Figure.plain("bound_s", bound_s)
        for floor in ("off", "stats", "full"):
            stream_s, whole_s = (
                _golden_on_gpu_s(bench, checkpoint, floor, stream) for stream in ("on", "off")
            )
            yield Figure.plain(f"stream_{floor}_s", stream_s)
            yield Figure.plain(f"whole_{floor}_s", whole_s)
            yield Figure.at_most(f"stream_over_bound_{floor}", stream_s / bound_s, 1.3)
            yield Figure.plain(f"whole_over_bound_{floor}", whole_s / bound_s)


def _golden_on_gpu_s(bench: LoadingBench, checkpoint: Checkpoint, floor: str, stream: str) -> float:
    options = ("--stream", stream, "--noise-floor", floor, "--device-map", _GPU)
    golden = bench.scratch / "captures" / "golden"
    runs = [
        bench.golden(checkpoint, golden, *options, cache=CacheState.WARM) for _ in range(bench.scale.rounds)
    ]
    return median(run.seconds for run in runs)


def _copy_rate() -> float:
    """Return the bytes per second of the fastest copy from pinned memory to the GPU."""
    source = torch.randint(256, (_COPIED_BYTES,), dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=_GPU)
    seconds = []
    for _ in range(_COPIES):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        torch.cuda.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    fastest: float = min(seconds)
    return _COPIED_BYTES / fastest
