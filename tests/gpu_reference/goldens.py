"""Goldens asked for, captured, compared and interrupted, and budgets of memory, for the tests of goldens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.machine.memory import MemoryBudget, MemoryUsage, give_back_freed_memory
from minimax_tools.model.run import Run, full_run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

CPU = Placement(device_map={"": "cpu"})
FEW = InputRequest(seq_lens=(3, 2))

# Ways to ask for a golden, each of which a stream answers with the same bytes.
STREAMED: dict[str, dict[str, Any]] = {
    "floor": {"noise_floor": "full"},
    "eager": {"noise_floor": "stats", "experts_implementation": "eager", "attn_implementation": "eager"},
    "batched": {"experts_implementation": "batched_mm"},
    "float32": {"dtype": torch.float32},
    "left": {"inputs": InputRequest(seq_lens=(24, 15), padding_side="left")},
    "few": {"inputs": FEW, "noise_floor": "full"},
}


def streams(device: str) -> dict[str, Streaming]:
    """Return both ways to stream, by name."""
    return {
        "alone": Streaming(device=torch.device(device), prefetch=False),
        "prefetching": Streaming(device=torch.device(device), prefetch=True),
    }


def golden_request(
    folder: Path,
    *,
    run: Run | None = None,
    inputs: InputRequest | None = None,
    dtype: torch.dtype = torch.bfloat16,
    placement: Placement = CPU,
    attn_implementation: str = "sdpa",
    experts_implementation: str = "grouped_mm",
    **options: Any,
) -> GoldenRequest:
    """Make a golden request: the whole model on two unequal rows, no noise floor, unless told otherwise."""
    spec = ModelSpec.from_folder(folder)
    run = run or full_run(spec.num_hidden_layers, sites_level="all")
    model = GoldenModelRequest(
        folder=folder,
        spec=spec,
        num_hidden_layers=run.span.stop,
        dtype=dtype,
        placement=placement,
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
    )
    built = build_inputs(inputs or InputRequest(seq_lens=(24, 15)), folder=folder, spec=spec)
    chosen = {"noise_floor": "off", "streaming": None, **options}
    return GoldenRequest(model=model, model_source="toy", run=run, inputs=built, **chosen)


def capture(request: GoldenRequest, directory: Path, progress: Any = None) -> Capture:
    """Make a golden."""
    with open_golden(request) as golden:
        golden.capture(directory, extra={}, progress=progress)
    return Capture.open(directory)


def contents(directory: Path) -> dict[str, bytes]:
    """Read a capture's files by name."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.is_file() and path.suffix != ".lock"
    }


def present(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return what a capture holds."""
    assert tensor is not None
    return tensor


class StoppedError(Exception):
    """Ends a run."""


class StopAfter:
    """Ends a run when so many layers are written; notes which were passed by."""

    def __init__(self, num_layers: int) -> None:
        self.left = num_layers
        self.passed: list[int] = []

    def advance(self, layer: int, *, num_bytes: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError

    def skip(self, layer: int) -> None:
        self.passed.append(layer)


def interrupt(request: GoldenRequest, directory: Path, *, after: int) -> None:
    """Make a golden that ends when so many layers are written."""
    with pytest.raises(StoppedError):
        capture(request, directory, StopAfter(after))


def refuse_to_run(*_: object) -> None:
    """Fail: a hook of a module that is not to run."""
    raise AssertionError("a layer ran that was to stand aside")


def in_use_and(num_bytes: float) -> MemoryBudget:
    """Return a budget of what is in use now and some bytes more."""
    # What earlier tests left to be freed would be room that nobody counted on.
    give_back_freed_memory()
    return MemoryBudget(MemoryUsage.on_host().anonymous_bytes + int(num_bytes))
