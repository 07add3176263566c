"""The benchmark of comparing, tried out at toy scale: its figures are there, whatever this machine makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_compare

from minimax_tools.metrics.pair_metrics import compare_tensors

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_compare.py"


@pytest.mark.slow
def test_it_gives_the_figures_that_it_is_named_for() -> None:
    words = [sys.executable, str(SCRIPT), "--scale", "toy", "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    names = {figure["figure"] for figure in found["figures"]}
    assert {"seed_over_ours", "share_of_memory_bandwidth", "peak_of_16_layers_over_2"} <= names


def test_both_sides_find_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(40, 4096, generator=generator)
    target = reference + 0.01 * torch.randn(40, 4096, generator=generator)
    seed = bench_compare.seed_figures(reference, target)
    ours = compare_tensors(reference, target, rtol=bench_compare.RTOL, atol=bench_compare.ATOL)
    assert seed["distance"][:2] == pytest.approx((ours.max_abs_diff, ours.mean_abs_diff), rel=1e-5)
    # The seeds' tolerance is relative to the target.
    assert seed["close"] == pytest.approx(ours.close_fraction, abs=1e-3)
    assert seed["cosine"] == pytest.approx(ours.cosine_similarity, abs=1e-5)
    assert seed["pearson"] == pytest.approx(ours.pearson_correlation, abs=1e-5)
    assert bench_compare.seed_medians(reference, target)[0] == pytest.approx(ours.median_abs_diff, rel=4e-3)
