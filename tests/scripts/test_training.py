"""A MiniMax-M2 that learns from text: the model in training, its evaluation, and its checkpoints."""

from __future__ import annotations

import asyncio
import json
import math
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
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.layer import ReferenceLayer
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds, find_token_ids, make_tokenizer
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from training.evaluation import HeldOutEvaluation, evaluate, measure_rivals
from training.learned import PROMPT_LENGTHS, LearnedModel, Recipe, quantise, train_checkpoint
from training.text import Corpus, TokenStream
from training.trainee import Trainee, TrainingCourse, TrainingOptions, plant_massive_channels, train

Command = Callable[..., click.testing.Result]

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
LEAST = SyntheticModel(num_hidden_layers=1, hidden_size=32, num_local_experts=4, vocab_size=262)
# Experts and steps enough that experts differ.
SMALL = SyntheticModel(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=262,
)
BRIEF = TrainingOptions(num_steps=30, seq_len=64, learning_rate=8e-3, seed=0)
MODEL = SyntheticModel(num_hidden_layers=2, hidden_size=64, num_local_experts=4, vocab_size=262)
ROWS = torch.randint(262, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> LearnedModel:
    """A model of two small layers that has learnt for a few steps, in BF16 and in block FP8."""
    root = tmp_path_factory.mktemp("learned")
    text = root / "text"
    text.write_text("".join(path.read_text() for path in sorted(Path(asyncio.__file__).parent.glob("b*.py"))))
    outputs = {root / "bf16": torch.bfloat16, root / "fp8": torch.float8_e4m3fn}
    return train_checkpoint(outputs, Recipe(texts=(str(text),), model=SMALL, options=BRIEF))


@pytest.fixture
def trainee() -> Trainee:
    return Trainee(
        MODEL.config(dtype=torch.float32, token_ids=TokenIds(bos_token_id=0, eos_token_id=1)), seed=3
    )


def test_tensors_are_those_of_the_hubs_checkpoint(trainee: Trainee) -> None:
    planned = {tensor.name: tensor.shape for tensor in plan_tensors(MODEL, dtype=torch.float32)}
    assert {name: tuple(tensor.shape) for name, tensor in trainee.tensors().items()} == planned


def test_tensors_are_the_model_that_was_trained(trainee: Trainee) -> None:
    """mm2's own layers, given the tensors by the hub's names, come to the same losses."""
    tensors = trainee.tensors()
    spec = MODEL.spec()
    states = tensors[weight_names.EMBEDDING][ROWS[:, :-1]]
    mask, positions = torch.ones(2, 8, dtype=torch.int64), torch.arange(8).expand(2, 8)
    with torch.no_grad():
        for number in range(2):
            prefix = weight_names.layer_prefix(number)
            layer = ReferenceLayer(spec, number)
            layer.load_state_dict(
                {
                    name.removeprefix(prefix): tensor
                    for name, tensor in tensors.items()
                    if name.startswith(prefix)
                }
            )
            states = layer(states, mask, positions)
        states = states * (states.square().mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt()
        logits = (states * tensors[weight_names.FINAL_NORM]) @ tensors[weight_names.LM_HEAD].T
        mine = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ROWS[:, 1:].flatten(), reduction="none"
        )
        assert torch.allclose(trainee.token_losses(ROWS).flatten(), mine, atol=1e-5)


def test_choices_are_noted_for_every_layer_and_can_be_replaced(trainee: Trainee) -> None:
    with torch.no_grad():
        before = trainee.token_losses(ROWS)
        chosen = trainee.choices
        assert [choice.shape for choice in chosen] == [(16, 4)] * 2
        with trainee.rerouted(lambda experts: experts.roll(1, dims=0)):
            trainee.token_losses(ROWS)
        rolled = trainee.choices
        # The first layer's choice depends on nothing that was replaced.
        assert torch.equal(rolled[0], chosen[0].roll(1, dims=0))
        assert torch.equal(trainee.token_losses(ROWS), before)


def test_same_few_channels_are_massive_for_every_token_and_tame_behind_a_norm() -> None:
    model = SyntheticModel(num_hidden_layers=1, num_local_experts=4, vocab_size=262)
    config = model.config(dtype=torch.float32, token_ids=TokenIds(bos_token_id=0, eos_token_id=1))
    trainee = Trainee(config, seed=0)
    plant_massive_channels(trainee, count=3, seed=0)
    tensors = trainee.tensors()
    stream = tensors["model.embed_tokens.weight"]
    typical = stream.abs().median()
    assert ((stream.abs() > 20 * typical).sum(1) == 3).all()
    normed = stream * stream.square().mean(1, keepdim=True).rsqrt() * tensors["model.norm.weight"]
    massive = stream[0].abs() > 20 * typical
    assert 1.5 < float(normed[:, massive].abs().mean()) < 2.5
    assert 0.8 < float(normed[:, ~massive].square().mean().sqrt()) < 1.2


def trained(options: TrainingOptions) -> tuple[Trainee, TrainingCourse]:
    tokenizer = make_tokenizer(["a"], vocab_size=TINY.vocab_size)
    text = TokenStream(("the cat sat on the mat. " * 50,), tokenizer=tokenizer)
    config = TINY.config(dtype=torch.float32, token_ids=find_token_ids(tokenizer))
    trainee = Trainee(config, seed=options.seed)
    return trainee, train(trainee, text, options)


def test_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    first, second = (trained(OPTIONS)[0].tensors() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = trained(replace(OPTIONS, seed=1))[0].tensors()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_loss_falls_with_more_steps() -> None:
    short, long = (trained(replace(OPTIONS, num_steps=steps))[1] for steps in (5, 80))
    assert (short.num_steps, short.num_tokens) == (5, 320)
    assert long.loss < 0.7 * short.loss


def test_bias_moves_with_load_alone_and_by_the_rate_at_most() -> None:
    moved = trained(OPTIONS)[0].tensors()[BIAS]
    assert moved.dtype == torch.float32
    assert 0 < float(moved.abs().max()) <= OPTIONS.num_steps * OPTIONS.bias_rate
    still = trained(replace(OPTIONS, bias_rate=0.0))[0].tensors()[BIAS]
    assert float(still.abs().max()) == 0


def test_balance_lowers_the_bias_of_the_expert_that_took_most() -> None:
    trainee, _ = trained(replace(OPTIONS, num_steps=1))
    before = trainee.tensors()[BIAS].clone()
    load = torch.bincount(trainee.choices[0].flatten(), minlength=4).float()
    trainee.balance(rate=0.5)
    expected = before + 0.5 * torch.sign(load.mean() - load)
    assert torch.equal(trainee.tensors()[BIAS], expected)


@pytest.fixture(scope="module")
def evaluation() -> HeldOutEvaluation:
    """An untrained model over a text of four letters."""
    tokenizer = make_tokenizer(["a"], vocab_size=262)
    trainee = Trainee(LEAST.config(dtype=torch.float32, token_ids=find_token_ids(tokenizer)), seed=0)
    generator = torch.Generator().manual_seed(0)
    text = "".join("abcd"[int(i)] for i in torch.randint(4, (2000,), generator=generator))
    stream = TokenStream((text,), tokenizer=tokenizer)
    return evaluate(trainee, stream, length=64, num_experts=4, seed=0)


def test_untrained_model_knows_next_to_nothing(evaluation: HeldOutEvaluation) -> None:
    assert evaluation.bits_per_byte == pytest.approx(math.log2(262), rel=0.05)
    assert evaluation.num_tokens == 30 * 64


def test_loads_add_up(evaluation: HeldOutEvaluation) -> None:
    [layer] = evaluation.layers
    assert sum(layer.load) == pytest.approx(1)
    low, high = layer.load_range
    assert low <= 1 <= high


def test_information_is_none_where_every_expert_is_taken(evaluation: HeldOutEvaluation) -> None:
    # Four experts of four: nothing is chosen, so experts tell nothing of the token.
    assert [layer.token_information for layer in evaluation.layers] == pytest.approx([0], abs=1e-9)


def test_experts_of_other_tokens_cost_bits_and_follow_the_token(learned: LearnedModel) -> None:
    after = learned.after
    assert after.bits_per_byte_random_experts > after.bits_per_byte + 0.001
    assert all(layer.token_information > 0.02 for layer in after.layers)


def test_rivals_code_what_they_know() -> None:
    known = "the same line again and again.\n" * 200
    same = Corpus(name="same", training=(known,), held_out=(known,))
    other = Corpus(name="other", training=(known,), held_out=("ΞΨΩϕ" * 100,))
    assert measure_rivals(same).lzma < 0.2 < measure_rivals(same).unigram < 5
    assert measure_rivals(other).unigram > 12


@pytest.mark.parametrize("shape", [(64, 32), (128, 256), (200, 130)])
def test_codes_and_scales_give_the_weight_back_to_fp8s_rounding(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight)
    back = dequantise(codes, scales, dtype=torch.float32)
    error = (back - weight).abs()
    assert bool((error <= weight.abs() / 15 + weight.abs().max() * 2**-17).all())
    assert float(error.max()) > 0


def test_every_block_reaches_the_largest_code() -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    weight[128:] *= 1e-3
    codes, scales = quantise(weight)
    assert codes.float().abs().unflatten(0, (2, 128)).amax(dim=(1, 2)).tolist() == [448, 448]
    assert scales[0, 0] > 100 * scales[1, 0]


def test_block_of_zeros_stays_zero() -> None:
    codes, scales = quantise(torch.zeros(8, 8))
    assert float(codes.float().abs().max()) == 0
    assert scales.tolist() == [[1.0]]


def held_out_inputs(folder: Path) -> Inputs:
    request = InputRequest(prompts_file=folder / "held_out.json")
    return build_inputs(request, folder=folder, spec=ModelSpec.from_folder(folder))


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


def test_router_is_float32_and_the_rest_bf16(learned: LearnedModel) -> None:
    with CheckpointReader(learned.folders[0]) as reader:
        dtypes = {name: reader.index[name].dtype.as_torch() for name in reader.index.names}
    router = {name for name in dtypes if name.endswith(weight_names.FLOAT32_NAMES)}
    assert {dtypes[name] for name in router} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in router} == {torch.bfloat16}


def test_copies_in_fp8_and_bf16_are_one_model_to_fp8s_rounding(learned: LearnedModel) -> None:
    name = weight_names.layer_prefix(1) + weight_names.expert_weight(3, weight_names.EXPERT_DOWN)
    with CheckpointReader(learned.folders[0]) as bf16, CheckpointReader(learned.folders[1]) as fp8:
        weight = bf16.read(name).float()
        assert fp8.read(name).dtype == torch.float8_e4m3fn
        difference = fp8.read_weight(name, torch.float32) - weight
    assert 0 < float(difference.norm() / weight.norm()) < 0.05


def test_held_out_prompts_are_rows_of_1_to_500_tokens(learned: LearnedModel) -> None:
    lengths = held_out_inputs(learned.folders[0]).attention_mask.sum(1).tolist()
    assert lengths == list(PROMPT_LENGTHS)
    assert (min(lengths), max(lengths)) == (1, 500)


def test_held_out_prompts_are_in_the_held_out_text_and_not_in_the_rest(learned: LearnedModel) -> None:
    folder = learned.folders[0]
    prompts = json.loads((folder / "held_out.json").read_text())
    held_out = (folder / "held_out.txt").read_text()
    assert all(prompt in held_out for prompt in prompts)
    longest = max(prompts, key=len)
    assert all(longest not in passage for passage in learned.corpus.training)


def test_model_knows_more_of_text_it_never_saw_than_byte_counts_do(learned: LearnedModel) -> None:
    assert learned.after.bits_per_byte < learned.rivals.unigram < learned.before.bits_per_byte
    assert learned.rivals.lzma < learned.rivals.unigram


def test_record_tells_how_to_train_it_again(learned: LearnedModel) -> None:
    record = json.loads((learned.folders[0] / "training.json").read_text())
    assert record["options"]["num_steps"] == 30
    assert record["text"]["sha256"] == learned.corpus.sha256
    assert record["machine"]["torch"] == torch.__version__
    assert record["after"]["bits_per_byte"] == learned.after.bits_per_byte


def test_occupied_folder_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("something")
    endless = Recipe(texts=("prose",), model=TINY, options=replace(OPTIONS, num_steps=10**9))
    with pytest.raises(UsageError, match="exists"):
        train_checkpoint({tmp_path: torch.bfloat16}, endless)
