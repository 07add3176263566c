"""Findings of `mm2-test check`: each appears where it should, and is absent where there is nothing to find."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.machine.finding import Level, MachineFinding, worst_level
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.check import check_machine
from neuron.cli import main
from neuron.devices.machine import Machine

Run = Callable[..., Any]
TRUE_SIZE = SyntheticModel.m2().spec()
TOY = SyntheticModel().spec()
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of this machine's own are not what is tested."""
    # torch_xla's import sets flags of its own in the process that other tests run in too.
    for name in (
        "ATEN_CPU_CAPABILITY",
        "NEURON_COMPILE_CACHE_URL",
        "NEURON_LOGICAL_NC_CONFIG",
        "OMP_NUM_THREADS",
        "PJRT_DEVICE",
        "XLA_FLAGS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str, int], Path]:
    """The root of a machine of some type, with so many Neuron devices."""

    def make(instance_type: str, num_devices: int) -> Path:
        firmware = tmp_path / "sys/devices/virtual/dmi/id"
        firmware.mkdir(parents=True)
        (firmware / "product_name").write_text(instance_type + "\n")
        (tmp_path / "dev").mkdir()
        for number in range(num_devices):
            (tmp_path / f"dev/neuron{number}").touch()
        (tmp_path / "dev/neuron_ctl").touch()
        return tmp_path

    return make


def check(
    root: Path, *, spec: ModelSpec = TOY, backend: str = "cpu", seq_lens: tuple[int, ...] = (8,)
) -> dict[str, list[MachineFinding]]:
    findings: dict[str, list[MachineFinding]] = {}
    for finding in check_machine(spec, seq_lens, backend=backend, dtype=torch.bfloat16, root=root):
        findings.setdefault(finding.subject, []).append(finding)
    return findings


@pytest.mark.parametrize(
    ("instance_type", "num_devices", "num_cores", "hbm_gib", "has_native"),
    [
        ("trn1.2xlarge", 1, 2, 16, False),
        ("trn1.32xlarge", 16, 32, 16, False),
        ("inf2.48xlarge", 12, 24, 16, False),
        ("trn2.48xlarge", 16, 64, 24, True),
        ("trn3.48xlarge", 16, None, 36, True),
    ],
)
def test_an_instance_is_known_by_its_type(
    machine: Any,
    instance_type: str,
    num_devices: int,
    num_cores: int | None,
    hbm_gib: int,
    has_native: bool,
) -> None:
    found = Machine.current(root=machine(instance_type, num_devices))
    assert (found.instance_type, found.num_devices, found.num_cores) == (
        instance_type,
        num_devices,
        num_cores,
    )
    assert found.hbm_bytes_per_core == hbm_gib * GIB
    assert found.has_native_backend is has_native


def test_other_logical_cores_are_not_guessed(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine.current(root=machine("trn2.48xlarge", 16))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (found.num_cores, found.hbm_bytes_per_core) == (None, None)


def test_a_laptop_is_no_instance_which_is_a_note(machine: Any) -> None:
    root = machine("Latitude 7420", 0)
    found = Machine.current(root=root)
    assert found == Machine(instance_type=None, num_devices=0)
    assert (found.num_cores, found.hbm_bytes_per_core, found.has_native_backend) == (None, None, None)
    findings = check(root)
    assert findings["machine"][0].level is Level.NOTE
    assert "no Neuron device" in findings["machine"][0].found
    assert [finding.level for finding in findings["backend"]] == [Level.OK]
    assert not {"compile cache", "device memory"} & set(findings)


def test_an_instance_whose_driver_shows_no_device_fails(machine: Any) -> None:
    found = check(machine("trn1.2xlarge", 0))["machine"][0]
    assert found.level is Level.FAIL
    assert "the driver shows no device" in found.found
    assert "aws-neuronx-dkms" in found.next_step


def test_devices_that_nothing_would_compute_on_are_warned_of(machine: Any) -> None:
    findings = check(machine("trn1.2xlarge", 1))
    assert findings["machine"][0].level is Level.OK
    assert "1 device, 2 cores of 16 GiB each" in findings["machine"][0].found
    assert [finding.level for finding in findings["backend"]] == [Level.OK, Level.WARN]
    assert "nothing would run on this machine's Neuron devices: " in findings["backend"][1].found


def test_a_backend_that_is_not_here_fails(machine: Any) -> None:
    findings = check(machine("Latitude 7420", 0), backend="neuron")
    assert [finding.level for finding in findings["backend"]] == [Level.FAIL]
    assert "host memory" not in findings


@pytest.mark.parametrize(
    ("name", "value", "harmless", "level"),
    [
        ("XLA_USE_BF16", "1", "0", Level.WARN),
        ("XLA_DOWNCAST_BF16", "1", "0", Level.WARN),
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1", "0", Level.WARN),
        ("NEURON_CC_FLAGS", "--model-type transformer --auto-cast=all", "--auto-cast=none", Level.WARN),
        ("NEURON_FUSE_SOFTMAX", "1", "0", Level.NOTE),
        ("NEURON_CUSTOM_SILU", "1", "0", Level.NOTE),
        ("XLA_DISABLE_FUNCTIONALIZATION", "0", "1", Level.WARN),
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "0", "1", Level.WARN),
        ("TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS", "0", "1", Level.NOTE),
    ],
)
def test_what_changes_numbers_is_named(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str, harmless: str, level: Level
) -> None:
    root = machine("Latitude 7420", 0)
    monkeypatch.setenv(name, value)
    (found,) = check(root)["environment"]
    assert (found.level, found.found.startswith(f"{name}={value} ")) == (level, True)
    assert found.next_step
    monkeypatch.setenv(name, harmless)
    (found,) = check(root)["environment"]
    harmless_text = f"no variable changes what is computed (set: {name}={harmless})"
    assert (found.level, found.found) == (Level.OK, harmless_text)


def test_a_variable_that_keeps_torch_xla_off_the_devices_fails(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine("trn1.2xlarge", 1)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    (found,) = check(root)["environment"]
    assert found == MachineFinding(
        level=Level.FAIL,
        subject="environment",
        found="PJRT_DEVICE=CPU keeps torch_xla off the Neuron devices",
        next_step="Unset it.",
    )


@pytest.mark.parametrize(
    ("place", "level", "found"),
    [
        (None, Level.OK, "var/tmp/neuron-compile-cache, "),
        ("s3://bucket/cache", Level.OK, "s3://bucket/cache: not looked into"),
        ("/proc/cache", Level.WARN, "/proc/cache cannot be written to"),
    ],
)
def test_the_compile_cache_is_looked_at(
    machine: Any, monkeypatch: pytest.MonkeyPatch, place: str | None, level: Level, found: str
) -> None:
    root = machine("trn1.2xlarge", 1)
    if place is not None:
        monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", place)
    (cache,) = check(root)["compile cache"]
    assert cache.level is level
    assert found in cache.found


def test_a_layer_is_held_against_a_core(machine: Any) -> None:
    root = machine("trn1.2xlarge", 1)
    (fits,) = check(root, spec=TRUE_SIZE)["device memory"]
    assert fits.level is Level.OK
    assert "a layer takes 7.3 GB, the lm_head 1.2 GB, of 17.2 GB" in fits.found
    larger = SyntheticModel(hidden_size=6144, intermediate_size=4096, num_local_experts=256).spec()
    (found,) = check(root, spec=larger)["device memory"]
    assert found.level is Level.FAIL
    assert "among cores with --tp-degree" in found.next_step


def test_a_tensor_over_four_gibibytes_is_noted_and_a_small_one_is_not(machine: Any) -> None:
    root = machine("Latitude 7420", 0)
    (found,) = check(root, spec=TRUE_SIZE)["tensor size"]
    assert found.level is Level.NOTE
    assert "4.8 GB, over the 4 GiB" in found.found
    assert "tensor size" not in check(root, spec=TOY)


@pytest.mark.parametrize(
    ("instance", "num_devices", "subject", "step"),
    [
        ("trn1.2xlarge", 1, "device memory by length", "--tp-degree"),
        ("Latitude 7420", 0, "host memory", "shorter rows"),
    ],
)
def test_memory_is_told_for_each_length_and_too_much_fails(
    machine: Any, instance: str, num_devices: int, subject: str, step: str
) -> None:
    root = machine(instance, num_devices)
    short, long = check(root, spec=TRUE_SIZE, seq_lens=(128, 196_608))[subject]
    assert long.level is Level.FAIL
    assert step in long.next_step
    assert "128 tokens" in short.found


def test_the_level_that_matters_most_decides() -> None:
    levels = (Level.WARN, Level.OK, Level.NOTE)
    assert (
        worst_level([MachineFinding(level=level, subject="x", found="y") for level in levels]) is Level.WARN
    )
    assert worst_level([]) is Level.OK


def test_the_command_prints_findings_and_what_to_do(command: Run, toy: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    result = command(main, "check", "--model", toy, "--backend", "cpu")
    assert result.exit_code == 0, result.output
    assert "[warn] environment: XLA_USE_BF16=1 rounds float32" in result.stdout
    assert "\n       → Unset it.\n" in result.stdout


def test_the_command_exits_with_3_where_nothing_can_run(command: Run) -> None:
    result = command(main, "check", "--backend", "neuron", "--json")
    assert result.exit_code == 3
    record = json.loads(result.stdout)
    assert record["worst"] == "fail"
    assert {"level", "subject", "found", "next_step"} == record["findings"][0].keys()


def test_a_length_past_the_models_positions_is_refused_by_its_option(command: Run, toy: Path) -> None:
    result = command(main, "check", "--model", toy, "--seq-len", "128,10000000")
    assert result.exit_code == 2
    assert "--seq-len is 10000000: expected at most the model's" in " ".join(result.stderr.split())


def test_this_machine_has_versions(tmp_path: Path) -> None:
    found = check(tmp_path)["versions"]
    assert f"torch {torch.__version__.partition('+')[0]}" in found[0].found
    assert f"python {sys.version_info.major}.{sys.version_info.minor}" in found[0].found
