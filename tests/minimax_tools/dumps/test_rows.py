from __future__ import annotations

import pytest
import torch

from minimax_tools.dumps.assembly import TokenRows, batch_mask, choose_passes, join_passes, lay_out
from minimax_tools.errors import CaptureError

LENGTHS = (3, 2)
# Two prompts of one channel, padded to 4: the real tokens are 1 to 5.
RIGHT = torch.tensor([[1, 2, 3, 9], [4, 5, 9, 9]])[..., None]
LEFT = torch.tensor([[9, 1, 2, 3], [9, 9, 4, 5]])[..., None]


def rows(
    *, padding: str = "right", is_packed: bool | None = None, mask: torch.Tensor | None = None
) -> TokenRows:
    return TokenRows(lengths=LENGTHS, padding=padding, is_packed=is_packed, mask=mask)


@pytest.mark.parametrize(
    ("tensor", "how"),
    [
        (RIGHT, rows()),
        (LEFT, rows(padding="left")),
        (LEFT, rows(mask=LEFT[..., 0] != 9)),
        (RIGHT.flatten(0, 1), rows(is_packed=False)),
        (torch.arange(1, 6)[:, None], rows()),
        (torch.arange(1, 6)[None, :, None], rows()),
        (torch.tensor([1, 2, 3, 4, 5, 9, 9])[:, None], rows(is_packed=True)),
        (torch.tensor([1, 2, 3, 4, 5, 9, 9])[None, :, None], rows(is_packed=True)),
        (torch.tensor([9, 9, 1, 2, 3, 4, 5])[:, None], rows(is_packed=True, padding="left")),
    ],
)
def test_real_tokens_are_taken(tensor: torch.Tensor, how: TokenRows) -> None:
    assert how.take(tensor, what="output").flatten().tolist() == [1, 2, 3, 4, 5]


def test_flat_rows_of_several_prompts_must_be_declared() -> None:
    with pytest.raises(
        CaptureError, match=r"nothing tells which rows are real.*found \[8, 1\].*rows \(padded"
    ):
        rows().take(RIGHT.flatten(0, 1), what="output")


def test_mask_counts_for_flat_rows_too() -> None:
    mask = torch.tensor([[False, False, True, True, True]])
    rows = TokenRows(lengths=(3,), padding="right", is_packed=None, mask=mask)
    values = torch.arange(5.0)[:, None]
    assert rows.take(values, what="router_logits")[:, 0].tolist() == [2, 3, 4]
    assert rows.take(values[None], what="output")[:, 0].tolist() == [2, 3, 4]


@pytest.mark.parametrize("tensor", [RIGHT[:, :2], RIGHT[0][:, None][:2, 0]])
def test_too_few_rows_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="holds fewer rows than the prompts have tokens"):
        rows(is_packed=True).take(tensor, what="output")


def test_other_batch_than_the_masks_is_refused() -> None:
    with pytest.raises(CaptureError, match="is of another batch than the attention mask"):
        rows(mask=LEFT[..., 0] != 9).take(RIGHT[:, :3], what="output")


def test_decoded_rows_come_behind_their_prompt() -> None:
    all_rows = rows()
    assert [rows.lengths for rows in all_rows.in_passes((9, 2, 2))] == [(1, 0), (1, 1), (1, 1)]
    prefill, decoded = torch.tensor([1, 2, 4])[:, None], torch.tensor([3, 5])[:, None]
    assert join_passes([prefill, decoded], [(2, 1), (1, 1)]).flatten().tolist() == [1, 2, 3, 4, 5]


def test_tokens_are_laid_out_with_zeros_on_padding() -> None:
    batch = lay_out(torch.arange(1, 6)[:, None], batch_mask(LENGTHS))
    assert batch[..., 0].tolist() == [[1, 2, 3], [4, 5, 0]]


def test_passes_that_make_up_a_prompt_are_its_chunks() -> None:
    rows = TokenRows(lengths=(7,), padding="right", is_packed=None)
    assert [one.lengths for one in rows.in_passes((4, 2, 1))] == [(4,), (2,), (1,)]
    # Padded to a bucket, they are a prefill and two decoded tokens.
    assert [one.lengths for one in rows.in_passes((8, 1, 1))] == [(5,), (1,), (1,)]


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
