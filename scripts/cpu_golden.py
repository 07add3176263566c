"""A golden of a whole model on the CPU, for what is measured against one."""

from __future__ import annotations

from pathlib import Path

import torch

from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import full_run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.prompts import InputRequest, build_inputs


def capture_cpu_golden(
    folder: Path,
    directory: Path,
    *,
    rows: InputRequest,
    sites_level: str,
    noise_floor: str,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "sdpa",
    experts: str = "grouped_mm",
    floor_variants: tuple[str, ...] = (),
) -> Capture:
    """Run transformers' model over `rows` and capture it.

    Args:
        folder: The checkpoint.
        directory: Where the capture goes.
        rows: The inputs.
        sites_level: `layer`, `component` or `all`.
        noise_floor: `full`, `stats` or `off`.
        dtype: Of weights and activations.
        attention: transformers' attention implementation.
        experts: Its experts implementation.
        floor_variants: What widens its floor.
    """
    spec = ModelSpec.from_folder(folder)
    request = GoldenRequest(
        model=GoldenModelRequest(
            folder=folder,
            spec=spec,
            num_hidden_layers=spec.num_hidden_layers,
            dtype=dtype,
            placement=Placement(device_map={"": "cpu"}),
            attn_implementation=attention,
            experts_implementation=experts,
        ),
        model_source=str(folder),
        run=full_run(spec.num_hidden_layers, sites_level=sites_level),
        inputs=build_inputs(rows, folder=folder, spec=spec),
        noise_floor=noise_floor,
        floor_variants=floor_variants,
    )
    with open_golden(request) as golden:
        golden.capture(directory, extra={})
    return Capture.open(directory)
