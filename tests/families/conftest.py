"""The toy of each family, and its golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import Family
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import PRESETS

# Two rows of unequal length: padding.
LENGTHS = ("--seq-len", "12,7")


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    """Family of models; each in turn."""
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def made(family: Family, make_model: Callable[..., Path]) -> Path:
    """The family's toy in BF16."""
    return make_model(PRESETS[family.toy_preset], torch.bfloat16)


@pytest.fixture(scope="session")
def spec(made: Path) -> ModelSpec:
    """The toy's spec."""
    return ModelSpec.from_folder(made)


@pytest.fixture(scope="session")
def capture(made: Path, make: Callable[..., Capture]) -> Capture:
    """The toy's golden: all layers, all sites, of the loaded model."""
    return make(made, "--stream", "off")


@pytest.fixture(scope="session")
def make(make_golden: Callable[..., Path]) -> Callable[..., Capture]:
    """Makes a golden of two rows of a model's folder, with options."""
    return lambda model, *options: Capture.open(make_golden(model, *LENGTHS, *options))
