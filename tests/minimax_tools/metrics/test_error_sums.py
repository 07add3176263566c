"""Sums of errors, by token and by channel, are those of the plain formulas, whatever the dtypes and the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minimax_tools.metrics.error_sums import (
    ErrorSums,
    read_blocks,
    square_by_channel,
    square_by_token,
    sum_errors,
    sum_on_cores,
)

CHANNELS = 700  # more than the channels that are summed at once, and no multiple of them
# One block, several blocks on one core, and enough for threads.
NUM_TOKENS = (0, 1, 300, 900)


def sides(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Golden and port in a dtype, and the exact values."""
    generator = torch.Generator().manual_seed(num_tokens)
    exact = torch.randn(num_tokens, CHANNELS, generator=generator)
    noise = torch.randn(2, num_tokens, CHANNELS, generator=generator)
    golden, port = (exact * (1.0 + 4e-3 * noise)).to(dtype)
    return golden, port, exact


def massive(*channels: int) -> torch.Tensor:
    return torch.isin(torch.arange(CHANNELS), torch.tensor(channels, dtype=torch.int64))


def plain(values: torch.Tensor, exact: torch.Tensor, is_massive: torch.Tensor) -> dict[str, torch.Tensor]:
    values, exact = values.double(), exact.double()
    error = values - exact
    ordinary = ~is_massive
    return {
        "squares": error.square()[:, ordinary].sum(1),
        "massive_squares": error.square()[:, is_massive].sum(1),
        "value_squares": values.square()[:, ordinary].sum(1),
        "massive_value_squares": values.square()[:, is_massive].sum(1),
        "products": (error * exact)[:, ordinary].sum(1),
        "exact_squares": exact.square()[:, ordinary].sum(1),
        "channel_offsets": error.sum(0),
        "channel_squares": error.square().sum(0),
        "channel_products": (error * exact).sum(0),
        "channel_exact_squares": exact.square().sum(0),
    }


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [(), (3, 699)])
def test_sums_are_those_of_the_plain_formulas(
    num_tokens: int, dtype: torch.dtype, channels: tuple[int, ...]
) -> None:
    golden, port, exact = sides(num_tokens, dtype)
    found = sum_errors(golden, port, exact=exact, massive=massive(*channels))
    for sums, values in zip(found, (golden, port), strict=True):
        expected = plain(values, exact, massive(*channels))
        assert expected.keys() == set(ErrorSums._fields)
        for name, value in expected.items():
            of_channel = name.startswith("channel")
            # By channel, float32 within a block.
            tolerance = 1e-12 if dtype == torch.float64 or not of_channel else 1e-4
            torch.testing.assert_close(getattr(sums, name), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_squares_alone_are_the_same(num_tokens: int) -> None:
    golden, _, exact = sides(num_tokens, torch.bfloat16)
    (sums,) = sum_errors(golden, exact=exact, massive=massive(9))
    errors = square_by_token(golden, exact, massive=massive(9))
    values = square_by_token(golden, None, massive=massive(9))
    expected = (sums.squares, sums.massive_squares, sums.value_squares, sums.massive_value_squares)
    for found, one in zip((*errors, *values), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-12, atol=0.0)
    by_channel = golden.double().square().sum(0)
    torch.testing.assert_close(square_by_channel(golden), by_channel, rtol=1e-5, atol=0.0)


def test_values_are_not_changed_and_may_lie_anywhere() -> None:
    golden, port, exact = sides(50, torch.float32)
    kept = golden.clone()
    columns = golden.t().contiguous().t()
    of_columns, _ = sum_errors(columns, port, exact=exact, massive=massive())
    of_golden, _ = sum_errors(golden, port, exact=exact, massive=massive())
    assert torch.equal(of_columns.squares, of_golden.squares)
    assert torch.equal(golden, kept)


def test_nan_of_a_massive_channel_leaves_the_ordinary_sums_alone() -> None:
    golden, _, exact = sides(5, torch.float32)
    golden[2, 7] = torch.nan
    (sums,) = sum_errors(golden, exact=exact, massive=massive(7))
    assert bool(sums.squares.isfinite().all())
    assert sums.massive_squares.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("shape", [(400_000,), (3, 200_001), (1000, 300), (0, 5)])
def test_blocks_are_the_tensor_from_its_beginning_to_its_end(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).bfloat16()
    blocks = [(window, block.copy()) for window, (block,) in read_blocks((values,), range(shape[0]))]
    assert [window.start for window, _ in blocks[1:]] == [window.stop for window, _ in blocks[:-1]]
    found = np.concatenate([np.zeros((0, *shape[1:]), np.float32), *(block for _, block in blocks)])
    assert np.array_equal(found, values.float().numpy())


def test_all_are_float64_if_one_is() -> None:
    pair = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    ((_, blocks),) = read_blocks(pair, range(3))
    assert {block.dtype for block in blocks} == {np.dtype(np.float32)}
    ((_, blocks),) = read_blocks((pair[0], pair[1].double()), range(3))
    assert {block.dtype for block in blocks} == {np.dtype(np.float64)}


@pytest.mark.parametrize("num_items", [0, 1, 7, 1_000_003])
def test_each_item_is_summed_on_one_core(num_items: int) -> None:
    values = torch.ones(num_items)
    parts = sum_on_cores(lambda items: range(items.start, items.stop), values)
    assert [item for part in parts for item in part] == list(range(num_items))
