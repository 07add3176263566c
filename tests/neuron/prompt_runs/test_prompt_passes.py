"""The passes of a batch of prompts whose answers have different lengths."""

from __future__ import annotations

from typing import Any

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.text.answered_prompts import AnsweredPrompt
from neuron.model_runs.passes import Pass
from neuron.prompt_runs.prompt_run import plan_prompt_passes


def prompt(prompt_ids: tuple[int, ...], answer_ids: tuple[int, ...]) -> AnsweredPrompt:
    return AnsweredPrompt(name="prompt", prompt_ids=prompt_ids, answer_ids=answer_ids, prompt="")


PROMPTS = [prompt((1, 2, 3), (4, 5)), prompt((6,), (7,)), prompt((8, 9), ())]


def plan(side: str = "right", **choices: Any) -> list[Pass]:
    return plan_prompt_passes(PROMPTS, padding_side=side, pad_token_id=0, last_position=100, **choices)


@pytest.mark.parametrize(
    ("side", "ids", "columns"),
    [
        ("right", [[1, 2, 3], [6, 0, 0], [8, 9, 0]], [[0, 1, 2], [0, -1, -1], [0, 1, -1]]),
        ("left", [[1, 2, 3], [0, 0, 6], [0, 8, 9]], [[0, 1, 2], [-1, -1, 0], [-1, 0, 1]]),
    ],
)
def test_prefill_holds_the_prompts_alone_and_each_token_is_fed_once(
    side: str, ids: list[list[int]], columns: list[list[int]]
) -> None:
    passes = plan(side)
    assert (passes[0].input_ids.tolist(), passes[0].columns.tolist()) == (ids, columns)
    for row, one in enumerate(PROMPTS):
        fed = []
        for model_pass in passes:
            places = model_pass.columns[row].tolist()
            tokens = model_pass.input_ids[row].tolist()
            fed += [(place, token) for place, token in zip(places, tokens, strict=True) if place >= 0]
        assert fed == list(enumerate(one.row))


def test_steps_feed_the_answers_own_tokens_at_their_positions() -> None:
    _, first, second = plan()
    assert first.input_ids.tolist()[:2] == [[4], [7]]
    assert first.position_ids.tolist()[:2] == [[3], [1]]
    assert first.columns.tolist() == [[3], [1], [-1]]
    assert second.input_ids.tolist()[0] == [5]
    assert second.columns.tolist() == [[4], [-1], [-1]]
    # The mask covers the columns before the step.
    assert first.attention_mask.tolist()[1] == [1, 0, 0, 1]
    assert second.attention_mask.tolist()[1] == [1, 0, 0, 1, 1]


def test_bucket_pads_the_prefill_and_no_step() -> None:
    passes = plan(buckets=(2, 8))
    assert [one.batch_shape for one in passes] == [(3, 8), (3, 1), (3, 1)]
    assert passes[1].attention_mask.shape == (3, 9)
    with pytest.raises(UsageError, match="the longest row has 3 tokens"):
        plan(buckets=(2,))
