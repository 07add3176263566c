from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import capture, contents

from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.noise_floor import (
    ROUTER_MARGIN,
    ROUTER_NOISE,
    error_name,
    massive_channels,
    massive_error_name,
    ordinary_error_name,
    token_rows,
)
from minimax_tools.model.run import full_run, single_layer_run
from minimax_tools.model.sites import ModelSite, Site

JUDGED = tuple(site for site in Site if site not in (Site.INPUT, Site.ROUTER_EXPERTS))
MODEL_SITES = (ModelSite.FINAL_NORM, ModelSite.LOGITS)


@pytest.fixture(scope="module")
def full(golden: Path) -> Capture:
    return Capture.open(golden)


@pytest.fixture(scope="module")
def stats(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The golden with the distances alone of its floor."""
    return capture(ask(noise_floor="stats"), tmp_path_factory.mktemp("stats") / "full_model")


@pytest.fixture(scope="module")
def full_of_stats(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The golden of `stats`, its floor kept whole."""
    return capture(ask(noise_floor="full"), tmp_path_factory.mktemp("full") / "full_model")


@pytest.mark.parametrize("layer", range(4))
def test_full_floor_keeps_the_twin_of_every_computed_site(full: Capture, layer: int) -> None:
    for site in Site:
        twin, reference = full.read_twin(layer, site), full.read(layer, site)
        if site is Site.INPUT:
            assert twin is None
        else:
            assert twin is not None
            assert twin.dtype == (torch.int64 if site is Site.ROUTER_EXPERTS else torch.float32)
            assert twin.shape == reference.shape


@pytest.mark.parametrize("layer", range(4))
def test_floor_is_as_large_as_bfloat16_makes_it(full: Capture, layer: int) -> None:
    real = full.read_attention_mask().bool()
    for site in JUDGED:
        reference = token_rows(full.read(layer, site), site)[real].double()
        twin = full.read_twin(layer, site)
        assert twin is not None
        error = float((reference - token_rows(twin, site)[real]).norm() / reference.norm())
        assert 1e-5 < error < 2e-2, site


@pytest.mark.parametrize("layer", range(4))
def test_stored_norms_are_those_of_reference_minus_twin(full: Capture, layer: int) -> None:
    real = full.read_attention_mask().bool()
    for site in JUDGED:
        twin = full.read_twin(layer, site)
        assert twin is not None
        rows = token_rows(full.read(layer, site), site).double()
        error = rows - token_rows(twin, site).double()
        ordinary = ~massive_channels(rows[real])
        for name, norms in (
            (error_name(site), error.norm(dim=-1)),
            (ordinary_error_name(site), error[..., ordinary].norm(dim=-1)),
        ):
            stored = full.read_floor(layer, name)
            assert stored is not None
            torch.testing.assert_close(stored.double()[real], norms[real], rtol=1e-4, atol=1e-9)
            assert not stored[~real].any()


def test_statistics_are_the_same_whether_the_twin_is_kept_or_not(
    stats: Capture, full_of_stats: Capture
) -> None:
    names = [ROUTER_MARGIN, ROUTER_NOISE, *(error_name(site) for site in JUDGED)]
    for layer in range(4):
        for name in names:
            mine, theirs = stats.read_floor(layer, name), full_of_stats.read_floor(layer, name)
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs), name
    for site in MODEL_SITES:
        for name in (error_name(site), ordinary_error_name(site), massive_error_name(site)):
            mine, theirs = stats.read_floor(None, name), full_of_stats.read_floor(None, name)
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs), name


def test_model_sites_have_a_floor_too(full: Capture) -> None:
    real = full.read_attention_mask().bool()
    for site in MODEL_SITES:
        twin, stored = full.read_twin(None, site), full.read_floor(None, error_name(site))
        assert twin is not None
        assert stored is not None
        reference = full.read(None, site).double()
        torch.testing.assert_close(
            stored.double()[real], (reference - twin).norm(dim=-1)[real], rtol=1e-4, atol=1e-9
        )
        assert 1e-4 < float((reference - twin)[real].norm() / reference[real].norm()) < 1e-2
    assert full.read_twin(None, ModelSite.EMBEDDING) is None


def test_no_floor_is_kept_when_it_is_off(ask: Any, tmp_path: Path) -> None:
    made = capture(ask(noise_floor="off"), tmp_path / "capture")
    assert contents(made.directory).keys() == {
        "manifest.json",
        "inputs.safetensors",
        "model.safetensors",
        *(f"layer_{layer}.safetensors" for layer in range(4)),
    }
    assert made.read_floor(0, ROUTER_MARGIN) is None


def test_floor_of_few_sites_knows_the_routers_margin(ask: Any, tmp_path: Path) -> None:
    request = ask(noise_floor="full", run=single_layer_run(2, sites_level="layer"))
    made = capture(request, tmp_path / "capture")
    assert made.sites(2) == (Site.INPUT, Site.OUTPUT)
    assert made.read_floor(2, ROUTER_MARGIN) is not None
    assert made.read_twin(2, Site.OUTPUT) is not None
    assert made.read_twin(2, Site.ATTN_DELTA) is None


def test_floor_changes_no_captured_bit(
    stats: Capture, full_of_stats: Capture, ask: Any, tmp_path: Path
) -> None:
    plain = capture(ask(noise_floor="off", run=full_run(4, sites_level="all")), tmp_path / "capture")
    digests = [[entry.sha256 for entry in one.manifest.entries] for one in (plain, stats, full_of_stats)]
    assert digests[0] == digests[1] == digests[2]
