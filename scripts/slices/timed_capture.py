"""A process that times a golden capture on one core: the only process, or with PLAN a rank of torchrun.

    python -m slices.timed_capture MODEL OUTPUT SEQ_LENS [PLAN]

Started by `running.py`, which compares the two. SEQ_LENS are the lengths of the prompts, such as 24,15. Rank 0 prints
one JSON object: the seconds from when all ranks are ready until the capture is complete. They include reading the
weights: `open_golden` reads none of a streamed model.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from cpu_golden import request_golden

from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.pipeline.pipeline import capture_by_ranks
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.machine.progress import NoProgress
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.ranks.rank_group import RankPlace, open_ranks
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

_CPU = torch.device("cpu")


def main(model: str, output: str, lengths: str, plan_file: str | None = None) -> None:
    """Capture, and print the seconds."""
    # The time of this import must not count.
    importlib.import_module("transformers.models.minimax_m2.modeling_minimax_m2")
    place = RankPlace.from_environment()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place.rank % len(cores)]})
    if plan_file is None:
        # One process reads each layer while the one before is computed; a rank below reads its slice once and holds it.
        with open_golden(_request(Path(model), lengths, Streaming(device=_CPU))) as golden:
            began_s = time.perf_counter()
            golden.capture(Path(output), extra={})
        _print_seconds_since(began_s)
        return
    plan = PartitionPlan.read(Path(plan_file))
    with open_ranks(place) as ranks:
        ranks.assign([part.node.name for part in plan.used])
        ranks.join(_CPU)
        streaming = Streaming(device=_CPU, prefetch=False, part=plan.used[place.rank], holds_part=True)
        with open_golden(_request(Path(model), lengths, streaming)) as golden:
            # The time begins when all ranks have got here.
            ranks.publish(f"here/{ranks.rank}", True)
            for rank in range(ranks.num_ranks):
                ranks.wait_for(f"here/{rank}")
            began_s = time.perf_counter()
            capture_by_ranks(golden, ranks, plan, Path(output), progress=NoProgress())
    if place.rank == 0:
        _print_seconds_since(began_s)


def _request(folder: Path, lengths: str, streaming: Streaming) -> GoldenRequest:
    rows = InputRequest(seq_lens=tuple(map(int, lengths.split(","))))
    inputs = build_inputs(rows, folder=folder, spec=ModelSpec.from_folder(folder))
    return request_golden(folder, inputs, noise_floor="full", streaming=streaming)


def _print_seconds_since(began_s: float) -> None:
    print(json.dumps({"seconds": time.perf_counter() - began_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
