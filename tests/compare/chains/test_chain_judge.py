"""Ends of chains, judged against the toy's golden: its own outputs, changed."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import sign

from compare.chains.chain_judge import PARTS, ChainJudge, chain_limits, default_chain_length
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL, LONGEST_CHAIN
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics.noise_floor import ROUTER_MARGIN, massive_channels
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain
from minimax_tools.results.results import SiteStatus, Verdict

CRITERIA = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
SPANS = [Span(2, 3), Span(1, 3), Span(0, 3)]


@pytest.fixture
def capture(golden: Path) -> Capture:
    return Capture.open(golden)


def judge(capture: Capture, span: Span, output: torch.Tensor) -> Chain:
    return ChainJudge(capture, criteria=CRITERIA).judge(span, output)


def with_noise(capture: Capture, size: float, *, site: Site = Site.OUTPUT, seed: int = 0) -> torch.Tensor:
    """A site of layer 2 with noise of that size on every token, relative to the output's ordinary channels."""
    output = capture.read(2, Site.OUTPUT).float()
    massive = massive_channels(output[capture.read_attention_mask().bool()])
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(massive, 0.0)
    norms = output.masked_fill(massive, 0.0).norm(dim=-1, keepdim=True)
    noisy = capture.read(2, site).float() + size * norms * noise / noise.norm(dim=-1, keepdim=True)
    return noisy.to(capture.read(2, site).dtype)


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_golden_itself_is_right(capture: Capture, span: Span) -> None:
    chain = judge(capture, span, capture.read(2, Site.OUTPUT))
    assert (chain.is_right, chain.reason) == (True, "")
    assert chain.excess < 1.0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("floor", ["full", "stats"])
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_noise_is_seen_from_the_size_that_is_stated(
    capture: Capture, copyist: Any, span: Span, floor: str, seed: int
) -> None:
    kept = Capture.open(copyist.golden(noise_floor=floor))
    visible = judge(kept, span, kept.read(2, Site.OUTPUT)).visible
    found = judge(kept, span, with_noise(kept, 1.1 * visible, seed=seed))
    assert (found.is_right, found.excess > 1) == (False, True)
    assert "limit" in found.reason
    assert found.visible == visible, "what is seen hangs on the golden alone"
    # The figure is no coarser than it need be: here the golden's own error adds to the noise.
    assert judge(kept, span, with_noise(kept, 0.3 * visible, seed=seed)).is_right


def test_sweep_sees_noise_in_what_experts_add_from_the_size_that_is_stated(
    capture: Capture, copyist: Any, judge: Any
) -> None:
    chains = ChainJudge(capture, criteria=CRITERIA)
    visible = chains.sweep_visible(Span.single(2))
    assert visible is not None
    for size, verdict in ((1.1, Verdict.FAIL), (0.5, Verdict.PASS)):
        noisy = with_noise(capture, size * visible, site=Site.MOE_DELTA)
        run = copyist.device_run({(2, Site.MOE_DELTA): lambda _, noisy=noisy: noisy}, name=str(verdict))
        compared = judge(run)
        statuses = {site.status for site in compared.sites if (site.layer, site.site) == (2, "moe_delta")}
        assert (statuses == {SiteStatus.FAIL}) is (verdict is Verdict.FAIL)


def test_layer_whose_tokens_are_all_set_aside_is_not_called_right(
    capture: Capture, golden: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(golden, folder)
    path = folder / "layer_2.floor.safetensors"
    floor = load_file(path)
    save_file({**floor, ROUTER_MARGIN: torch.zeros_like(floor[ROUTER_MARGIN])}, path)
    sign(folder)
    with pytest.raises(
        IncomparableError, match="layer 2 cannot be judged: no token is left.*found not judged"
    ):
        judge(Capture.open(folder), Span.single(2), capture.read(2, Site.OUTPUT))


def test_longer_chains_see_less(capture: Capture) -> None:
    visible = [judge(capture, span, capture.read(2, Site.OUTPUT)).visible for span in SPANS]
    assert visible == sorted(visible)
    assert visible[0] < 0.01 < visible[-1]


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_nan_on_a_real_row_is_wrong_and_in_padding_is_nobodys_business(capture: Capture, span: Span) -> None:
    output = capture.read(2, Site.OUTPUT).clone()
    assert int(capture.read_attention_mask()[1, -1]) == 0
    output[1, -1] = math.nan
    assert judge(capture, span, output).is_right
    output[0, 3, 5] = math.nan
    wrong = judge(capture, span, output)
    assert (wrong.is_right, wrong.excess) == (False, math.inf)
    assert "1 NaN or Inf on real tokens" in wrong.reason


def test_wrong_massive_channel_is_seen(capture: Capture) -> None:
    output = capture.read(2, Site.OUTPUT).clone()
    massive = int(output.float().abs().mean((0, 1)).argmax())
    output[..., massive] *= 0.8
    wrong = judge(capture, Span(1, 3), output)
    assert not wrong.is_right
    assert "of the massive channels" in wrong.reason


def test_golden_without_a_floor_judges_by_fixed_limits(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(golden, folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"noise_floor": "full"', '"noise_floor": "off"'))
    capture = Capture.open(folder)
    assert capture.description.noise_floor == "off"
    for span in SPANS:
        right = judge(capture, span, capture.read(2, Site.OUTPUT))
        assert right.is_right
        assert right.visible > judge(Capture.open(golden), span, capture.read(2, Site.OUTPUT)).visible
        assert not judge(capture, span, with_noise(capture, 3.0)).is_right


def test_float32_golden_without_a_floor_sees_a_thousand_times_less(golden: Path, tmp_path: Path) -> None:
    visible = []
    for dtype in ("bfloat16", "float32"):
        folder = tmp_path / dtype
        shutil.copytree(golden, folder)
        manifest = folder / "manifest.json"
        text = manifest.read_text().replace('"noise_floor": "full"', '"noise_floor": "off"')
        manifest.write_text(text.replace('"weights": "bfloat16"', f'"weights": "{dtype}"'))
        capture = Capture.open(folder)
        visible.append(judge(capture, Span(1, 3), capture.read(2, Site.OUTPUT)).visible)
    assert 1000 < visible[0] / visible[1] < 10_000


def test_limits_are_twice_what_right_ports_were_measured_to_reach() -> None:
    """The table of `scripts/bench_chained_ends.py`: who widens a limit measures again."""
    measured = (
        (0.640, 0.726, 0.833, 1.01, 0.714),
        (0.938, 2.39, 8.64, 23.0, 2.07),
        (3.73, 12.2, 23.0, 31.7, 4.11),
        (12.8, 24.4, 38.2, 53.6, 4.11),
        (27.8, 39.4, 53.8, 71.1, 4.11),
        (33.2, 44.9, 60.1, 83.4, 4.40),
        (38.5, 51.1, 74.7, 93.5, 7.33),
        (42.9, 58.8, 82.5, 97.7, 9.09),
    )
    assert len(measured) == LONGEST_CHAIN
    for length, errors in enumerate(measured, start=1):
        limits = chain_limits(length, torch.bfloat16)
        assert [getattr(limits, part) for part in PARTS] == [2 * error for error in errors]


def test_limits_do_not_widen_in_float32() -> None:
    assert chain_limits(8, torch.float32) == chain_limits(1, torch.float32) == chain_limits(1, torch.bfloat16)
    assert (default_chain_length(torch.float32), default_chain_length(torch.bfloat16)) == (8, 2)
