"""Golden requests over the toy, and its BF16 copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import GoldenRequest
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.model.run import Run, full_run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

sys.path.append(str(Path(__file__).parent))

Ask = Callable[..., GoldenRequest]
Measure = Callable[..., list[dict[str, Any]]]

CPU = Placement(device_map={"": "cpu"})


@pytest.fixture(scope="session")
def toy_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 copy of the model `toy`."""
    folder = tmp_path_factory.mktemp("checkpoint") / "toy_bf16"
    synthesize(folder, model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="session")
def ask(toy: Path) -> Ask:
    """Makes a golden request: the whole toy on two unequal rows, no noise floor, unless told otherwise."""

    def make(
        *,
        folder: Path = toy,
        run: Run | None = None,
        inputs: InputRequest | None = None,
        noise_floor: str = "off",
        dtype: torch.dtype = torch.bfloat16,
        placement: Placement = CPU,
        attn_implementation: str = "sdpa",
        experts_implementation: str = "grouped_mm",
        streaming: Streaming | None = None,
    ) -> GoldenRequest:
        spec = ModelSpec.from_folder(folder)
        run = run or full_run(spec.num_hidden_layers, sites_level="all")
        return GoldenRequest(
            model=GoldenModelRequest(
                folder=folder,
                spec=spec,
                num_hidden_layers=run.span.stop,
                dtype=dtype,
                placement=placement,
                attn_implementation=attn_implementation,
                experts_implementation=experts_implementation,
            ),
            model_source="toy",
            run=run,
            inputs=build_inputs(inputs or InputRequest(seq_lens=(24, 15)), folder=folder, spec=spec),
            noise_floor=noise_floor,
            streaming=streaming,
        )

    return make


@pytest.fixture(scope="session")
def measure(toy: Path) -> Measure:
    """Makes goldens one by one in another process, as `measured_golden.py` says, and tells what memory each took."""

    def run(folder: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
        script = Path(__file__).with_name("measured_golden.py")
        measured = subprocess.run(
            [sys.executable, str(script), str(folder), json.dumps(cases), str(toy)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert measured.returncode == 0, measured.stderr
        return [json.loads(line) for line in measured.stdout.splitlines()]

    return run
