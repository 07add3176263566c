"""The toy's BF16 copy, its layers' weights, and a golden's own inputs to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec

OpenLayer = Callable[[int], LayerTensors]


@pytest.fixture(scope="module")
def capture(golden: Path) -> Capture:
    return Capture.open(golden)


@pytest.fixture(scope="module")
def inputs(capture: Capture) -> Inputs:
    return capture.read_inputs()


@pytest.fixture(scope="module")
def spec(toy: Path) -> ModelSpec:
    return ModelSpec.from_folder(toy)


@pytest.fixture(scope="module")
def reader(toy: Path) -> Iterator[CheckpointReader]:
    with CheckpointReader(toy) as reader:
        yield reader


@pytest.fixture(scope="module")
def open_layer(reader: CheckpointReader, spec: ModelSpec) -> OpenLayer:
    """Opens a layer's weights in BF16."""
    return lambda layer: LayerTensors.open(reader, spec, layer, torch.bfloat16)
