"""The figures of `bench_loading.py` that tell of whole models: split in three, and at full size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from figures import Figure
from loading_bench import SPLIT, WRITE_QWEN2, Bench, Checkpoint, Measured, bf16_layer_bytes
from peaks import tree_bytes

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.names import EMBEDDING, layer_of
from minimax_tools.checkpoint.synthetic_model import PRESETS

_PASSES = 5


def measure_split(bench: Bench) -> Iterator[Figure]:
    """Bottom, trunk and top, with `low_memory` and without: peak, time to load, tokens a second."""
    quantities = bench.scale.qwen2
    with bench.folder("qwen2") as folder:
        shard_bytes = bench.scale.shard_bytes // 3
        bench.probe(WRITE_QWEN2, folder=str(folder), shard_bytes=shard_bytes, quantities=dict(quantities))
        yield from _split_figures(bench, folder, "qwen2", quantities["num_hidden_layers"])
    num_layers = bench.scale.split_layers
    with bench.checkpoint("minimax_m2", dtype=torch.bfloat16, num_layers=num_layers) as checkpoint:
        yield from _split_figures(bench, checkpoint.folder, "minimax_m2", num_layers)


def measure_full_size(bench: Bench, folder: Path, *, num_layers: int | None) -> Iterator[Figure]:
    """A golden of a checkpoint of the true size, streamed and cold; a layer is one of BF16 weights.

    Args:
        bench: The bench.
        folder: The checkpoint.
        num_layers: How many of its first layers; None for all of them, and the head.
    """
    checkpoint = Checkpoint.of(folder)
    command: tuple[str, ...] = ("extract-all",)
    stored_bytes = checkpoint.stored_bytes
    if num_layers is not None:
        command = ("multi-layer", "--layers", f"0:{num_layers}")
        stored_bytes = _stored_bytes(folder, num_layers)
    with bench.folder("captures") as captures:
        run = bench.golden(
            checkpoint, captures / "full_size", "--stream", "on", "--noise-floor", "stats", command=command
        )
        capture_bytes = tree_bytes(captures)
    read_bytes = run.told["bytes_read"]
    yield Figure.plain("full_size_s", run.seconds)
    yield Figure.plain("full_size_gb_per_s", read_bytes / run.seconds / 1e9)
    yield Figure.plain(
        "full_size_peak_anonymous_over_layer", run.peak_bytes / bf16_layer_bytes(PRESETS["m2"])
    )
    yield Figure.exactly("full_size_bytes_read_over_stored", read_bytes / stored_bytes, 1, tolerance=0.005)
    yield Figure.plain("full_size_disk_read_over_stored", run.disk_bytes / stored_bytes)
    yield Figure.plain("full_size_capture_gb", capture_bytes / 1e9)


def _split_figures(bench: Bench, folder: Path, model_type: str, num_layers: int) -> Iterator[Figure]:
    outer = max(1, num_layers // 4)
    runs: dict[bool, list[Measured]] = {True: [], False: []}
    for _ in range(bench.scale.rounds):
        for low_memory, kept in runs.items():
            kept.append(
                bench.probe(
                    SPLIT,
                    needs_bytes=3 * tree_bytes(folder),
                    model=str(folder),
                    model_type=model_type,
                    split_points=[outer, num_layers - outer],
                    low_memory=low_memory,
                    num_tokens=sum(bench.seq_lens),
                    rounds=_PASSES,
                )
            )
    for low_memory, kept in runs.items():
        name = f"split_{model_type}_low_memory_{'on' if low_memory else 'off'}"
        peak = median(run.peak_bytes / run.told["num_bytes"] for run in kept)
        yield Figure.plain(f"{name}_peak_over_model", peak)
        yield Figure.plain(f"{name}_load_s", median(run.told["load_s"] for run in kept))
        yield Figure.plain(f"{name}_tokens_per_s", median(run.told["tokens_per_s"] for run in kept))
    equal = len({run.told["logits"] for kept in runs.values() for run in kept}) == 1
    yield Figure.exactly(f"split_{model_type}_logits_equal", float(equal), 1)


def _stored_bytes(folder: Path, num_layers: int) -> int:
    """What the first layers and the embedding take in a checkpoint."""
    wanted = range(num_layers)
    return sum(
        entry.size_bytes
        for entry in TensorIndex.from_folder(folder).entries.values()
        if entry.name == EMBEDDING or layer_of(entry.name) in wanted
    )
