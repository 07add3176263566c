"""The passes of a whole port's run: their tokens, masks and positions, where they lie in the batch, and its cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from minimax_tools.capture.passes import CachePair
from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs, pad_rows
from minimax_tools.model.sites import Site
from neuron.model_runs.assembly import assemble_site, last_logits
from neuron.model_runs.cache_record import CacheForm, CacheRecord
from neuron.model_runs.passes import Pass, plan_passes

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
def test_prefill_leaves_out_the_decoded_tokens_and_a_step_feeds_each_prompts_own_next_one(
    side: str, ids: list[list[int]], mask: list[list[int]]
) -> None:
    prefill, first, second = plan_passes(inputs(side), 2)
    assert prefill.input_ids.tolist() == ids
    assert prefill.attention_mask.tolist() == mask
    assert (first.input_ids.tolist(), first.position_ids.tolist()) == ([[8], [2]], [[3], [1]])
    assert (second.input_ids.tolist(), second.position_ids.tolist()) == ([[9], [3]], [[4], [2]])
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


PASSES = plan_passes(inputs("right"), 2)
IDS = [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]]


def entries(one: Pass, *, past: int, form: CacheForm) -> torch.Tensor:
    """Return the entries to which a port of this form writes the tokens of a pass, [B,s]."""
    if form is CacheForm.POSITIONS:
        return one.position_ids
    return (past + torch.arange(one.batch_shape[1])).expand(one.batch_shape)


def snapshots(form: CacheForm, *, size: int | None = None, shift: int = 0) -> list[Sequence[CachePair]]:
    """Return the cache after each pass of a port that writes token ids as keys, one layer, [B,2,P,4]."""
    taken: list[Sequence[CachePair]] = []
    past, cache = 0, torch.zeros(2, 2, size or 0, 4)
    for one in PASSES:
        if size is None:
            cache = torch.cat((cache, torch.zeros(2, 2, one.batch_shape[1], 4)), dim=2)
        places = entries(one, past=past, form=form)
        for row in range(2):
            for column in range(one.batch_shape[1]):
                if one.columns[row, column] >= 0:
                    cache[row, :, places[row, column] + shift] = float(one.input_ids[row, column])
        past += one.batch_shape[1]
        taken.append([(cache.clone(), cache.clone() + 100)])
    return taken


def record(taken: list[Sequence[CachePair]]) -> CacheRecord:
    cache = CacheRecord(num_columns=5)
    for one, snapshot in zip(PASSES, taken, strict=True):
        cache.add(one, snapshot)
    return cache


@pytest.mark.parametrize(
    ("form", "size"), [(CacheForm.COLUMNS, None), (CacheForm.COLUMNS, 9), (CacheForm.POSITIONS, 9)]
)
def test_each_token_is_found_where_the_port_keeps_it(form: CacheForm, size: int | None) -> None:
    cache = record(snapshots(form, size=size))
    assert cache.form is form
    keys, values = cache.layer(0)
    assert keys[:, 1, :, 3].long().tolist() == IDS
    assert values[0, 0, :, 0].tolist() == [105.0, 106.0, 107.0, 108.0, 109.0]
    assert (cache.changes(), cache.shift) == ((), 0)


def test_a_cache_one_row_off_does_not_hold_the_tokens() -> None:
    keys, _ = record(snapshots(CacheForm.POSITIONS, size=9, shift=1)).layer(0)
    assert keys[0, 0, :, 0].tolist() != [5.0, 6.0, 7.0, 8.0, 9.0]


def test_a_step_that_overwrites_an_earlier_token_is_found() -> None:
    taken = snapshots(CacheForm.POSITIONS, size=9)
    taken[2][0][1][1, 0, 0] = 7.0  # the last step writes over the first value of prompt 1, in kv head 0
    (change,) = record(taken).changes()
    assert (change.layer, change.number, change.kind) == (0, 2, "values")
    assert change.heads == (0,)
    assert change.places == ((1, 0),)


def test_steps_that_write_beside_their_entries_show_by_how_far() -> None:
    taken = snapshots(CacheForm.POSITIONS, size=9)
    # Each step's entry moves one on; nothing lies behind it yet.
    for number, step in enumerate(PASSES[1:], start=1):
        pair = []
        for part in taken[number][0]:
            moved = part.clone()
            for row in range(2):
                first, place = int(PASSES[1].position_ids[row, 0]), int(step.position_ids[row, 0])
                moved[row, :, first + 1 : place + 2] = part[row, :, first : place + 1]
                moved[row, :, first] = taken[0][0][0][row, :, first]
            pair.append(moved)
        taken[number] = [(pair[0], pair[1])]
    cache = record(taken)
    assert (cache.form, cache.shift) == (CacheForm.POSITIONS, 1)
    keys, _ = cache.layer(0)
    assert keys[:, 1, :, 3].long().tolist() == IDS
