"""`mm2-gpu check`: this machine, and machines that are described."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from gpu_reference.model.footprint import Footprint
from gpu_reference.readiness.golden_way import (
    GoldenWay,
    Gpu,
    GpuMachine,
    Job,
    Speeds,
    find_ways,
    layers_on_gpus,
)
from gpu_reference.readiness.machine_check import check_gpus
from minimax_tools.errors import UsageError
from minimax_tools.machine.finding import Level, MachineFinding
from minimax_tools.machine.size import parse_size
from minimax_tools.reference.variant_names import variant_names
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs


def check(command: Any, *arguments: object, code: int = 0) -> dict[str, Any]:
    done = command(mm2_gpu, "check", *arguments, "--json", "--quiet")
    assert done.exit_code == code, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def findings(record: dict[str, Any], subject: str) -> list[dict[str, Any]]:
    return [finding for finding in record["findings"] if finding["subject"] == subject]


def test_this_machine_is_checked_for_a_checkpoint(command: Any, toy: Path, tmp_path: Path) -> None:
    record = check(command, "--model", toy, "--captures", tmp_path)
    subjects = {finding["subject"] for finding in record["findings"]}
    assert subjects >= {"GPUs", "versions", "shards", "disk", "memory"}
    assert record["worst"] != "fail"
    line = shlex.split(record["next"][0])
    assert line[:4] == ["mm2-gpu", "extract-all", "--model", str(toy)]
    options = [way["options"] for way in record["ways"] if way["works"]]
    assert line[4:] in options


@pytest.mark.slow
def test_the_way_that_is_named_makes_a_golden(command: Any, toy: Path, tmp_path: Path) -> None:
    arguments = shlex.split(check(command, "--model", toy)["next"][0])[1:]
    done = command(mm2_gpu, *arguments, "--seq-len", "8", "--output-dir", tmp_path / "golden", "--quiet")
    assert done.exit_code == 0, done.output


def test_missing_shards_are_named(command: Any, toy: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy, tmp_path / "toy"))
    absent = sorted(folder.glob("*.safetensors"))[1]
    absent.unlink()
    (found,) = findings(check(command, "--model", folder), "shards")
    assert found["level"] == "warn"
    assert f"lacks 1 shard: {absent.name}" in found["found"]


def test_a_machine_may_be_described_before_it_is_rented(command: Any, toy: Path) -> None:
    record = check(command, "--model", toy, "--gpus", "8x80GB", "--memory", "1TB")
    assert len(record["machine"]["gpus"]) == 8
    assert record["machine"]["is_here"] is False
    assert (record["ways"][0]["name"], record["ways"][0]["works"]) == ("whole on the GPUs", True)
    # The command takes the way of the table.
    (row,) = (one for one in record["configurations"] if one["machine"].startswith("8 × 80.0 GB"))
    assert row["way"] == "whole on the GPUs"
    assert record["next"] == [shlex.join(("mm2-gpu", "extract-all", "--model", str(toy), *row["options"]))]


def test_two_layers_at_a_time_are_chosen_where_the_disk_is_slow(command: Any) -> None:
    # Read beside the arithmetic, they are much faster than all of them at first.
    slow = check(command, "--gpus", "0", "--memory", "1TB", "--disk-speed", "1GB")
    assert [finding["subject"] for finding in slow["findings"]] == ["memory"]
    (row,) = (one for one in slow["configurations"] if one["machine"].startswith("no GPU, 1.0 TB"))
    assert row["way"] == "streamed, two layers"


def test_a_machine_that_is_too_small_fails(command: Any) -> None:
    record = check(command, "--gpus", "0", "--memory", "2GB", code=3)
    assert record["worst"] == "fail"
    (found,) = findings(record, "memory")
    assert "no way fits: streamed, packed takes" in found["found"]
    assert record["next"] == []


def test_old_versions_and_rounding_are_found(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    old = tmp_path / "transformers-5.10.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.10.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    record = check(command, "--captures", tmp_path, code=3)
    broken = [finding["found"] for finding in findings(record, "versions") if finding["level"] == "fail"]
    assert any("transformers 5.10.0: it ignores rotary_dim" in text for text in broken)
    (rounded,) = findings(record, "environment")
    assert "NVIDIA_TF32_OVERRIDE=1 rounds float32 products to TF32" in rounded["found"]


def test_a_driver_without_a_torch_for_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    )
    machine = GpuMachine(gpus=(), host_bytes=10**10, is_here=True)
    (found,) = check_gpus(machine, tmp_path)
    assert found.level is Level.WARN
    assert f"driver 550.54.15 is here, and torch {torch.__version__} sees no GPU" in found.found


def test_a_gpu_in_use_is_told(tmp_path: Path) -> None:
    gpus = tuple(Gpu(name="A100", total_bytes=80 * 10**9, free_bytes=free * 10**9) for free in (79, 20))
    found = list(check_gpus(GpuMachine(gpus=gpus, host_bytes=10**11, is_here=True), tmp_path))
    assert found[0].found.startswith("2 × A100 80.0 GB")
    assert found[-1] == MachineFinding(
        Level.NOTE,
        "GPUs",
        "in use by others: GPU 1",
        "nvidia-smi shows by whom. Or leave them out with CUDA_VISIBLE_DEVICES.",
    )


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


def test_gpus_hold_the_layers_that_fit(job: Job) -> None:
    for gpus, held in {"8x80GB": 62, "6x80GB": 60, "4x80GB": 40, "24GB": 2, "0": 0}.items():
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
    assert one == pytest.approx(two + min(230, job.flops / 1e11))


def test_a_machine_is_read_from_its_description() -> None:
    for text, shown in {
        "8x80GB": "8 × 80.0 GB, 1.0 TB of memory",
        "24GB": "1 × 24.0 GB, 1.0 TB of memory",
        "2 × 40 GiB": "2 × 42.9 GB, 1.0 TB of memory",
        "0": "no GPU, 1.0 TB of memory",
    }.items():
        assert str(GpuMachine.parse(text, 10**12)) == shown
    for text in ("many", "0x80GB", "8x80"):
        with pytest.raises(UsageError, match="cannot be read: expected"):
            GpuMachine.parse(text, None)
