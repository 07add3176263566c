"""The passes of a whole port's run: their tokens, masks and positions, and where the tokens lie in the batch."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs, pad_rows
from minimax_tools.model.sites import Site
from neuron.model_runs.assembly import assemble_site, last_logits
from neuron.model_runs.passes import plan_passes

ROWS = [[5, 6, 7, 8, 9], [1, 2, 3]]


def inputs(side: str, *, bucket: int = 5) -> Inputs:
    return pad_rows(ROWS, padding_side=side, buckets=(bucket,), pad_token_id=0, source="a test")


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("right", [[5, 6, 7], [1, 0, 0]], [[1, 1, 1], [1, 0, 0]]),
        ("left", [[5, 6, 7], [0, 0, 1]], [[1, 1, 1], [0, 0, 1]]),
    ],
)
def test_prefill_leaves_out_the_decoded_tokens(
    side: str, ids: list[list[int]], mask: list[list[int]]
) -> None:
    prefill = plan_passes(inputs(side), 2)[0]
    assert prefill.input_ids.tolist() == ids
    assert prefill.attention_mask.tolist() == mask


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_step_feeds_each_prompts_own_next_token_at_its_own_position(side: str) -> None:
    _, first, second = plan_passes(inputs(side), 2)
    assert first.input_ids.tolist() == [[8], [2]]
    assert first.position_ids.tolist() == [[3], [1]]
    assert second.input_ids.tolist() == [[9], [3]]
    assert second.position_ids.tolist() == [[4], [2]]
    # The cache's columns come first: those of the prefill, padding included, then the steps.
    assert second.attention_mask.shape == (2, 5)
    assert second.attention_mask[1].sum() == 3


def test_a_buckets_padding_stays_in_the_prefill() -> None:
    prefill = plan_passes(inputs("right", bucket=8), 2)[0]
    assert prefill.batch_shape == (2, 6)
    assert prefill.position_ids.tolist()[1] == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_assembled_passes_are_the_batch(side: str) -> None:
    batch = inputs(side)
    pieces = [(one, one.input_ids[..., None].float()) for one in plan_passes(batch, 2)]
    assembled = assemble_site(pieces, Site.OUTPUT, num_columns=batch.sequence_length)
    assert assembled[..., 0].long().tolist() == batch.input_ids.tolist()


def test_sites_with_heads_are_assembled_along_their_third_dimension() -> None:
    batch = inputs("right")
    pieces = [
        (one, one.input_ids[:, None, :, None].expand(-1, 2, -1, 3).float()) for one in plan_passes(batch, 1)
    ]
    assembled = assemble_site(pieces, Site.K_ROPE, num_columns=batch.sequence_length)
    assert assembled.shape == (2, 2, 5, 3)
    assert assembled[:, 1, :, 2].long().tolist() == batch.input_ids.tolist()


def test_prefill_with_as_many_tokens_as_heads_is_laid_out_as_the_steps_are() -> None:
    batch = inputs("right")
    passes = plan_passes(batch, 2)
    # [B,s,N,D] of 3 heads: the prefill has 3 tokens too.
    shown = [(one, one.input_ids[:, :, None, None].expand(-1, -1, 3, 2).float()) for one in passes]
    pieces = [shown[0], *((one, piece.transpose(1, 2)) for one, piece in shown[1:])]
    assembled = assemble_site(pieces, Site.Q_ROPE, num_columns=5, tokens_first=(Site.Q_ROPE,))
    assert assembled[:, 1, :, 0].long().tolist() == batch.input_ids.tolist()


def test_piece_of_another_shape_is_left_for_the_comparison() -> None:
    passes = plan_passes(inputs("right"), 1)
    pieces = [(one, torch.zeros(2, one.batch_shape[1] - 1, 4)) for one in passes]
    assert assemble_site(pieces, Site.OUTPUT, num_columns=5).shape == (2, 3, 4)


def test_last_logits_are_those_of_each_prompts_last_real_token() -> None:
    prefill = plan_passes(inputs("right"), 0)[0]
    assert last_logits(prefill, prefill.input_ids[..., None]).tolist() == [[9], [3]]


def test_a_prompt_keeps_a_token_to_prefill() -> None:
    with pytest.raises(UsageError, match="3 tokens 3 cannot be decoded"):
        plan_passes(inputs("right"), 3)


def test_prompts_in_other_rows_stay_whole() -> None:
    prefill = plan_passes(inputs("right"), 1)[0]
    swapped = prefill.in_rows(torch.tensor([1, 0]))
    assert swapped.input_ids.tolist() == prefill.input_ids.flip(0).tolist()
    assert swapped.columns.tolist() == prefill.columns.flip(0).tolist()
