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

TRUE_SIZE = SyntheticModel.m2().spec()
TOY = SyntheticModel().spec()
LAPTOP, SMALL_INSTANCE = ("Latitude 7420", 0), ("trn1.2xlarge", 1)
CACHE = "NEURON_COMPILE_CACHE_URL"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of this machine's own are not what is tested."""
    names = ("ATEN_CPU_CAPABILITY", "NEURON_COMPILE_CACHE_URL", "NEURON_LOGICAL_NC_CONFIG", "OMP_NUM_THREADS")
    # torch_xla's import sets flags of its own in the process that other tests run in too.
    for name in (*names, "PJRT_DEVICE", "XLA_FLAGS"):
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
    machine: Any, instance_type: str, num_devices: int, num_cores: Any, hbm_gib: int, has_native: bool
) -> None:
    found = Machine.current(root=machine(instance_type, num_devices))
    assert (found.instance_type, found.num_devices) == (instance_type, num_devices)
    assert (found.num_cores, found.hbm_bytes_per_core) == (num_cores, hbm_gib << 30)
    assert found.has_native_backend is has_native


def test_other_logical_cores_are_not_guessed(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine.current(root=machine("trn2.48xlarge", 16))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert (found.num_cores, found.hbm_bytes_per_core) == (None, None)


def test_a_laptop_is_no_instance_which_is_a_note(machine: Any) -> None:
    root = machine(*LAPTOP)
    found = Machine.current(root=root)
    assert found == Machine(instance_type=None, num_devices=0)
    assert (found.num_cores, found.hbm_bytes_per_core, found.has_native_backend) == (None, None, None)
    findings = check(root)
    assert findings["machine"][0].level is Level.NOTE
    assert "no Neuron device" in findings["machine"][0].found
    assert [finding.level for finding in findings["backend"]] == [Level.OK]
    assert not {"compile cache", "device memory"} & set(findings)
    versions = findings["versions"][0].found
    assert f"torch {torch.__version__.partition('+')[0]}" in versions
    assert f"python {sys.version_info.major}.{sys.version_info.minor}" in versions
    # A backend that is not here fails.
    findings = check(root, backend="neuron")
    assert [finding.level for finding in findings["backend"]] == [Level.FAIL]
    assert "host memory" not in findings


@pytest.mark.parametrize(
    ("num_devices", "level", "told"),
    [(0, Level.FAIL, "the driver shows no device"), (1, Level.OK, "1 device, 2 cores of 16 GiB each")],
)
def test_an_instance_has_the_devices_that_its_driver_shows(
    machine: Any, num_devices: int, level: Level, told: str
) -> None:
    findings = check(machine("trn1.2xlarge", num_devices))
    found = findings["machine"][0]
    assert (found.level, told in found.found) == (level, True)
    assert ("aws-neuronx-dkms" in found.next_step) is (level is Level.FAIL)
    # Nothing would compute on them.
    unused = [one.found for one in findings["backend"] if one.level is Level.WARN]
    assert len(unused) == num_devices
    assert all("nothing would run on this machine's Neuron devices: " in text for text in unused)


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
    root = machine(*LAPTOP)
    monkeypatch.setenv(name, value)
    (found,) = check(root)["environment"]
    assert (found.level, found.found.startswith(f"{name}={value} ")) == (level, True)
    assert found.next_step
    monkeypatch.setenv(name, harmless)
    (found,) = check(root)["environment"]
    harmless_text = f"no variable changes what is computed (set: {name}={harmless})"
    assert (found.level, found.found) == (Level.OK, harmless_text)


@pytest.mark.parametrize(
    ("variable", "place", "subject", "level", "found"),
    [
        ("", "", "compile cache", Level.OK, "var/tmp/neuron-compile-cache, "),
        (CACHE, "s3://bucket/cache", "compile cache", Level.OK, "s3://bucket/cache: not looked into"),
        (CACHE, "/proc/cache", "compile cache", Level.WARN, "/proc/cache cannot be written to"),
        ("PJRT_DEVICE", "CPU", "environment", Level.FAIL, "PJRT_DEVICE=CPU keeps torch_xla off the Neuron"),
    ],
)
def test_the_variables_of_an_instance_are_looked_at(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    place: str,
    subject: str,
    level: Level,
    found: str,
) -> None:
    if variable:
        monkeypatch.setenv(variable, place)
    (finding,) = check(machine(*SMALL_INSTANCE))[subject]
    assert (finding.level, found in finding.found) == (level, True)
    assert (finding.next_step == "Unset it.") is (level is Level.FAIL)


def test_a_layer_is_held_against_a_core_and_a_tensor_against_four_gibibytes(machine: Any) -> None:
    root = machine(*SMALL_INSTANCE)
    findings = check(root, spec=TRUE_SIZE)
    (fits,), (tensor,) = findings["device memory"], findings["tensor size"]
    assert fits.level is Level.OK
    assert "a layer takes 7.3 GB, the lm_head 1.2 GB, of 17.2 GB" in fits.found
    assert tensor.level is Level.NOTE
    assert "4.8 GB, over the 4 GiB" in tensor.found
    larger = SyntheticModel(hidden_size=6144, intermediate_size=4096, num_local_experts=256).spec()
    (found,) = check(root, spec=larger)["device memory"]
    assert found.level is Level.FAIL
    assert "among cores with --tp-degree" in found.next_step
    assert "tensor size" not in check(root, spec=TOY)


@pytest.mark.parametrize(
    ("instance", "subject", "step"),
    [(SMALL_INSTANCE, "device memory by length", "--tp-degree"), (LAPTOP, "host memory", "shorter rows")],
)
def test_memory_is_told_for_each_length_and_too_much_fails(
    machine: Any, instance: tuple[str, int], subject: str, step: str
) -> None:
    short, long = check(machine(*instance), spec=TRUE_SIZE, seq_lens=(128, 196_608))[subject]
    assert (long.level, step in long.next_step) == (Level.FAIL, True)
    assert "128 tokens" in short.found


def test_the_level_that_matters_most_decides() -> None:
    levels = (Level.WARN, Level.OK, Level.NOTE)
    findings = [MachineFinding(level=level, subject="x", found="y") for level in levels]
    assert (worst_level(findings), worst_level([])) == (Level.WARN, Level.OK)


def test_the_command_prints_findings_and_what_to_do(
    command: Any, toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    result = command(main, "check", "--model", toy, "--backend", "cpu")
    assert result.exit_code == 0, result.output
    assert "[warn] environment: XLA_USE_BF16=1 rounds float32" in result.stdout
    assert "\n       → Unset it.\n" in result.stdout
    # Nothing can run.
    result = command(main, "check", "--backend", "neuron", "--json")
    assert result.exit_code == 3
    record = json.loads(result.stdout)
    assert record["worst"] == "fail"
    assert {"level", "subject", "found", "next_step"} == record["findings"][0].keys()
    # A length past the model's positions is refused by its option.
    result = command(main, "check", "--model", toy, "--seq-len", "128,10000000")
    assert result.exit_code == 2
    assert "--seq-len is 10000000: expected at most the model's" in " ".join(result.stderr.split())
