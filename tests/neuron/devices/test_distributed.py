"""Neuron's model-parallel groups, held through a stand-in that behaves as neuronx-distributed is known to."""

from __future__ import annotations

import importlib.util
import json
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

# The size that is asked for, what happens before the groups are held, and while they are.
SCENARIOS = {
    "clean": (1, "pass", "pass"),
    "several": (4, "pass", "pass"),
    "error": (1, "pass", "raise ValueError('port')"),
    "taken_down": (1, "pass", "parallel_state.destroy_model_parallel()"),
    "somebody_elses": (1, "parallel_state.initialize_model_parallel(8)", "pass"),
    "clamped": (8, "parallel_state.clamped_to = 2", "pass"),
    "not_divisible": (4, "parallel_state.world_size = 6", "pass"),
}
# What comes of each: the stand-in's calls, whether groups are up after it, and the error.
OUTCOMES: dict[str, tuple[list[str], bool, str | None]] = {
    "clean": (["initialize 1", "destroy"], False, None),
    "several": (["initialize 4", "destroy"], False, None),
    "error": (["initialize 1", "destroy"], False, "port"),
    "taken_down": (["initialize 1", "destroy"], False, None),
    "somebody_elses": (["initialize 8"], True, "initialised already. Start mm2-test in a process of its own"),
    "clamped": (
        ["initialize 8", "destroy"],
        False,
        "another tensor-parallel size: expected 8, found 2",
    ),
    "not_divisible": ([], False, "tensor-parallel size of 4: found invalid implied data parallel"),
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


def test_groups_are_set_up_once_and_torn_down_by_who_set_them_up(forked_python: Any, tmp_path: Path) -> None:
    package = tmp_path / "neuronx_distributed" / "parallel_layers"
    package.mkdir(parents=True)
    (package / "parallel_state.py").write_text(PARALLEL_STATE)
    done = forked_python(f"SCENARIOS = {SCENARIOS!r}\n{HOLD}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, (calls, is_up, error) in json.loads(done.stdout).items():
        expected_calls, expected_is_up, expected_error = OUTCOMES[name]
        assert (name, calls, is_up) == (name, expected_calls, expected_is_up)
        assert error is None if expected_error is None else expected_error in error


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
def test_of_neuronx_distributed_itself_are_those_asked_for(
    torchrun: Any, environment_of: Any, tmp_path: Path
) -> None:
    spec = importlib.util.find_spec("neuronx_distributed")
    if spec is None or spec.origin is None:
        pytest.skip("neuronx_distributed is not installed: it comes with the Neuron SDK")
    path = f"{REPOSITORY}:{Path(spec.origin).parents[1]}"
    environment = environment_of(NXD_CPU_MODE="1", PYTHONPATH=path)
    state = "neuronx_distributed.parallel_layers.parallel_state"
    imported = subprocess.run([sys.executable, "-c", f"import {state}"], env=environment, capture_output=True)
    if imported.returncode:
        # What PyPI has under this name is an empty placeholder that raises.
        pytest.skip(f"{state} cannot be imported: {imported.stderr.decode().splitlines()[-1]}")
    (tmp_path / "real.py").write_text(REAL)
    done = torchrun(tmp_path / "real.py", NXD_CPU_MODE="1", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("seen ") for line in lines), lines
    found = sorted(json.loads(line.removeprefix("seen ")) for line in lines)
    for rank, (number, seen, errors, is_up) in enumerate(found):
        assert (number, seen, is_up) == (rank, [2, rank], False)
        assert "parallel_state is initialised already" in errors[0]
        assert "another tensor-parallel size: expected 8, found 2" in errors[1]
    assert len(found) == 2
