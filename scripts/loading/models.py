"""Figures of whole models: two split in bottom, trunk and top, and one of full size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from figures import Figure
from page_cache import drop_cache
from peaks import tree_bytes

from loading.bench import (
    READ_PLAINLY,
    SPLIT,
    WRITE_QWEN2,
    Checkpoint,
    LoadingBench,
    ProbeResult,
    bf16_layer_bytes,
)
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.model.weight_names import EMBEDDING, layer_of
from minimax_tools.synthetic.toy_model import PRESETS

# Forward passes of a split model.
_PASSES = 5
# A golden "without reads" still reads two layers. So the time of a layer is taken from goldens of two lengths.
_FEW_LAYERS, _MORE_LAYERS = 2, 6


def measure_split(bench: LoadingBench) -> Iterator[Figure]:
    """Yield peak, load time and tokens per second of split models, parts loaded one by one."""
    quantities = bench.scale.qwen2
    with bench.folder("qwen2") as folder:
        shard_bytes = bench.scale.shard_bytes // 3
        bench.probe(WRITE_QWEN2, folder=str(folder), shard_bytes=shard_bytes, quantities=dict(quantities))
        yield from _split_figures(bench, folder, "qwen2", quantities["num_hidden_layers"])
    num_layers = bench.scale.split_layers
    with bench.checkpoint("minimax_m2", dtype=torch.bfloat16, num_layers=num_layers) as checkpoint:
        yield from _split_figures(bench, checkpoint.folder, "minimax_m2", num_layers)


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


def _split_figures(bench: LoadingBench, folder: Path, model_type: str, num_layers: int) -> Iterator[Figure]:
    # Bottom and top have a quarter of the layers each.
    outer = max(1, num_layers // 4)
    runs = [
        bench.probe(
            SPLIT,
            needs_bytes=3 * tree_bytes(folder),  # with room to spare
            model=str(folder),
            model_type=model_type,
            split_points=[outer, num_layers - outer],
            num_tokens=sum(bench.seq_lens),
            rounds=_PASSES,
        )
        for _ in range(bench.scale.rounds)
    ]
    name = f"split_{model_type}"
    peak = median(run.peak_bytes / run.values["num_bytes"] for run in runs)
    resident = median(run.peak_resident_bytes / run.values["num_bytes"] for run in runs)
    yield Figure.plain(f"{name}_peak_anonymous_over_model", peak)
    yield Figure.plain(f"{name}_peak_resident_over_model", resident)
    yield Figure.plain(f"{name}_load_s", median(run.values["load_s"] for run in runs))
    yield Figure.plain(f"{name}_tokens_per_s", median(run.values["tokens_per_s"] for run in runs))
    equal = len({run.values["logits"] for run in runs}) == 1
    yield Figure.exactly(f"{name}_logits_equal", float(equal), 1)


def _stored_bytes(checkpoint: Checkpoint, layers: range) -> int:
    """Compute the stored size of these layers and the embedding; for all layers, of the whole checkpoint."""
    if len(layers) == checkpoint.num_layers:
        return checkpoint.stored_bytes
    return sum(
        entry.size_bytes
        for entry in TensorIndex.from_folder(checkpoint.folder).entries.values()
        if entry.name == EMBEDDING or layer_of(entry.name) in layers
    )
