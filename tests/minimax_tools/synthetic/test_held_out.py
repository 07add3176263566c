from __future__ import annotations

import math

import pytest
import torch

from minimax_tools.synthetic.corpus import Corpus
from minimax_tools.synthetic.held_out import HeldOutEvaluation, evaluate, measure_rivals
from minimax_tools.synthetic.learned import LearnedModel
from minimax_tools.synthetic.token_stream import TokenStream
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import find_token_ids, make_tokenizer
from minimax_tools.synthetic.trainee import Trainee

MODEL = SyntheticModel(num_hidden_layers=1, hidden_size=32, num_local_experts=4, vocab_size=262)


@pytest.fixture(scope="module")
def evaluation() -> HeldOutEvaluation:
    """An untrained model over a text of four letters."""
    tokenizer = make_tokenizer(["a"], vocab_size=262)
    trainee = Trainee(MODEL.config(dtype=torch.float32, token_ids=find_token_ids(tokenizer)), seed=0)
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
