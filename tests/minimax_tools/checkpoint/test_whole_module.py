"""Modules that torch.save pickled whole are told by name, and nothing in them is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.weight_files import refuse_pickled_module
from minimax_tools.torch_file import find_pickled_module
from neuron.cli import main as mm2_test


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    path = tmp_path / "module.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    return path


def test_other_files_are_none(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "state.pt")
    (tmp_path / "port.py").write_text("class Layer: ...")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 no archive")
    for path in (*tmp_path.iterdir(), tmp_path, tmp_path / "gone.pt"):
        assert find_pickled_module(path) is None
        refuse_pickled_module(path)


def run(command: Any, *words: object) -> str:
    result = command(mm2_test, "single-layer", "--layer", 0, "--seq-len", 8, "--backend", "cpu", *words)
    assert result.exit_code == 3
    return str(result.stderr)


def test_checkpoint_that_is_a_pickled_module_names_itself(
    command: Any, toy: Path, pickled: Path, tmp_path: Path
) -> None:
    assert "found a pickled module, torch.nn.modules.linear.Linear" in run(command, "--model", pickled)
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    folder = run(command, "--model", tmp_path)
    assert "found a pickled module, module.pt: torch.nn.modules.linear.Linear" in folder


def test_port_that_is_a_pickled_module_names_itself(command: Any, toy: Path, pickled: Path) -> None:
    disguised = pickled.with_suffix(".py")
    disguised.write_bytes(pickled.read_bytes())
    for path in (pickled, disguised):
        told = run(command, "--model", toy, "--target", f"{path}:Linear")
        assert "found a pickled module of the class torch.nn.modules.linear.Linear" in told
        assert "as in port.py:Linear" in told
