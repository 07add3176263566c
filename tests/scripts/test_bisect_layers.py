"""`scripts/bisect_layers.sh`: the bisection by the plain commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "bisect_layers.sh"

PORT = """
import torch
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx == 1:
            state["self_attn.o_proj.weight"] = torch.zeros_like(tensors["self_attn.o_proj.weight"])
        return state
"""


def bisect(
    *arguments: object, command: str = f"{sys.executable} -m neuron"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "MM2_TEST": command}
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_wrong_layer_is_found_and_right_layers_are_none(toy: Path, golden: Path, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(PORT)
    common = ("--model", toy, "--golden", golden, "--target", f"{tmp_path}/port.py:Port")
    found = bisect(*common, "--layers", "0:4", "--", "--backend", "cpu")
    assert (found.returncode, found.stderr) == (1, "")
    assert "layer 1 is wrong; look inside with:" in found.stdout
    right = bisect(*common, "--layers", "2:4", "--", "--backend", "cpu")
    assert (right.returncode, right.stderr) == (0, "")
    assert right.stdout.splitlines()[:2] == ["run 1: layers 2:3 pass", "run 2: layers 3:4 pass"]


def test_command_that_looks_inside_repeats_the_options_quoted() -> None:
    # Every layer of this port is wrong: `false` ends with 1, whatever it is asked.
    common = ("--model", "my model", "--golden", "g", "--target", "t")
    done = bisect(*common, "--layers", "3:4", "--", "--backend", "cpu", "--split", "a b", command="false")
    assert done.returncode == 1
    assert shlex.split(done.stdout.splitlines()[-1])[1:] == [
        *("single-layer", "--layer", "3", *common, "--backend", "cpu", "--split", "a b")
    ]


def test_command_that_cannot_run_ends_it() -> None:
    common = ("--model", "nowhere", "--golden", "nowhere", "--target", "builtin")
    done = bisect(*common, "--layers", "0:4")
    assert done.returncode == 3
    assert "no checkpoint at 'nowhere'" in done.stderr


def test_help_and_wrong_usage() -> None:
    shown = bisect("--help", command="false")
    assert shown.returncode == 0
    assert shown.stdout.startswith("Usage: scripts/bisect_layers.sh --model DIR")
    common = ("--model", "m", "--golden", "g", "--target", "t")
    for arguments, words in (
        (("--layers", "0:4"), "--model is missing"),
        ((*common, "--layers", "4"), "--layers 4 is no A:B"),
        ((*common, "--layers", "4:4"), "--layers 4:4 holds no layer"),
        ((*common, "--layers", "0:4", "--piece", "0"), "--piece 0 is no positive number"),
        ((*common, "--depth", "1"), "--depth is unknown"),
        ((*common, "--layers"), "--layers needs a value"),
    ):
        refused = bisect(*arguments, command="false")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in refused.stderr
