"""A MiniMax-M2 that learns from text: training is the same each time, experts differ, and checkpoints are right."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click.testing
import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.model import weight_names
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import find_token_ids, make_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train_models import RECIPES, read_recipe
from training.learned import PROMPT_LENGTHS, LearnedModel, Recipe, quantise, train_checkpoint
from training.text import CORPORA, TokenStream, read_corpus
from training.trainee import Trainee, TrainingCourse, TrainingOptions, plant_massive_channels, train

Command = Callable[..., click.testing.Result]

LEARNED = Path(__file__).parents[1] / "models" / "learned"
TINY = SyntheticModel(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=16,
    vocab_size=262,
)
OPTIONS = TrainingOptions(num_steps=12, batch_size=2, seq_len=32, learning_rate=0.01, bias_rate=0.002, seed=0)
BIAS = "model.layers.0.block_sparse_moe.e_score_correction_bias"
# Experts and steps enough that experts differ.
SMALL = replace(
    TINY,
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_local_experts=8,
)
BRIEF = TrainingOptions(num_steps=30, seq_len=64, learning_rate=8e-3, seed=0)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> LearnedModel:
    """A model of two small layers that has learnt for a few steps, in BF16 and in block FP8."""
    root = tmp_path_factory.mktemp("learned")
    text = root / "text"
    text.write_text("".join(path.read_text() for path in sorted(Path(asyncio.__file__).parent.glob("b*.py"))))
    outputs = {root / "bf16": torch.bfloat16, root / "fp8": torch.float8_e4m3fn}
    return train_checkpoint(outputs, Recipe(texts=(str(text),), model=SMALL, options=BRIEF))


def trained(options: TrainingOptions) -> tuple[Trainee, TrainingCourse]:
    tokenizer = make_tokenizer(["a"], vocab_size=TINY.vocab_size)
    text = TokenStream(("the cat sat on the mat. " * 50,), tokenizer=tokenizer)
    config = TINY.config(dtype=torch.float32, token_ids=find_token_ids(tokenizer))
    trainee = Trainee(config, seed=options.seed)
    return trainee, train(trainee, text, options)


def test_recipes_differ_in_shape_and_seed_and_fit_fp8() -> None:
    recipes = [read_recipe(line) for line in RECIPES.values()]
    for recipe in recipes:
        assert plan_tensors(recipe.model, dtype=torch.float8_e4m3fn)
        assert set(recipe.texts) <= set(CORPORA)
    assert len({str(recipe.model) for recipe in recipes}) == len(recipes)
    assert len({recipe.options.seed for recipe in recipes}) == len(recipes)


def test_committed_model_is_of_its_recipe_and_its_experts_have_learnt() -> None:
    record = json.loads((LEARNED / "training.json").read_text())
    recipe = read_recipe(RECIPES["tiny"])
    assert record["options"]["num_steps"] == recipe.options.num_steps
    assert SyntheticModel(**record["model"]) == recipe.model
    assert record["after"]["bits_per_byte"] < 0.55 * record["rivals"]["unigram"]
    assert record["after"]["bits_per_byte_random_experts"] > 1.2 * record["after"]["bits_per_byte"]


def test_text_held_out_is_in_no_passage_of_the_training(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {number}.\n\nAll rights  reserved." for number in range(20_000))
    (tmp_path / "text").write_text(text)
    corpus = read_corpus((str(tmp_path / "text"),))
    assert "".join((*corpus.training, *corpus.held_out)).count("reserved") == 1
    assert 0.02 < sum(map(len, corpus.held_out)) / corpus.training_bytes < 0.08
    assert not set("".join(corpus.held_out).split("\n\n")[1:-1]) & set("".join(corpus.training).split("\n\n"))


def test_tensors_are_those_of_the_hubs_checkpoint() -> None:
    planned = {tensor.name: tensor.shape for tensor in plan_tensors(TINY, dtype=torch.float32)}
    trainee, _ = trained(replace(OPTIONS, num_steps=1))
    assert {name: tuple(tensor.shape) for name, tensor in trainee.tensors().items()} == planned


def test_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    first, second = (trained(OPTIONS)[0].tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = trained(replace(OPTIONS, seed=1))[0].tensors()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_loss_falls_and_the_bias_moves_by_the_rate_at_most() -> None:
    short, (trainee, long) = (
        trained(replace(OPTIONS, num_steps=5))[1],
        trained(replace(OPTIONS, num_steps=80)),
    )
    assert long.loss < 0.7 * short.loss
    assert 0 < float(trainee.tensors()[BIAS].abs().max()) <= 80 * OPTIONS.bias_rate


def test_same_few_channels_are_massive_for_every_token_and_tame_behind_a_norm() -> None:
    trainee, _ = trained(replace(OPTIONS, num_steps=0))
    plant_massive_channels(trainee, count=3, seed=0)
    tensors = trainee.tensors()
    stream = tensors["model.embed_tokens.weight"]
    is_massive = stream.abs() > 20 * stream.abs().median()
    assert (is_massive.sum(1) == 3).all()
    normed = stream * stream.square().mean(1, keepdim=True).rsqrt() * tensors["model.norm.weight"]
    assert 1.5 < float(normed[is_massive].abs().mean()) < 2.5


@pytest.mark.parametrize("shape", [(64, 32), (128, 256), (200, 130)])
def test_codes_and_scales_give_the_weight_back_to_fp8s_rounding(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight)
    error = (dequantise(codes, scales, dtype=torch.float32) - weight).abs()
    assert bool((error <= weight.abs() / 15 + weight.abs().max() * 2**-17).all())
    assert float(error.max()) > 0


@pytest.mark.parametrize("number", [0, 1], ids=["bf16", "fp8"])
def test_golden_of_held_out_text_is_certified(
    learned: LearnedModel, number: int, command: Command, tmp_path: Path
) -> None:
    folder = learned.folders[number]
    result = command(
        mm2_gpu,
        *("extract-all", "--model", folder, "--prompts-file", folder / "held_out.json"),
        *("--max-length", 40, "--output-dir", tmp_path / "golden", "--certify", "--quiet"),
    )
    assert result.exit_code == 0, result.output


def test_checkpoint_has_a_float32_router_and_prompts_of_1_to_500_tokens(learned: LearnedModel) -> None:
    with CheckpointReader(learned.folders[0]) as reader:
        dtypes = {name: reader.index[name].dtype.as_torch() for name in reader.index.names}
    router = {name for name in dtypes if name.endswith(weight_names.FLOAT32_NAMES)}
    assert {dtypes[name] for name in router} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in router} == {torch.bfloat16}
    prompts = json.loads((learned.folders[0] / "held_out.json").read_text())
    assert len(prompts) == len(PROMPT_LENGTHS)
    assert all(prompt in (learned.folders[0] / "held_out.txt").read_text() for prompt in prompts)


def test_experts_of_other_tokens_cost_bits_and_text_was_learnt(learned: LearnedModel) -> None:
    assert learned.after.bits_per_byte_random_experts > learned.after.bits_per_byte + 0.001
    assert learned.after.bits_per_byte < 0.8 * learned.before.bits_per_byte


def test_occupied_folder_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("something")
    endless = Recipe(texts=("prose",), model=TINY, options=replace(OPTIONS, num_steps=10**9))
    with pytest.raises(UsageError, match="exists"):
        train_checkpoint({tmp_path: torch.bfloat16}, endless)
