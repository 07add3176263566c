"""The ways to make a golden on a machine, and the owner's table of machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_reference.model.footprint import Footprint
from gpu_reference.readiness.golden_way import GoldenWay, GpuMachine, Job, Speeds, find_ways, layers_on_gpus
from minimax_tools.errors import UsageError
from minimax_tools.machine.size import parse_size
from minimax_tools.reference.variant_names import variant_names
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

SPEEDS = Speeds(disk_bytes_per_s=1e9, is_disk_known=True, gpu_flops_per_s=1e13, cpu_flops_per_s=1e11)
STORED_BYTES = 230 * 10**9


@pytest.fixture(scope="module")
def job() -> Job:
    """The golden of MiniMax-M2 with the four rows that mm2-gpu takes by itself."""
    spec = SyntheticModel.m2().spec()
    footprint = Footprint(
        spec=spec,
        num_layers=spec.num_hidden_layers,
        dtype=torch.bfloat16,
        inputs=build_inputs(InputRequest(), folder=Path("/"), spec=spec),
        keeps_logits=True,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        floor_variants=variant_names(2),
    )
    return Job(footprint=footprint, stored_bytes=STORED_BYTES)


def ways(job: Job, gpus: str, memory: str) -> dict[str, GoldenWay]:
    return {way.name: way for way in find_ways(GpuMachine.parse(gpus, parse_size(memory)), job, SPEEDS)}


@pytest.mark.parametrize(
    ("gpus", "held"), [("8x80GB", 62), ("6x80GB", 60), ("4x80GB", 40), ("24GB", 2), ("0", 0)]
)
def test_gpus_hold_the_layers_that_fit(job: Job, gpus: str, held: int) -> None:
    assert layers_on_gpus(GpuMachine.parse(gpus, 10**12), job) == held


def test_eight_gpus_of_80_gb_hold_the_model(job: Job) -> None:
    way = ways(job, "8x80GB", "1TB")["whole on the GPUs"]
    assert way.works
    assert way.options == ("--stream", "off", "--device-map", "auto", "--max-memory", "77GB")
    assert way.needed_bytes < way.room_bytes
    assert way.time_s == pytest.approx(STORED_BYTES / 1e9, rel=0.1)


def test_a_small_box_streams(job: Job) -> None:
    found = ways(job, "24GB", "32GB")
    assert [way.name for way in found.values() if way.works] == [
        "streamed, two layers",
        "streamed, one layer",
        "streamed, packed",
    ]
    assert found["streamed, two layers"].time_s == pytest.approx(230, rel=0.05)


def test_reading_ahead_hides_the_shorter_time(job: Job) -> None:
    found = ways(job, "0", "32GB")
    two, one = found["streamed, two layers"].time_s, found["streamed, one layer"].time_s
    assert two is not None
    assert one is not None
    assert one == pytest.approx(two + min(230, job.flops / 1e11))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8x80GB", "8 × 80.0 GB, 1.0 TB of memory"),
        ("24GB", "1 × 24.0 GB, 1.0 TB of memory"),
        ("2 × 40 GiB", "2 × 42.9 GB, 1.0 TB of memory"),
        ("0", "no GPU, 1.0 TB of memory"),
    ],
)
def test_a_machine_is_read_from_its_description(text: str, shown: str) -> None:
    assert str(GpuMachine.parse(text, 10**12)) == shown


@pytest.mark.parametrize("gpus", ["many", "0x80GB", "8x80"])
def test_another_text_is_refused(gpus: str) -> None:
    with pytest.raises(UsageError, match="cannot be read: expected"):
        GpuMachine.parse(gpus, None)
