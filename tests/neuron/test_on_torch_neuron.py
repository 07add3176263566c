"""Runs with `--backend neuron`, on a stand-in for TorchNeuron: a device that torch drives under the name `neuron`.

The device is compiled here. It is of torch's kind PrivateUse1, as TorchNeuron's, with its memory on the host.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
STAND_IN = REPOSITORY / "tests/stand_ins/torch_neuron"
EVERY_SITE = f"{REPOSITORY / 'scripts/examples/port.py'}:DecoderLayer"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in's device, compiled for the torch that is installed."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the device is written in C++: apt install g++")
    folder = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("device") / "device.so"
    headers = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [compiler, "-shared", "-fPIC", "-std=c++17", "-O0", abi, *headers]
    source = STAND_IN / "torch_neuronx/device.cpp"
    done = subprocess.run(
        [*command, source, "-o", library, *libraries], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="session")
def environment(library: Path) -> dict[str, str]:
    """The variables with which torch finds the device when it is imported."""
    return {
        "PYTHONPATH": f"{REPOSITORY}:{STAND_IN}",
        "TORCH_NEURON_STAND_IN_LIBRARY": str(library),
        "TORCH_NEURON_STAND_IN_MISSING": "aten::topk",
    }


@pytest.fixture(scope="module")
def results(
    serve: Callable[..., list[dict[str, Any]]],
    environment: dict[str, str],
    toy: Path,
    golden: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any]]:
    """Commands in one process, by name."""
    folder = tmp_path_factory.mktemp("native")
    model = ("--model", toy, "--golden", golden, "--json")
    sweep = ("sweep", *model, "--target", EVERY_SITE)
    commands = {
        "compiled": (*sweep, "--backend", "neuron", "--output-dir", folder / "compiled"),
        "eager": (*sweep, "--backend", "auto", "--compile", "off", "--output-dir", folder / "eager"),
        "profiled": (
            *("single-layer", "--layer", 0, "--model", toy, "--backend", "neuron", "--seq-len", "12"),
            *("--profile", "--output-dir", folder / "profiled"),
        ),
        "component": (
            *("component", "--layer", 1, "--component", "moe", *model, "--backend", "neuron"),
            *("--output-dir", folder / "component"),
        ),
        "inductor": (*sweep, "--backend", "neuron", "--compile", "inductor"),
        "check": ("check", "--backend", "neuron"),
    }
    done = serve([*commands.values()], imports_torch=True, **environment)
    return dict(zip(commands, done, strict=True))


def record(result: dict[str, Any]) -> dict[str, Any]:
    assert result["exit_code"] == 0, result["stderr"]
    found: dict[str, Any] = json.loads(result["stdout"])
    return found


def test_every_site_passes_against_the_golden_in_graphs_unless_told_otherwise(
    results: dict[str, dict[str, Any]],
) -> None:
    told = {name: record(results[name]) for name in ("compiled", "eager", "component")}
    assert [(name, one["verdict"], one["of"] - one["compared"]) for name, one in told.items()] == [
        (name, "pass", 0) for name in told
    ]
    compiled, eager = told["compiled"]["graphs"], told["eager"]["graphs"]
    assert (compiled["compiler"], compiled["first_layer"], compiled["later_layers"]) == ("neuron", 1, 0)
    assert (eager["compiler"], eager["first_layer"]) == (None, 0)
    # An operation that the device does not have is named.
    assert eager["fallbacks"] == ["aten::topk"]


def test_values_are_the_same_in_graphs_and_without(results: dict[str, dict[str, Any]]) -> None:
    folders = [Path(record(results[run])["directory"]) for run in ("compiled", "eager")]
    for layer in range(4):
        compiled, eager = (load_file(folder / f"layer_{layer}.safetensors") for folder in folders)
        assert [name for name in eager if not compiled[name].equal(eager[name])] == []


def test_capture_says_that_the_native_backend_computed(results: dict[str, dict[str, Any]]) -> None:
    folder = Path(record(results["compiled"])["directory"])
    provenance = json.loads((folder / "manifest.json").read_text())["provenance"]
    assert (provenance["backend"], provenance["device"]) == ("neuron", "Neuron, native")
    assert provenance["options"]["compile"] == "neuron"
    assert provenance["environment"]["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] == "1"
    assert "[ok]   backend: neuron: Neuron, native" in results["check"]["stdout"]


def test_profile_has_the_devices_peak_memory(results: dict[str, dict[str, Any]]) -> None:
    assert results["profiled"]["exit_code"] == 0, results["profiled"]["stderr"]
    (row,) = [line for line in results["profiled"]["stdout"].splitlines() if line.split()[:1] == ["0"]]
    assert row.split()[-1] == "MB"


def test_compiler_that_makes_no_code_for_the_device_is_refused(results: dict[str, dict[str, Any]]) -> None:
    assert results["inductor"]["exit_code"] == 2
    assert "--compile inductor makes no graphs for the backend neuron" in results["inductor"]["stderr"]


def test_two_ranks_add_up_through_the_devices_own_group(
    process: Any, environment: dict[str, str], toy: Path, golden: Path
) -> None:
    """The collective calls of mm2's layer are in its graph."""
    arguments = ("single-layer", "--layer", 0, "--model", toy, "--golden", golden, "--json")
    done = process(*arguments, "--backend", "neuron", "--tp-degree", 2, **environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["verdict"], told["compared"]) == ("pass", told["of"])
    assert told["graphs"]["graph_breaks"] == []


def test_device_is_waited_for(run_python: Any, environment: dict[str, str]) -> None:
    code = (
        "import json\n"
        "import torch, torch_neuronx\n"
        "from neuron.devices.runtime import open_runtime\n"
        "with open_runtime('neuron') as runtime:\n"
        "    before = torch_neuronx.synchronisations()\n"
        "    runtime.synchronise()\n"
        "    print(json.dumps([str(runtime.device), torch_neuronx.synchronisations() - before]))\n"
    )
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["neuron", 1]


def test_memory_that_proves_too_small_at_the_wait_is_told(
    process: Any, environment: dict[str, str], toy: Path, golden: Path
) -> None:
    arguments = ("single-layer", "--layer", 0, "--model", toy, "--golden", golden, "--json")
    full = {**environment, "TORCH_NEURON_STAND_IN_FULL": "1"}
    done = process(*arguments, "--backend", "neuron", "--compile", "off", **full)
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert "the device is out of memory, which showed when it computed what was recorded" in error
    assert "--tp-degree" in error
