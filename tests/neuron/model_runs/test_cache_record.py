"""A port's cache, followed from pass to pass: where its tokens lie, and what a later pass changed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from minimax_tools.capture.passes import CachePair
from minimax_tools.model.inputs import pad_rows
from neuron.model_runs.cache_record import CacheForm, CacheRecord
from neuron.model_runs.passes import Pass, plan_passes

PASSES = plan_passes(
    pad_rows([[5, 6, 7, 8, 9], [1, 2, 3]], padding_side="right", buckets=(), pad_token_id=0, source="a test"),
    2,
)
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
    assert cache.changes() == ()


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


def test_a_right_cache_has_no_shift() -> None:
    assert record(snapshots(CacheForm.POSITIONS, size=9)).shift == 0
    assert record(snapshots(CacheForm.COLUMNS)).shift == 0
