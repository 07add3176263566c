"""Squared norms per token, of massive channels and ordinary ones apart."""

from __future__ import annotations

import pytest
import torch

from compare.noise.rows import Squares, square_difference, square_rows

# More tokens than are summed at once.
ROWS = torch.randn(150, 6, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(150, 6, generator=torch.Generator().manual_seed(1))
ONE = Squares(ordinary=torch.tensor([1.0, 4.0]), massive=torch.tensor([9.0, 2.0]))
TWO = Squares(ordinary=torch.tensor([3.0, 2.0]), massive=torch.tensor([1.0, 5.0]))


@pytest.mark.parametrize("channel", [None, 2])
def test_sums_are_those_of_all_tokens_channel_by_channel(channel: int | None) -> None:
    massive = torch.arange(6) == (-1 if channel is None else channel)
    for found, values in (
        (square_rows(ROWS, massive=massive), ROWS),
        (square_difference(ROWS, OTHER, massive=massive), OTHER - ROWS),
    ):
        squares = values.double().square()
        assert found.ordinary.tolist() == pytest.approx(squares[:, ~massive].sum(1).tolist(), rel=1e-5)
        assert found.massive.tolist() == pytest.approx(squares[:, massive].sum(1).tolist(), rel=1e-5)
        assert found.whole.tolist() == pytest.approx(squares.sum(1).tolist(), rel=1e-5)


def test_sums_are_in_float64() -> None:
    large = torch.full((1, 2), 1e30)
    assert square_rows(large, massive=torch.zeros(2, dtype=torch.bool)).whole.tolist() == pytest.approx(
        [2e60]
    )


def parts(squares: Squares) -> list[list[float]]:
    return [squares.ordinary.tolist(), squares.massive.tolist()]


def test_arithmetic_is_token_by_token() -> None:
    assert parts(ONE.plus(TWO, factor=2.0)) == [[7.0, 8.0], [11.0, 12.0]]
    assert parts(ONE.plus(TWO, factor=torch.tensor([1.0, 0.0]))) == [[4.0, 4.0], [10.0, 2.0]]
    assert parts(ONE.plus(TWO, factor=-1.0)) == [[0.0, 2.0], [8.0, 0.0]]
    assert parts(ONE.times(3.0)) == [[3.0, 12.0], [27.0, 6.0]]
    assert parts(ONE.times(torch.tensor([2.0, 0.5]))) == [[2.0, 2.0], [18.0, 1.0]]
    assert parts(ONE.maximum(TWO)) == [[3.0, 4.0], [9.0, 5.0]]
    assert parts(ONE.select(torch.tensor([False, True]))) == [[4.0], [2.0]]
    assert parts(Squares.of(ordinary=torch.tensor([-3.0]), massive=torch.tensor([2.0]))) == [[9.0], [4.0]]


def test_values_are_put_in_a_copy() -> None:
    one = Squares(ordinary=torch.tensor([7.0]), massive=torch.tensor([8.0]))
    assert parts(ONE.put(torch.tensor([False, True]), one)) == [[1.0, 7.0], [9.0, 8.0]]
    assert parts(ONE) == [[1.0, 4.0], [9.0, 2.0]]
