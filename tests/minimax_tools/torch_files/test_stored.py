from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from minimax_tools.torch_files.stored import Storage, StoredTensor


def stored(
    shape: tuple[int, ...], stride: tuple[int, ...], *, start: int = 0, num_elements: int = 24
) -> StoredTensor:
    storage = Storage(key="0", dtype=torch.float32, offset=1000, size_bytes=4 * num_elements, crc32=7)
    return StoredTensor(storage=storage, dtype=torch.float32, shape=shape, stride=stride, start=start)


@pytest.mark.parametrize(
    ("shape", "stride", "start"),
    [((4, 6), (6, 1), 0), ((6, 4), (1, 6), 0), ((2, 2), (12, 2), 3), ((), (), 23), ((1, 3), (99, 1), 21)],
)
def test_view_is_what_torch_makes_of_shape_and_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], start: int
) -> None:
    elements = torch.arange(24.0)
    tensor = stored(shape, stride, start=start)
    extent = elements.view(torch.uint8).narrow(0, tensor.offset - 1000, tensor.extent_bytes)
    expected = elements.as_strided(shape, stride, start)
    assert torch.equal(tensor.view(extent), expected)
    assert tensor.is_verbatim == expected.is_contiguous()


def test_narrow_is_torchs_narrow() -> None:
    elements = torch.arange(24.0)
    part = stored((6, 4), (1, 6)).narrow(1, 1, 2)
    extent = elements.view(torch.uint8).narrow(0, part.offset - 1000, part.extent_bytes)
    assert torch.equal(part.view(extent), elements.as_strided((6, 4), (1, 6)).narrow(1, 1, 2))


def test_expanded_tensor_repeats_its_elements() -> None:
    tensor = stored((8, 24), (0, 1))
    assert tensor.repeats_elements
    assert not tensor.is_verbatim
    assert tensor.extent_bytes == 96


def test_empty_tensor_spans_nothing() -> None:
    tensor = stored((3, 0), (1, 1), start=24)
    assert (tensor.extent, tensor.is_verbatim, tensor.repeats_elements) == (0, True, False)


@pytest.mark.parametrize(
    ("shape", "stride", "start"),
    [
        ((25,), (1,), 0),
        ((24,), (1,), 1),
        ((2,), (24,), 0),
        ((2,), (1,), -1),
        ((-1,), (1,), 0),
        ((2,), (-1,), 1),
        ((2, 2), (1,), 0),
        ((2**40, 2**40), (0, 0), 0),
    ],
)
def test_tensor_that_its_storage_cannot_hold_is_refused(
    shape: tuple[int, ...], stride: tuple[int, ...], start: int
) -> None:
    with pytest.raises(ValueError, match="shape"):
        stored(shape, stride, start=start)


def test_window_of_a_storage_has_its_own_bytes_and_no_checksum() -> None:
    window = stored((), ()).storage.narrow((4, 8))
    assert (window.offset, window.size_bytes, window.crc32) == (1016, 32, None)


@pytest.mark.parametrize("window", [(-1, 2), (0, 25), (24, 1), (0, -1)])
def test_window_outside_its_storage_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="storage 0 reaches outside it"):
        stored((), ()).storage.narrow(window)


def test_cast_and_bits_are_kept_until_the_values_are_read() -> None:
    tensor = replace(stored((2,), (1,)), is_negative=True, cast=torch.bfloat16)
    assert (tensor.given_dtype, tensor.dtype, tensor.is_verbatim) == (torch.bfloat16, torch.float32, False)
    content = torch.tensor([1.0, math.pi]).view(torch.uint8)
    assert torch.equal(tensor.view(content), torch.tensor([-1.0, -math.pi]).bfloat16())
