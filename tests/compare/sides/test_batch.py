"""Real tokens of a batch: tensors in any layout give the same rows, and others are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.sides.sides import Batch, spread_evenly
from minimax_tools.errors import IncomparableError
from minimax_tools.model.sites import ModelSite, Site

MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
PLACES = [[0, 0], [0, 1], [0, 2], [1, 0]]


def capture(mask: torch.Tensor | None) -> Any:
    kept = None if mask is None else mask.bool()
    return SimpleNamespace(read_attention_mask=lambda: mask, read_kept_mask=lambda: kept)


class TestRows:
    VALUES = torch.arange(12.0).reshape(2, 3, 2)
    ROWS = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])

    def test_real_tokens_of_either_layout_and_of_all_sites(self) -> None:
        batch = Batch(MASK)
        for values in (self.VALUES, self.VALUES.flatten(0, 1)):
            assert torch.equal(batch.rows(values, Site.OUTPUT), self.ROWS)
            assert batch.places(values, Site.OUTPUT).tolist() == PLACES
        assert torch.equal(batch.rows(self.VALUES, ModelSite.LOGITS), self.ROWS)

    def test_all_tokens_are_real_without_a_mask(self) -> None:
        batch, flat = Batch(None), self.VALUES.flatten(0, 1)
        places = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        for values, expected in ((self.VALUES, places), (flat, [[0, token] for token in range(6)])):
            assert torch.equal(batch.rows(values, Site.OUTPUT), flat)
            assert batch.places(values, Site.OUTPUT).tolist() == expected

    def test_nothing_is_copied_if_all_tokens_are_real(self) -> None:
        rows = Batch(torch.ones(2, 3)).rows(self.VALUES, Site.OUTPUT)
        assert torch.equal(rows, self.VALUES.flatten(0, 1))
        assert rows.data_ptr() == self.VALUES.data_ptr()

    def test_heads_lie_side_by_side(self) -> None:
        heads = torch.arange(24.0).reshape(2, 2, 3, 2)
        rows = Batch(MASK).rows(heads, Site.Q_ROPE)
        assert rows.shape == (4, 4)
        assert rows[3].tolist() == [*heads[1, 0, 0].tolist(), *heads[1, 1, 0].tolist()]

    @pytest.mark.parametrize("shape", [(2, 4, 2), (5, 2), (3, 2, 2)])
    def test_tensor_of_another_batch_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(IncomparableError, match=r"different batches: expected \[B,S\] of \(2, 3\)"):
            Batch(MASK).rows(torch.zeros(shape), Site.OUTPUT)


class TestMask:
    def test_of_either_side_or_of_both(self) -> None:
        for golden, port in ((MASK, None), (None, MASK), (MASK, MASK.bool())):
            assert Batch.of(capture(golden), capture(port)).tokens(torch.zeros(2, 3)).shape == (4,)
        assert Batch.of(capture(None), capture(None)).tokens(torch.zeros(2, 3)).shape == (6,)

    def test_other_mask_and_one_of_padding_alone_are_refused(self) -> None:
        sentence = r"attention_mask differs: expected rows of 3, 1 tokens \(golden\), found 3, 3"
        with pytest.raises(IncomparableError, match=sentence):
            Batch.of(capture(MASK), capture(torch.ones_like(MASK)))
        with pytest.raises(IncomparableError, match="no token is real"):
            Batch(torch.zeros_like(MASK))


@pytest.mark.parametrize(
    ("num_tokens", "most", "indices"),
    [(10, 4, [0, 3, 6, 9]), (3, 4, [0, 1, 2]), (9, 1, [0]), (5, 2, [0, 4]), (1, 1, [0])],
)
def test_few_tokens_are_evenly_spread(num_tokens: int, most: int, indices: list[int]) -> None:
    spread = spread_evenly(num_tokens, most)
    assert (spread.tolist(), spread.dtype) == (indices, torch.int64)
