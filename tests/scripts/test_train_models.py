from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minimax_tools.commands.train import train_command
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.corpus import CORPORA
from minimax_tools.synthetic.toy_model import SyntheticModel

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "train_models.py"
LEARNED = REPOSITORY / "tests" / "models" / "learned"


@pytest.fixture
def recipes(load_module: Callable[[Path], ModuleType]) -> dict[str, dict[str, Any]]:
    """Options of `mm2-split train` by the model's name."""
    return {name: options_of(line) for name, line in load_module(SCRIPT).RECIPES.items()}


def options_of(line: str) -> dict[str, Any]:
    context = train_command.make_context("train", ["--output", "x", *shlex.split(line)])
    return dict(context.params)


def model_of(options: dict[str, Any]) -> SyntheticModel:
    return SyntheticModel(
        **{key: value for key, value in options.items() if key in SyntheticModel.__dataclass_fields__}
    )


def test_models_differ_in_shape_seed_and_can_be_stored_in_fp8(recipes: dict[str, dict[str, Any]]) -> None:
    for options in recipes.values():
        assert plan_tensors(model_of(options), dtype=torch.float8_e4m3fn)
        assert set(options["texts"]) <= set(CORPORA)
    assert len({str(model_of(options)) for options in recipes.values()}) == len(recipes) >= 5
    assert len({options["seed"] for options in recipes.values()}) == len(recipes)
    assert len({options["texts"] for options in recipes.values()}) >= 4


def test_committed_model_is_of_its_recipe_and_a_few_megabytes(recipes: dict[str, dict[str, Any]]) -> None:
    record = json.loads((LEARNED / "training.json").read_text())
    options = recipes["tiny"]
    assert record["options"]["num_steps"] == options["num_steps"]
    assert record["options"]["seed"] == options["seed"]
    assert SyntheticModel(**record["model"]) == model_of(options)
    assert sum(path.stat().st_size for path in LEARNED.iterdir()) < 4_000_000


def test_committed_model_has_learnt_and_its_experts_with_it() -> None:
    record = json.loads((LEARNED / "training.json").read_text())
    after, rivals = record["after"], record["rivals"]
    assert after["bits_per_byte"] < 0.55 * rivals["unigram"]
    assert after["bits_per_byte_random_experts"] > 1.2 * after["bits_per_byte"]


@pytest.mark.parametrize("arguments", [["nameless"], ["a", "nameless"]])
def test_unknown_model_is_refused_before_any_training(arguments: list[str], tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output-dir", tmp_path, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert (
        "there is no model nameless; there are a, b, c, d, e, f, g, h, i, j, k, l, m, tiny" in result.stderr
    )
    assert not any(tmp_path.iterdir())


def test_table_tells_of_the_models_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "learned_tiny").symlink_to(LEARNED)
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output-dir", tmp_path, "--table"],
        capture_output=True,
        text=True,
        check=True,
    )
    *_, row = result.stdout.splitlines()
    assert row.startswith("| tiny | 4 layers of 128, 4/2 heads of 32, 2 of 8 experts of 64 | prose, ")
    assert len(result.stdout.splitlines()) == 3
