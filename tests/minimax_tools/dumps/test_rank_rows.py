"""Tokens of the rows that ranks and data-parallel replicas hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.found_sites import RankRows
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.model.sites import Site

T, H = 8, 4


def record(*, replica: tuple[int, int] = (0, 1)) -> PassRecord:
    return PassRecord(step="0", requests=("a",), positions=tuple(range(T)), replica=replica)


@pytest.mark.parametrize(
    ("shape", "num_ranks", "is_divided"),
    [
        ((T, H), 2, False),
        ((T // 2, H), 2, True),
        ((1, T // 2, H), 2, True),
        ((T // 2, 3, H), 2, True),
        ((T // 2, H), 1, False),
        ((T // 2 - 1, H), 2, False),
    ],
)
def test_rows_times_ranks_tell_divided_tokens(
    shape: tuple[int, ...], num_ranks: int, is_divided: bool
) -> None:
    assert RankRows.of(shape, record(), num_ranks=num_ranks).are_divided is is_divided


@pytest.mark.parametrize("is_batch", [False, True])
def test_own_rows_are_cut_out_of_all_replicas(is_batch: bool) -> None:
    tokens = torch.arange(3 * T * H).reshape(3 * T, H)
    tensor = tokens[None] if is_batch else tokens
    rows = RankRows.of(tuple(tensor.shape), record(replica=(1, 3)), num_ranks=1)
    assert torch.equal(rows.take(tensor).reshape(T, H), tokens[T : 2 * T])
    # Another number of rows than all replicas have tells nothing.
    assert RankRows.of((2 * T, H), record(replica=(1, 3)), num_ranks=1) == RankRows()


@pytest.mark.parametrize("is_batch", [False, True])
def test_divided_rows_are_joined_in_the_order_of_ranks(is_batch: bool, tmp_path: Path) -> None:
    tokens = torch.randn(T, H)
    folder = tmp_path / "dp0" / f"prefill_s{T}_0"
    (folder / "model.layers.0.mlp").mkdir(parents=True)
    for rank, part in enumerate(tokens.chunk(4)):
        held = part[None] if is_batch else part
        torch.save(held.clone(), folder / "model.layers.0.mlp" / f"rank{rank}.pt")
    (folder / f"{folder.name}_meta.json").write_text(
        json.dumps({"req_ids": ["0"], "positions": list(range(T))})
    )
    assert torch.equal(DumpCapture.open(tmp_path, NameMap()).read(0, Site.MOE_DELTA)[0], tokens)
