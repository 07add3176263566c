"""Neuron's model-parallel groups, held through a stand-in that behaves as neuronx-distributed is known to."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]

# Initialises twice without a word, clamps the size it is asked for, and fails to destroy what is not there.
PARALLEL_STATE = """
calls = []
size = None
clamped_to = None
world_size = 8

def model_parallel_is_initialized():
    return size is not None

def initialize_model_parallel(tensor_model_parallel_size=1):
    global size
    if world_size % tensor_model_parallel_size:
        raise RuntimeError(f"invalid implied data parallel degree: {world_size}")
    calls.append(f"initialize {tensor_model_parallel_size}")
    size = tensor_model_parallel_size if clamped_to is None else clamped_to

def get_tensor_model_parallel_size():
    return size

def get_tensor_model_parallel_group():
    assert size is not None
    return "group"

def destroy_model_parallel():
    global size
    assert size is not None, "destroyed twice"
    calls.append("destroy")
    size = None
"""

# The size that is asked for, and what happens before the groups are held, and while they are.
SCENARIOS = {
    "clean": (1, "pass", "pass"),
    "several": (4, "pass", "pass"),
    "error": (1, "pass", "raise ValueError('port')"),
    "taken_down": (1, "pass", "parallel_state.destroy_model_parallel()"),
    "somebody_elses": (1, "parallel_state.initialize_model_parallel(8)", "pass"),
    "clamped": (8, "parallel_state.clamped_to = 2", "pass"),
    "not_divisible": (4, "parallel_state.world_size = 6", "pass"),
}

HOLD = """
import importlib, json
from minimax_tools.errors import BackendError
from neuron.devices.distributed import model_parallel
from neuronx_distributed.parallel_layers import parallel_state

found = {}
for name, (size, before, inside) in SCENARIOS.items():
    importlib.reload(parallel_state)
    error = None
    exec(before)
    try:
        with model_parallel(size) as group:
            assert group == "group"
            exec(inside)
    except (BackendError, ValueError) as caught:
        error = str(caught)
    found[name] = [parallel_state.calls, parallel_state.model_parallel_is_initialized(), error]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def held(forked_python: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """For each scenario the stand-in's calls, whether groups are up after it, and the error."""
    folder = tmp_path_factory.mktemp("stand_in")
    package = folder / "neuronx_distributed" / "parallel_layers"
    package.mkdir(parents=True)
    (package / "parallel_state.py").write_text(PARALLEL_STATE)
    done = forked_python(f"SCENARIOS = {SCENARIOS!r}\n{HOLD}", folder=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("scenario", "calls", "is_up", "error"),
    [
        ("clean", ["initialize 1", "destroy"], False, None),
        ("several", ["initialize 4", "destroy"], False, None),
        ("error", ["initialize 1", "destroy"], False, "port"),
        ("taken_down", ["initialize 1", "destroy"], False, None),
        (
            "somebody_elses",
            ["initialize 8"],
            True,
            "initialised already. Start mm2-test in a process of its own",
        ),
        ("clamped", ["initialize 8", "destroy"], False, "another tensor-parallel size: expected 8, found 2"),
        ("not_divisible", [], False, "tensor-parallel size of 4: found invalid implied data parallel"),
    ],
)
def test_groups_are_set_up_once_and_torn_down_by_who_set_them_up(
    held: dict[str, list[Any]], scenario: str, calls: list[str], is_up: bool, error: str | None
) -> None:
    found_calls, found_is_up, found_error = held[scenario]
    assert (found_calls, found_is_up) == (calls, is_up)
    assert found_error is None if error is None else error in found_error


# What each of two gloo ranks sees of the real groups, in the CPU mode of neuronx-distributed.
REAL = """
import json, os
import torch
from minimax_tools.errors import BackendError
from neuron.devices.backend import Backend
from neuron.devices.distributed import model_parallel, open_store, probe_group, process_group
from neuron.devices.ranks import Ranks
from neuronx_distributed.parallel_layers import parallel_state

ranks = Ranks(rank=int(os.environ["RANK"]), degree=2)
errors = []
with process_group(Backend.CPU, ranks=ranks, store=open_store(ranks)):
    with model_parallel(2) as group:
        probe_group(torch.device("cpu"), group=group)
        seen = [torch.distributed.get_world_size(group), parallel_state.get_tensor_model_parallel_rank()]
        try:
            with model_parallel(2):
                pass
        except BackendError as error:
            errors.append(str(error))
    # More than there are ranks is clamped.
    try:
        with model_parallel(8):
            pass
    except BackendError as error:
        errors.append(str(error))
    is_up = parallel_state.model_parallel_is_initialized()
print(f"seen {json.dumps([ranks.rank, seen, errors, is_up])}\\n", end="")
"""


@pytest.mark.slow
def test_of_neuronx_distributed_itself_are_those_asked_for(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("neuronx_distributed")
    if spec is None or spec.origin is None:
        pytest.skip("neuronx_distributed is not installed: it comes with the Neuron SDK")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{Path(spec.origin).parents[1]}",
        "NXD_CPU_MODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    state = "neuronx_distributed.parallel_layers.parallel_state"
    imported = subprocess.run([sys.executable, "-c", f"import {state}"], env=environment, capture_output=True)
    if imported.returncode:
        # What PyPI has under this name is an empty placeholder that raises.
        pytest.skip(f"{state} cannot be imported: {imported.stderr.decode().splitlines()[-1]}")
    (tmp_path / "real.py").write_text(REAL)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "real.py"))
    done = subprocess.run(
        [sys.executable, *torchrun],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("seen ") for line in lines), lines
    found = sorted(json.loads(line.removeprefix("seen ")) for line in lines)
    for rank, (number, seen, errors, is_up) in enumerate(found):
        assert (number, seen, is_up) == (rank, [2, rank], False)
        assert "parallel_state is initialised already" in errors[0]
        assert "another tensor-parallel size: expected 8, found 2" in errors[1]
    assert len(found) == 2
