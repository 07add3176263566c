"""The toy of each family, and its golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gpu_reference.cli import main
from minimax_tools.capture.reader import Capture
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import Family
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import PRESETS

# Two rows of unequal length: padding.
LENGTHS = ("--seq-len", "12,7")


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    """Family of models; each in turn."""
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def made(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family's toy in BF16."""
    folder = tmp_path_factory.mktemp("families") / family.toy_preset
    model = PRESETS[family.toy_preset]
    synthesize(folder, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="session")
def spec(made: Path) -> ModelSpec:
    """The toy's spec."""
    return ModelSpec.from_folder(made)


@pytest.fixture(scope="session")
def capture(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The toy's golden: all layers, all sites, of the loaded model."""
    return _make_golden(made, tmp_path_factory.mktemp("goldens") / "full_model", "--stream", "off")


@pytest.fixture(scope="session")
def make() -> Callable[..., Capture]:
    """Makes a golden of a model's folder in a directory, with options."""
    return _make_golden


def _make_golden(model: Path, directory: Path, *options: object) -> Capture:
    """Make a golden of two rows."""
    words: tuple[Any, ...] = ("extract-all", "--model", model, *LENGTHS, "--output-dir", directory, *options)
    done = CliRunner().invoke(main, [*map(str, words), "--quiet"])
    assert done.exit_code == 0, done.output
    return Capture.open(directory)
