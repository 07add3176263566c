"""Makes goldens in a process of its own and tells what memory they took: measured_golden.py CHECKPOINT CASES TOY.

CASES is JSON: a list of objects, each the options of one golden of CHECKPOINT; TOY is run first, unmeasured. For each
case a line of JSON says the highest anonymous memory above that before (`peak`), what was left of it at the end
(`left`), the estimates, and the error there was.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from goldens import golden_request

from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.machine.memory import MemoryBudget, MemoryBudgetError, MemoryUsage, give_back_freed_memory
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.text.input_request import InputRequest


def main() -> None:
    """Run every case, after one that is not measured: what libraries set up once belongs to none."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    warm_up = Path(sys.argv[3])
    for experts in ("grouped_mm", "eager"):
        measure(warm_up, {"lens": [8], "noise_floor": "full", "experts": experts})
    for case in cases:
        sys.stdout.write(json.dumps(measure(folder, case)) + "\n")


def measure(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Make one golden."""
    give_back_freed_memory()
    error = None
    directory = Path(tempfile.mkdtemp())
    with MemoryTracker(interval_s=0.001) as tracker:
        request = read_request(folder, case)
        try:
            with open_golden(request) as golden:
                golden.capture(directory / "capture", extra={})
        except MemoryBudgetError as refused:
            error = str(refused)
    shutil.rmtree(directory)
    give_back_freed_memory()
    before = tracker.baseline.anonymous_bytes
    footprint = request.footprint
    return {
        "peak": tracker.peak.anonymous_bytes - before,
        "left": MemoryUsage.on_host().anonymous_bytes - before,
        "error": error,
        "layer": footprint.layer_bytes,
        "packed_layer": footprint.packed_layer_bytes,
        "vocabulary": footprint.vocabulary_bytes,
        "activations": footprint.activation_bytes,
        "logits": footprint.logits_bytes,
    }


def read_request(folder: Path, case: dict[str, Any]) -> GoldenRequest:
    """The request that a case's options describe; a `budget` counts from what is in use now."""
    in_use = MemoryUsage.on_host().anonymous_bytes
    prefetch, packed = case.get("prefetch", False), case.get("packed", False)
    streaming = Streaming(device=torch.device("cpu"), prefetch=prefetch, packed=packed)
    return golden_request(
        folder,
        attn_implementation=case.get("attn", "sdpa"),
        experts_implementation=case.get("experts", "grouped_mm"),
        inputs=InputRequest(seq_lens=tuple(case["lens"])),
        noise_floor=case.get("noise_floor", "off"),
        floor_variants=tuple(case.get("floor_variants", ())),
        streaming=None if case.get("whole") else streaming,
        budget=MemoryBudget(in_use + case["budget"] if "budget" in case else None),
    )


if __name__ == "__main__":
    main()
