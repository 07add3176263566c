"""Figures of extraction: its speed against `cp`, and its memory.

An extraction cuts the slice of one node out of a checkpoint, and `cp` copies such a slice. Both read from the page
cache, write as many bytes to the same file system, and sync them to the disk. The rounds alternate, and the figure is
the median of their ratios.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from figures import Figure
from page_cache import warm_cache

from minimax_tools.machine.files import sync_path
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.folder import cut_slice, write_slice
from minimax_tools.slices.stored_weights import StoredWeights
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from slices.running import divide_in_two

# 2.1 GB in FP8, of which nine tenths are cut out. The toy has 15 MB, too little for a meaningful ratio.
_MODELS = {
    "full": SyntheticModel(
        num_hidden_layers=10, hidden_size=1536, intermediate_size=768, num_local_experts=56, vocab_size=32000
    ),
    "toy": SyntheticModel(),
}
_SHARD_BYTES = {"full": 500_000_000, "toy": 4_000_000}
# As many tensors as MiniMax-M2 has, 96 103, all of them small; half of them are cut out.
_MANY_TENSORS = {
    "full": SyntheticModel(
        num_hidden_layers=62,
        hidden_size=128,
        intermediate_size=8,
        num_local_experts=256,
        num_experts_per_tok=8,
    ),
    "toy": SyntheticModel(num_hidden_layers=2),
}
_SMALL_SHARD_BYTES = 2_000_000
_ROUNDS = {"full": 7, "toy": 2}
_NODE = "a"  # the first of the plan's two nodes

# A process that extracts as the command does, and prints its anonymous memory after the imports and at its peak.
_MEASURE = """
import json, sys
from pathlib import Path
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.slices.folder import write_slice
from minimax_tools.slices.slice_plans import PartitionPlan, StoredWeights, cut_slice
from minimax_tools.machine.memory_tracker import MemoryTracker

plan_file, node, output = sys.argv[1:]
with MemoryTracker(interval_s=0.001) as tracker:
    before = tracker.get_current_usage()["anonymous_bytes"]
    plan = PartitionPlan.read(Path(plan_file), tensors_of=node)
    cut = cut_slice(plan, node, StoredWeights.of_slice(plan.model, plan.slice_of(node)))
    with LayerProgress(len(cut.shards)) as progress:
        write_slice(cut, Path(output), progress=progress)
print(json.dumps({"before": before, "peak": tracker.peak.anonymous_bytes}))
"""


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of extracting most of a checkpoint; the scale `full` takes minutes and 6 GB of disk."""
    with tempfile.TemporaryDirectory(prefix="mm2-extracting-") as scratch:
        large, many = Path(scratch) / "large", Path(scratch) / "many"
        last = _MODELS[scale].num_hidden_layers - 1
        plan_file = _make_checkpoint(large, _MODELS[scale], _SHARD_BYTES[scale], num_layers=last)
        yield from _measure_speed(large, plan_file, rounds=_ROUNDS[scale])
        half = _MANY_TENSORS[scale].num_hidden_layers // 2
        many_file = _make_checkpoint(many, _MANY_TENSORS[scale], _SMALL_SHARD_BYTES, num_layers=half)
        peaks = {name: _measure_memory(file) for name, file in (("large", plan_file), ("many", many_file))}
        yield Figure.at_most("extract_peak_anonymous_mb", max(peaks.values()), 50)
        yield Figure.plain("extract_peak_anonymous_mb_of_large_tensors", peaks["large"])
        yield Figure.plain("extract_peak_anonymous_mb_of_many_tensors", peaks["many"])


def _make_checkpoint(folder: Path, model: SyntheticModel, shard_size_bytes: int, *, num_layers: int) -> Path:
    """Write an FP8 checkpoint, and a plan that gives the first node `num_layers` layers; return the plan's file."""
    folder.mkdir()
    synthesize(
        folder / "model", model=model, dtype=torch.float8_e4m3fn, shard_size_bytes=shard_size_bytes, seed=0
    )
    plan = divide_in_two(folder / "model", model, num_layers, Workload(context_length=1024))
    plan.write(folder / "plan.json")
    return folder / "plan.json"


def _measure_speed(folder: Path, plan_file: Path, *, rounds: int) -> Iterator[Figure]:
    sources = tuple(sorted((folder / "model").glob("*.safetensors")))
    slice_folder, kept, copied = folder / "slice", folder / "kept", folder / "copied"
    # This slice is what `cp` copies.
    num_bytes = _extract(plan_file, kept)
    extractions: list[float] = []
    copies: list[float] = []
    for number in range(rounds + 1):
        measured = [
            (extractions, sources, slice_folder, lambda: _extract(plan_file, slice_folder)),
            (copies, tuple(kept.iterdir()), copied, lambda: _copy(kept, copied)),
        ]
        # Extraction and copy take turns in going first.
        for times, files_read, target, work in measured[:: 1 if number % 2 else -1]:
            warm_cache(files_read)
            seconds = _time(work)
            shutil.rmtree(target)
            # Otherwise the deletion, which the disk's journal writes later, would count in the next round.
            os.sync()
            # The first round only warms up.
            if number:
                times.append(seconds)
    ratios = [copy_s / extract_s for copy_s, extract_s in zip(copies, extractions, strict=True)]
    yield Figure.at_least("extract_over_cp", median(ratios), 0.8)
    yield Figure.plain("extract_gb_per_s", num_bytes / median(extractions) / 1e9)
    yield Figure.plain("cp_gb_per_s", num_bytes / median(copies) / 1e9)
    yield Figure.plain("extract_over_cp_least", min(ratios))


def _measure_memory(plan_file: Path) -> float:
    """Measure the peak of an extraction's anonymous memory above the imports, in 10⁶ bytes."""
    words = [sys.executable, "-c", _MEASURE, str(plan_file), _NODE, str(plan_file.parent / "measured")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout.splitlines()[-1])
    return float(record["peak"] - record["before"]) / 1e6


def _extract(plan_file: Path, output: Path) -> int:
    """Extract as the command does, beginning with the plan's file; return the size of the data."""
    plan = PartitionPlan.read(plan_file, tensors_of=_NODE)
    source = StoredWeights.of_slice(plan.model, plan.slice_of(_NODE))
    return write_slice(cut_slice(plan, _NODE, source), output).size_bytes


def _copy(folder: Path, output: Path) -> None:
    """Copy the bytes, not by reflink, and sync them as an extraction does."""
    subprocess.run(["cp", "--reflink=never", "-r", str(folder), str(output)], check=True)
    for path in (*output.iterdir(), output, output.parent):
        sync_path(path)


def _time(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
