from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimax_tools.capture.passes import PASSES_NAME, ModelPasses, cache_file
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.writer import open_capture
from minimax_tools.json_codec import encode
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site


@pytest.fixture
def directory(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Path:
    """Two layers and logits, with twins and floors: 3 inputs, 4 values, 3 twins and 3 floors."""
    with open_capture(tmp_path, describe(noise_floor="full"), inputs=inputs) as writer:
        for layer in (0, 1):
            twin = {Site.OUTPUT: layer_of(layer)[Site.OUTPUT].float()}
            writer.write_layer(layer, layer_of(layer), twin=twin, floor={"output.error": torch.ones(2, 3)})
        logits = torch.ones(2, 3, 5)
        writer.write_model(
            {ModelSite.LOGITS: logits},
            twin={ModelSite.LOGITS: logits},
            floor={"logits.error": torch.zeros(2, 3)},
        )
        writer.finish()
    return tmp_path


def test_everything_is_read(directory: Path) -> None:
    found = inspect_capture(Capture.open(directory))
    assert (found.num_tensors, found.faults) == (13, ())
    assert inspect_capture(Capture.open(directory), with_inputs=False).num_tensors == 10


def test_each_fault_is_named_once(directory: Path) -> None:
    safetensors.torch.save_file({"output": torch.zeros(2, 3, 4)}, directory / "layer_1.fp32.safetensors")
    (directory / "layer_0.floor.safetensors").unlink()
    (directory / "model.safetensors").write_bytes(b"")
    found = inspect_capture(Capture.open(directory))
    files = ("model.safetensors", "layer_0.floor.safetensors", "layer_1.fp32.safetensors")
    assert sorted(next(file for file in files if file in fault) for fault in found.faults) == sorted(files)


@pytest.fixture
def whole_port(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Path:
    """The run of a whole port: 3 inputs, 2 values of a layer, its cached keys and values, and the passes."""
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write_layer(0, layer_of(0), cache=(torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 3, 4)))
        writer.write_json(PASSES_NAME, encode(ModelPasses(num_passes=1, cached_layers=(0,))))
        writer.finish()
    return tmp_path


def test_the_cache_of_a_whole_port_is_read(whole_port: Path) -> None:
    found = inspect_capture(Capture.open(whole_port))
    assert (found.num_tensors, found.faults) == (7, ())
    pair = {"keys": torch.ones(2, 1, 3, 4), "values": torch.ones(2, 1, 3, 4)}
    safetensors.torch.save_file(pair, whole_port / cache_file(0))
    (fault,) = inspect_capture(Capture.open(whole_port)).faults
    assert "the cached values of layer 0" in fault


def test_twins_are_looked_at_whatever_their_digests(
    describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    with open_capture(tmp_path, describe(noise_floor="full"), inputs=inputs) as writer:
        writer.write_layer(0, layer_of(0), twin={Site.OUTPUT: layer_of(0)[Site.OUTPUT].bfloat16()})
    (fault,) = inspect_capture(Capture.open(tmp_path)).faults
    assert "is no float32 twin" in fault
