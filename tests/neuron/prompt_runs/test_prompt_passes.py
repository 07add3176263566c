"""The passes of a batch of prompts whose answers have different lengths."""

from __future__ import annotations

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.text.answered_prompts import AnsweredPrompt
from neuron.model_runs.passes import Pass
from neuron.prompt_runs.prompt_run import plan_prompt_passes


def prompt(prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...]) -> AnsweredPrompt:
    return AnsweredPrompt(name="prompt", prompt_ids=prompt_ids, answer_ids=answer_ids, prompt="")


PROMPTS = [prompt((1, 2, 3), (4, 5)), prompt((6,), (7,)), prompt((8, 9), ())]


def plan(side: str = "right") -> list[Pass]:
    return plan_prompt_passes(PROMPTS, padding_side=side, pad_token_id=0, last_position=100)


def test_prefill_holds_the_prompts_alone() -> None:
    prefill = plan()[0]
    assert prefill.input_ids.tolist() == [[1, 2, 3], [6, 0, 0], [8, 9, 0]]
    assert prefill.columns.tolist() == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]


def test_left_padding_keeps_positions_and_columns() -> None:
    prefill = plan("left")[0]
    assert prefill.input_ids.tolist() == [[1, 2, 3], [0, 0, 6], [0, 8, 9]]
    assert prefill.columns.tolist() == [[0, 1, 2], [-1, -1, 0], [-1, 0, 1]]


def test_bucket_pads_the_prefill_and_no_step() -> None:
    passes = plan_prompt_passes(
        PROMPTS, padding_side="right", buckets=(2, 8), pad_token_id=0, last_position=100
    )
    assert [one.batch_shape for one in passes] == [(3, 8), (3, 1), (3, 1)]
    assert passes[1].attention_mask.shape == (3, 9)
    with pytest.raises(UsageError, match="the longest row has 3 tokens"):
        plan_prompt_passes(PROMPTS, padding_side="right", buckets=(2,), pad_token_id=0, last_position=100)


def test_steps_feed_the_answers_own_tokens_at_their_positions() -> None:
    _, first, second = plan()
    assert first.input_ids.tolist()[:2] == [[4], [7]]
    assert first.position_ids.tolist()[:2] == [[3], [1]]
    assert first.columns.tolist() == [[3], [1], [-1]]
    assert second.input_ids.tolist()[0] == [5]
    assert second.columns.tolist() == [[4], [-1], [-1]]


def test_mask_of_a_step_covers_the_columns_before_it() -> None:
    _, first, second = plan()
    assert first.attention_mask.tolist()[1] == [1, 0, 0, 1]
    assert second.attention_mask.tolist()[1] == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_token_is_fed_once(side: str) -> None:
    for row, one in enumerate(PROMPTS):
        fed = [
            (column, token)
            for model_pass in plan(side)
            for column, token in zip(
                model_pass.columns[row].tolist(), model_pass.input_ids[row].tolist(), strict=True
            )
            if column >= 0
        ]
        assert fed == list(enumerate(one.row))
