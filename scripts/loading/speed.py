"""Figures of time: loading, dequantising, streaming, offloading.

A ratio compares two runs of one round, which follow each other; the figure is the median of the rounds. Seconds begin
after the imports of a process, on both sides of a ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from figures import Figure
from page_cache import CacheState

from loading.bench import (
    DEQUANTISE,
    FORWARD_OFFLOADED,
    FORWARD_STREAMED,
    LOAD_LAYERS,
    READ_PLAINLY,
    Checkpoint,
    LoadingBench,
    ProbeResult,
)


def measure_warm_load(bench: LoadingBench, checkpoint: Checkpoint) -> Iterator[Figure]:
    """Yield the time of `LayerLoader` for all layers over that of a plain read of the same bytes from the page cache.

    The plain read is the faster of two: one thread with a buffer that fits the processor's cache, or all threads with
    as much memory as a layer takes. The rate of all threads with such small buffers is a figure of its own.
    """
    rates, ratios, raw_rates, cached_rates = [], [], [], []
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
        cached_rates.append(num_bytes / _read_s(bench, checkpoint, CacheState.WARM))
        ratios.append(load_s / read_s)
    yield Figure.at_most("warm_load_over_raw_read", median(ratios), 1.3)
    yield Figure.plain("warm_load_gb_per_s", median(rates) / 1e9)
    yield Figure.plain("raw_warm_read_gb_per_s", median(raw_rates) / 1e9)
    yield Figure.plain("raw_warm_read_into_cache_gb_per_s", median(cached_rates) / 1e9)


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
