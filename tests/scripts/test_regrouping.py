"""The figures of regrouping, with few experts: they are measured, and what is measured is right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.filling import ReadingPool

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from device.regrouping import Experts

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_device.py"


@pytest.fixture
def pool() -> Iterator[ReadingPool]:
    with ReadingPool(1) as pool:
        yield pool


def test_both_layouts_hold_every_matrix_where_it_belongs(pool: ReadingPool) -> None:
    experts = Experts.draw(2)
    inner, hidden = experts.intermediate_size, experts.hidden_size
    storage = torch.zeros_like(experts.flat)
    bits = storage.view(torch.int16)
    matrices = {name: matrix.view(torch.int16) for name, matrix in experts.matrices.items()}
    up, down = "block_sparse_moe.experts.1.w3.weight", "block_sparse_moe.experts.1.w2.weight"
    experts.group(storage, pool)
    assert torch.equal(bits[: 4 * inner * hidden].view(2, 2 * inner, hidden)[1, inner:], matrices[up])
    assert torch.equal(bits[4 * inner * hidden :].view(2, hidden, inner)[1], matrices[down])
    experts.group_transposed(storage, pool)
    assert torch.equal(bits[: 4 * inner * hidden].view(2, hidden, 2 * inner)[1, :, inner:], matrices[up].T)
    assert torch.equal(bits[4 * inner * hidden :].view(2, inner, hidden)[1], matrices[down].T)


@pytest.mark.slow
def test_figures_are_named_and_have_their_goals() -> None:
    # A process of its own: memory that other tests gave back would hide what this takes.
    words = [sys.executable, str(SCRIPT), "--only", "regrouping", "--scale", "toy", "--json"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    figures = {figure["figure"]: figure for figure in json.loads(result.stdout)["figures"]}
    assert {name: figure["goal"] for name, figure in figures.items()} == {
        "regroup_peak_over_output": "<= 1.02",
        "regroup_over_memcpy": "<= 1.5",
        "regroup_transposed_over_memcpy": "<= 4",
    }
    assert figures["regroup_peak_over_output"]["value"] >= 0.9
