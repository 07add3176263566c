"""Rows of a dump that are real tokens, as far as shapes, lengths and masks tell."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.dumps.assembly import batch_mask, choose_passes, lay_out
from minimax_tools.dumps.schedule import Padding, TokenRows
from minimax_tools.errors import CaptureError

LENGTHS = (3, 2)
# Two prompts of one channel, padded to 4: the real tokens are 1 to 5.
RIGHT = torch.tensor([[1, 2, 3, 9], [4, 5, 9, 9]])[..., None]
LEFT = torch.tensor([[9, 1, 2, 3], [9, 9, 4, 5]])[..., None]
MASK = LEFT[..., 0] != 9
PACKED = torch.arange(1, 6)[:, None]


def taken(
    tensor: torch.Tensor,
    lengths: tuple[int, ...] = LENGTHS,
    *,
    side: str = "right",
    is_packed: bool | None = None,
    mask: torch.Tensor | None = None,
) -> list[int]:
    padding = Padding(side=side, is_packed=is_packed, masks={} if mask is None else {"0": mask})
    rows = TokenRows.divide(lengths, ({"0": 1},), padding)
    numbers: list[int] = tensor.flatten()[rows.find("0", tuple(tensor.shape[:-1]), what="output")].tolist()
    return numbers


@pytest.mark.parametrize(
    ("tensor", "how"),
    [
        (RIGHT, {}),
        (LEFT, {"side": "left"}),
        (LEFT, {"mask": MASK}),
        (RIGHT.flatten(0, 1), {"is_packed": False}),
        (PACKED, {}),
        (PACKED[None], {}),
        (torch.tensor([1, 2, 3, 4, 5, 9, 9])[:, None], {"is_packed": True}),
        (torch.tensor([1, 2, 3, 4, 5, 9, 9])[None, :, None], {"is_packed": True}),
        (torch.tensor([9, 9, 1, 2, 3, 4, 5])[:, None], {"is_packed": True, "side": "left"}),
    ],
)
def test_real_tokens_are_taken(tensor: torch.Tensor, how: dict[str, object]) -> None:
    assert taken(tensor, **how) == [1, 2, 3, 4, 5]  # type: ignore[arg-type]


def test_mask_counts_for_flat_rows_too_and_may_have_holes() -> None:
    mask = torch.tensor([[False, False, True, False, True]])
    values = torch.arange(5)[:, None]
    assert taken(values, (2,), mask=mask) == taken(values[None], (2,), mask=mask) == [2, 4]


@pytest.mark.parametrize(
    ("tensor", "how", "said"),
    [
        (RIGHT.flatten(0, 1), {}, r"nothing tells which rows are real.*found rows \[8\].*rows \(padded"),
        (RIGHT[:, :2], {}, "holds fewer rows than the prompts have tokens"),
        (PACKED[:2], {"is_packed": True}, "holds fewer rows than the prompts have tokens"),
        (RIGHT[:, :3], {"mask": MASK}, "is of another batch than the attention mask"),
    ],
)
def test_rows_that_are_not_told_are_refused(tensor: torch.Tensor, how: dict[str, object], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        taken(tensor, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lengths", "counts", "parts"),
    [
        ((3, 2), (9, 2, 2), [(1, 1, 1), (0, 1, 1)]),
        # Chunks of a prompt; padded to a bucket, they are a prefill and two decoded tokens.
        ((7,), (4, 2, 1), [(4, 2, 1)]),
        ((7,), (8, 1, 1), [(5, 1, 1)]),
    ],
)
def test_prompts_are_divided_among_passes_that_follow(
    lengths: tuple[int, ...], counts: tuple[int, ...], parts: list[tuple[int, ...]]
) -> None:
    group = {str(step): count for step, count in enumerate(counts)}
    rows = TokenRows.divide(lengths, (group,), Padding(side="right", is_packed=None))
    assert [tuple(one.length for one in of_prompt) for of_prompt in rows.stretches] == parts
    assert [of_prompt[-1].stop for of_prompt in rows.stretches] == list(lengths)


def test_more_decoded_tokens_than_a_prompt_has_are_refused() -> None:
    with pytest.raises(CaptureError, match="decode more tokens than a prompt has"):
        TokenRows.divide((3, 1), ({"0": 8, "1": 2, "2": 2},), Padding(side="right", is_packed=None))


def test_tokens_are_laid_out_with_zeros_on_padding() -> None:
    batch = lay_out(torch.arange(1, 6)[:, None], batch_mask(LENGTHS))
    assert batch[..., 0].tolist() == [[1, 2, 3], [4, 5, 0]]


@pytest.mark.parametrize(
    ("counts", "lengths", "chosen"),
    [
        ((32, 32, 32), (96,), (("0", "1", "2"),)),
        ((88, *[1] * 8), (96,), (tuple(map(str, range(9))),)),
        ((141, *[2] * 8), (96, 61), (tuple(map(str, range(9))),)),
        ((4, 96), (96,), (("1",),)),
        ((96, 61), (96, 61), (("0",), ("1",))),
        ((61, 96), (96, 61), (("1",), ("0",))),
        ((48, 48, 40, 21), (96, 61), (("0", "1"), ("2", "3"))),
        # Decoded rows of prompts that were prefilled apart are in no group of one prompt.
        ((92, 57, 2, 2, 2, 2), (96, 61), None),
        ((40, 50), (96,), None),
    ],
)
def test_passes_that_have_the_prompts_tokens_are_chosen(
    counts: tuple[int, ...], lengths: tuple[int, ...], chosen: tuple[tuple[str, ...], ...] | None
) -> None:
    assert choose_passes({str(step): count for step, count in enumerate(counts)}, lengths) == chosen
