from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.toy_model import SyntheticModel

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train_models import RECIPES, read_recipe
from training.text import CORPORA

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "train_models.py"
LEARNED = REPOSITORY / "tests" / "models" / "learned"
SMALL = (
    *("--num-hidden-layers", 1, "--hidden-size", 64, "--num-attention-heads", 2, "--num-key-value-heads", 1),
    *("--num-local-experts", 4, "--intermediate-size", 32, "--vocab-size", 262),
)


def run(output_dir: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = (SCRIPT, "--output-dir", output_dir, *arguments)
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(f"Line {number} of a text, {number % 7} in its week." for number in range(900)))
    return path


def test_models_differ_in_shape_seed_and_can_be_stored_in_fp8() -> None:
    recipes = [read_recipe(line) for line in RECIPES.values()]
    for recipe in recipes:
        assert plan_tensors(recipe.model, dtype=torch.float8_e4m3fn)
        assert set(recipe.texts) <= set(CORPORA)
    assert len({str(recipe.model) for recipe in recipes}) == len(recipes) >= 5
    assert len({recipe.options.seed for recipe in recipes}) == len(recipes)
    assert len({recipe.texts for recipe in recipes}) >= 4


def test_committed_model_is_of_its_recipe_and_a_few_megabytes() -> None:
    record = json.loads((LEARNED / "training.json").read_text())
    recipe = read_recipe(RECIPES["tiny"])
    assert record["options"]["num_steps"] == recipe.options.num_steps
    assert record["options"]["seed"] == recipe.options.seed
    assert SyntheticModel(**record["model"]) == recipe.model
    assert sum(path.stat().st_size for path in LEARNED.iterdir()) < 4_000_000


def test_committed_model_has_learnt_and_its_experts_with_it() -> None:
    record = json.loads((LEARNED / "training.json").read_text())
    after, rivals = record["after"], record["rivals"]
    assert after["bits_per_byte"] < 0.55 * rivals["unigram"]
    assert after["bits_per_byte_random_experts"] > 1.2 * after["bits_per_byte"]


def test_two_copies_are_written_and_the_model_is_told_about(text: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "tiny", "--text", text, "--steps", 2, *SMALL)
    assert done.returncode == 0, done.stderr
    folders = (tmp_path / "learned_tiny", tmp_path / "learned_tiny_fp8")
    assert ModelSpec.from_folder(folders[1]).digest() == ModelSpec.from_folder(folders[0]).digest()
    assert "quantization_config" in json.loads((folders[1] / "config.json").read_text())
    assert "2 steps, 2048 tokens" in done.stdout
    assert "bits per byte" in done.stdout
    assert "with the experts of another token" in done.stdout
    record = json.loads((folders[0] / "training.json").read_text())
    assert record["options"]["learning_rate"] == 0.5 / 64
    assert record["model"]["num_local_experts"] == 4
    assert record["machine"]["num_threads"] == 1
    assert len(record["after"]["layers"]) == 1


def test_widths_that_fp8_cannot_store_are_refused_before_the_training(text: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "tiny", "--text", text, "--steps", 10**9, *SMALL, "--hidden-size", 192)
    assert done.returncode == 3
    assert "do not fit FP8's blocks" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["nameless"], ["a", "nameless"]])
def test_unknown_model_is_refused_before_any_training(arguments: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert "there is no model nameless; there are a, b, c, d, e, f, g, h, i, j, k, l, m, tiny" in done.stderr
    assert not any(tmp_path.iterdir())


def test_table_tells_of_the_models_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "learned_tiny").symlink_to(LEARNED)
    lines = run(tmp_path, "--table").stdout.splitlines()
    assert lines[-1].startswith("| tiny | 4 layers of 128, 4/2 heads of 32, 2 of 8 experts of 64 | prose, ")
    assert len(lines) == 3
