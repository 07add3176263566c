"""Pieces of a site put together as its layout says, and what does not fit told by name."""

from __future__ import annotations

import pytest
import torch

from minimax_tools.errors import TargetError
from minimax_tools.model.site_layouts import Partial, Replicated, Sharded, parse_layout

WHOLE = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
WHAT = "port port.py:Port, layer 5, q_proj"


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("replicate", Replicated()),
        ("partial", Partial()),
        ("shard(2)", Sharded(dim=2)),
        ("shard(-1)", Sharded(dim=-1)),
        ("shard(2; 0,1,-)", Sharded(dim=2, blocks=(0, 1, None))),
        ("shard(1;0, 0 ,1,1)", Sharded(dim=1, blocks=(0, 0, 1, 1))),
    ],
)
def test_every_form_is_read_and_written(text: str, layout: object) -> None:
    assert parse_layout(text) == layout
    assert parse_layout(str(layout).removeprefix("@")) == layout


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *((text, "cannot be read: expected '@replicate'") for text in ("", "shard", "shard()", "shard(x)")),
        *((text, "cannot be read") for text in ("shard(1; 0,,1)", "replicated", "partial(1)")),
        # Blocks that leave something out.
        *((f"shard(1; {blocks})", "do not make up a tensor") for blocks in ("0,2", "1,2", "-,-", "-1")),
    ],
)
def test_other_forms_are_refused(text: str, fault: str) -> None:
    with pytest.raises(TargetError, match=fault):
        parse_layout(text)


@pytest.mark.parametrize("text", ["shard(2)", "shard(-1)", "shard(2; 2,3,0,1)", "shard(2; 0,1,2,3)"])
def test_what_is_cut_is_put_together_again(text: str) -> None:
    layout = parse_layout(text)
    pieces = [layout.cut(WHOLE, rank=rank, num_ranks=2, what=WHAT) for rank in range(2)]
    assert [list(piece.shape) for piece in pieces] == [[2, 3, 2]] * 2
    assert torch.equal(layout.assemble(pieces, what=WHAT), WHOLE)


def test_padding_is_left_out_and_fed_zeros() -> None:
    layout = parse_layout("shard(1; 0,1,2,-)")
    pieces = [layout.cut(WHOLE, rank=rank, num_ranks=2, what=WHAT) for rank in range(2)]
    assert torch.equal(pieces[1][:, 1], torch.zeros(2, 4))
    pieces[1][:, 1] = 7.0
    assert torch.equal(layout.assemble(pieces, what=WHAT), WHOLE)


def test_a_sum_is_rounded_once() -> None:
    pieces = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert torch.equal(Partial().assemble(pieces, what=WHAT), torch.full((2,), 258.0, dtype=torch.bfloat16))


def test_replicas_that_differ_are_named() -> None:
    other = WHOLE.clone()
    other[1, 2, 3] += 0.5
    with pytest.raises(TargetError) as raised:
        Replicated().assemble([WHOLE, WHOLE, other], what=WHAT)
    text = str(raised.value)
    assert "layer 5, q_proj is not the same on all ranks: expected what rank 0 has" in text
    assert "other values on rank 2, the largest difference 0.5." in text
    assert "a reduction is missing, or the site is @partial" in text


def test_replicas_are_compared_bit_for_bit() -> None:
    zero = torch.zeros(2)
    with pytest.raises(TargetError, match="not the same on all ranks"):
        Replicated().assemble([zero, -zero], what=WHAT)
    nan = torch.full((2,), torch.nan)
    assert Replicated().assemble([nan, nan.clone()], what=WHAT) is nan


@pytest.mark.parametrize(
    ("text", "pieces", "said"),
    [
        ("shard(0; 0,0)", [WHOLE, WHOLE + 1.0], "q_proj, block 0 is not the same on all ranks"),
        # Copies on one rank.
        (
            "shard(0; 0,0,1,1)",
            [torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0])],
            "q_proj, block 1 is not the same .* on rank 1, the largest difference 1",
        ),
    ],
)
def test_copies_that_differ_are_named(text: str, pieces: list[torch.Tensor], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        parse_layout(text).assemble(pieces, what=WHAT)


def test_pieces_of_other_shapes_are_named() -> None:
    with pytest.raises(TargetError, match=r"another shape or dtype on rank 1 .*\[2, 3, 4\].*\[2, 3, 2\]"):
        Sharded(dim=2).assemble([WHOLE, WHOLE[..., :2]], what=WHAT)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("shard(3)", "has no such dim: expected a dim from -3 to 2"),
        ("shard(2; 0,1,2)", "do not divide among the ranks: expected as many on each of 2 ranks"),
        ("shard(1; 0,1,2,3)", "does not divide into the blocks"),
    ],
)
def test_a_layout_that_does_not_fit_its_pieces_is_refused(text: str, fault: str) -> None:
    with pytest.raises(TargetError, match=fault):
        parse_layout(text).assemble([WHOLE, WHOLE], what=WHAT)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [(Sharded(dim=1), "ranks: expected a multiple of 2 along"), (Partial(), "ranks: it is @partial")],
    ids=["odd", "sum"],
)
def test_what_cannot_be_cut_is_not_fed(layout: Sharded | Partial, fault: str) -> None:
    with pytest.raises(TargetError, match=f"layer 5, q_proj cannot be fed on several {fault}"):
        layout.cut(WHOLE, rank=0, num_ranks=2, what=WHAT)


@pytest.mark.parametrize("piece", [torch.ones(2, 3), torch.tensor([[1, 2]])], ids=["whole", "integer"])
def test_what_all_ranks_have_is_no_part_of_a_sum(piece: torch.Tensor) -> None:
    with pytest.raises(TargetError, match=r"no sum that each rank has a part of.*It is @replicate"):
        Partial().assemble([piece, piece.clone()], what="layer 0, attn_delta")


def test_parts_that_are_zero_on_all_ranks_are_a_sum() -> None:
    pieces = [torch.zeros(2, 3), torch.zeros(2, 3)]
    assert torch.equal(Partial().assemble(pieces, what="layer 0, attn_delta"), pieces[0])
