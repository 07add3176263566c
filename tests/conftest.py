"""Skips what this machine cannot run, with a reason that says what is missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_CHECKPOINT = "MM2_TEST_CHECKPOINT"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, missing in (
        ("neuron", _missing_neuron),
        ("gpu", _missing_gpu),
        ("checkpoint", _missing_checkpoint),
    ):
        reason = missing() if item.get_closest_marker(marker) else None
        if reason is not None:
            pytest.skip(reason)


def _missing_neuron() -> str | None:
    if not list(Path("/dev").glob("neuron*")):
        return "no AWS Neuron device: there is no /dev/neuron* on this machine"
    if importlib.util.find_spec("torch_neuronx") is None:
        return "torch-neuronx is not installed"
    return None


def _missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"


def _missing_checkpoint() -> str | None:
    folder = os.environ.get(_CHECKPOINT)
    if folder is None:
        return f"no checkpoint: set {_CHECKPOINT} to a folder that holds MiniMax-M2"
    if not (Path(folder) / "config.json").is_file():
        return f"no checkpoint: {_CHECKPOINT}={folder} holds no config.json"
    return None
