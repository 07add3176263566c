"""Figures of runs along a plan: bytes that a rank reads, and time of two ranks against one process.

`two_ranks_over_one` is the time of two ranks, each with one thread on a core of its own, over that of one process with
one thread. Both capture the same golden of eight prompts with its noise floor, from the page cache. Start-up, about ten
seconds of imports, is left out. The rounds alternate, and the figure is the median of their ratios.

The ratio has a lower bound, since the second rank's forward passes wait for the first rank's (see
`gpu_reference.pipeline`). Of the time of the single process, let

- S be the share of forward passes
- R be the share of reading and dequantising
- W be the share of float32 twins, statistics, digests and writing

and let x be the share of the layers that the first rank has. Then the ratio is max(x, 1 − x, S + W + x (R − W)). If
W > R, its minimum is (S + W) / (S + 2 W), at x equal to that minimum.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from figures import Figure
from page_cache import warm_cache

from minimax_tools.capture.read_record import RECORDS_FOLDER, read_records
from minimax_tools.errors import CannotRunError
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.source import open_source
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

# 0.5 GB in FP8; the toy has 15 MB, too little for a meaningful ratio.
_MODELS = {
    "full": SyntheticModel(
        num_hidden_layers=12,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=512,
        vocab_size=8192,
    ),
    "toy": SyntheticModel(),
}
_LENGTHS = {"full": (96, 61, 96, 80, 72, 96, 64, 90), "toy": (24, 15, 24, 9, 20, 24, 12, 18)}
_ROUNDS = {"full": 5, "toy": 1}
# Share of the layers on the first rank: 7 of 12 layers were quicker than 6 and 8.
_FIRST_SHARE = 7 / 12
_TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_SCRIPTS = Path(__file__).parents[1]


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of a golden capture by two ranks and by one process; `full` takes several minutes."""
    with tempfile.TemporaryDirectory(prefix="mm2-running-") as scratch:
        folder, plan_file, output = (Path(scratch) / name for name in ("model", "plan.json", "capture"))
        model = _MODELS[scale]
        synthesize(folder, model=model, dtype=torch.float8_e4m3fn, shard_size_bytes=100_000_000, seed=0)
        num_first = round(model.num_hidden_layers * _FIRST_SHARE)
        plan = divide_in_two(folder, model, num_first, Workload(context_length=96, batch_size=8))
        plan.write(plan_file)
        warm_cache(tuple(folder.glob("*.safetensors")))
        lengths = ",".join(map(str, _LENGTHS[scale]))
        ratios, seconds = [], []
        for _ in range(_ROUNDS[scale]):
            one_process_s = _time([sys.executable], folder, output, lengths)
            two_ranks_s = _time(_TWO_RANKS, folder, output, lengths, str(plan_file))
            ratios.append(two_ranks_s / one_process_s)
            seconds.append((one_process_s, two_ranks_s))
        yield Figure.exactly("bytes_read_over_slice", _read_over_slice(plan, output), 1.0)
        yield Figure.at_most("two_ranks_over_one", median(ratios), 0.6)
        yield Figure.plain("one_process_s", median(one for one, _ in seconds))
        yield Figure.plain("two_ranks_s", median(two for _, two in seconds))


def divide_in_two(folder: Path, model: SyntheticModel, num_first: int, workload: Workload) -> PartitionPlan:
    """Give the first `num_first` layers of a checkpoint to node `a`, and the other layers to node `b`."""
    spans = {"a": Span(0, num_first), "b": Span(num_first, model.num_hidden_layers)}
    nodes = [Node(name=name, memory_bytes=2**40, layers=span) for name, span in spans.items()]
    return open_source(str(folder)).divide(planner="manual", nodes=nodes, workload=workload)


def _time(launcher: list[str], folder: Path, output: Path, *arguments: str) -> float:
    """Return the seconds that a process of `timed_capture` prints."""
    if output.exists():
        shutil.rmtree(output)
    done = subprocess.run(
        [*launcher, "-m", "slices.timed_capture", str(folder), str(output), *arguments],
        cwd=_SCRIPTS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_SCRIPTS.parent}{os.pathsep}{_SCRIPTS}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotRunError("a timed capture failed", found=done.stderr[-2000:])
    return float(json.loads(done.stdout)["seconds"])


def _read_over_slice(plan: PartitionPlan, capture: Path) -> float:
    """Compute the bytes read over the bytes planned, for the rank whose ratio is furthest from 1."""
    records = read_records(capture / RECORDS_FOLDER, [part.node.name for part in plan.used])
    ratios = [
        records[part.node.name].bytes_read / sum(tensor.size_bytes for tensor in part.tensors)
        for part in plan.used
    ]
    return max(ratios, key=lambda ratio: abs(ratio - 1))
