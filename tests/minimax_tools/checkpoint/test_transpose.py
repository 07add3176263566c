from __future__ import annotations

import pytest
import torch

from minimax_tools.checkpoint.reader import copy_matrix, is_transposed

NAN_AND_SIGNED_ZERO = (0x7FC1, 0xFFA5 - 0x10000, -0x8000, 0x0001)


def _bits(rows: int, columns: int) -> torch.Tensor:
    """BF16 values of any bits, NaN of any payload among them."""
    bits = torch.randint(-(2**15), 2**15, (rows, columns), dtype=torch.int16)
    bits.view(-1)[: len(NAN_AND_SIGNED_ZERO)] = torch.tensor(NAN_AND_SIGNED_ZERO, dtype=torch.int16)
    return bits.view(torch.bfloat16)


# Fewer rows than go at a time, one more, a prime number, and one column or row.
@pytest.mark.parametrize("shape", [(4, 4), (511, 64), (513, 96), (1031, 7), (1, 9), (9, 1)])
def test_transposed_copy_is_that_of_torch_bit_for_bit(shape: tuple[int, int]) -> None:
    source = _bits(*shape) if shape != (1, 9) else torch.arange(9, dtype=torch.bfloat16)[None]
    storage = torch.zeros(shape[1], 2 * shape[0], dtype=torch.bfloat16)
    copy_matrix(source, storage[:, shape[0] :].T)
    assert torch.equal(storage[:, shape[0] :].T.view(torch.int16), source.view(torch.int16))
    assert not storage[:, : shape[0]].any()


def test_rows_wider_than_the_buffer_are_copied_one_by_one() -> None:
    source = torch.arange(2 * 2_000_000, dtype=torch.int32).view(torch.float32).view(2, -1)
    out = torch.zeros(2_000_000, 2)
    copy_matrix(source, out.T)
    assert torch.equal(out.T.view(torch.int32), source.view(torch.int32))


def test_values_are_cast_as_torch_casts_them() -> None:
    source = torch.randn(600, 40)
    out = torch.empty(40, 600, dtype=torch.bfloat16)
    copy_matrix(source, out.T)
    assert torch.equal(out.T, source.bfloat16())


def test_what_is_not_transposed_is_copied_as_ever() -> None:
    source = torch.randn(3, 5)
    for out in (torch.empty(3, 5), torch.empty(3, 10)[:, ::2], torch.empty(6, 5)[::2]):
        assert not is_transposed(out)
        copy_matrix(source, out)
        assert torch.equal(out, source)


def test_other_shape_is_refused() -> None:
    with pytest.raises(RuntimeError):
        copy_matrix(torch.randn(4, 5), torch.empty(5, 3).T)


def test_a_view_with_contiguous_columns_is_transposed() -> None:
    matrix = torch.zeros(3, 4)
    assert is_transposed(matrix.T)
    assert not is_transposed(matrix)
    # One row or one column has no order of its own.
    assert not is_transposed(torch.zeros(4, 1))
    assert not is_transposed(torch.zeros(4, 1).T)


def test_two_columns_or_rows_are_enough_for_an_order() -> None:
    assert is_transposed(torch.zeros(2, 4).T)
    assert is_transposed(torch.zeros(3, 2).T)
    # The rows overlap.
    assert not is_transposed(torch.zeros(5).as_strided((2, 3), (1, 1)))
