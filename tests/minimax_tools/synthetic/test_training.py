from __future__ import annotations

from dataclasses import replace

import torch

from minimax_tools.synthetic.token_stream import TokenStream
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import find_token_ids, make_tokenizer
from minimax_tools.synthetic.trainee import Trainee
from minimax_tools.synthetic.training import TrainingCourse, TrainingOptions, train

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
OPTIONS = TrainingOptions(
    num_steps=12, minutes=None, batch_size=2, seq_len=32, learning_rate=0.01, bias_rate=0.002, seed=0
)
BIAS = "model.layers.0.block_sparse_moe.e_score_correction_bias"


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


def test_minutes_become_a_number_of_steps() -> None:
    _, course = trained(replace(OPTIONS, num_steps=None, minutes=1e-6))
    # The steps that tell the speed are part of the training.
    assert course.num_steps == 14
