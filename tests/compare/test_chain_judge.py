"""Ends of chains, judged against the toy's golden: its own outputs, changed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from compare.chain_judge import ChainJudge
from compare.chain_limits import LONGEST_CHAIN, chain_limits, default_chain_length
from compare.chain_noise import PARTS
from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.judge import Criteria
from minimax_tools.capture.reader import Capture
from minimax_tools.probes import Chain
from minimax_tools.sites import Site
from minimax_tools.span import Span

CRITERIA = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
SPANS = [Span(2, 3), Span(1, 3), Span(0, 3)]


@pytest.fixture
def capture(golden: Path) -> Capture:
    return Capture.open(golden)


def judge(capture: Capture, span: Span, output: torch.Tensor) -> Chain:
    return ChainJudge(capture, criteria=CRITERIA).judge(span, output)


def with_error(capture: Capture, size: float) -> torch.Tensor:
    """Layer 2's output with an error of that size on every token, relative to its ordinary channels."""
    output = capture.read(2, Site.OUTPUT).float()
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    typical = output.square().flatten(0, 1).mean(0).median().sqrt()
    return (output + size * typical * noise).bfloat16()


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_golden_itself_is_right(capture: Capture, span: Span) -> None:
    chain = judge(capture, span, capture.read(2, Site.OUTPUT))
    assert (chain.is_right, chain.reason) == (True, "")
    assert chain.excess <= 0.5


@pytest.mark.parametrize("span", SPANS, ids=str)
def test_error_is_right_well_below_what_is_visible_and_wrong_well_above(capture: Capture, span: Span) -> None:
    visible = judge(capture, span, capture.read(2, Site.OUTPUT)).visible
    assert judge(capture, span, with_error(capture, 0.4 * visible)).is_right
    # Above the limit of one part: of all tokens at once, the lower quartile's.
    wrong = judge(capture, span, with_error(capture, 1.6 * visible))
    assert not wrong.is_right
    assert wrong.excess > 1
    assert "limit" in wrong.reason


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
    assert "1 NaN or Inf on real rows" in wrong.reason


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
        assert not judge(capture, span, with_error(capture, 3.0)).is_right


def test_limits_grow_with_the_chain_in_bfloat16_alone() -> None:
    for part in PARTS:
        limits = [
            getattr(chain_limits(length, torch.bfloat16), part) for length in range(1, LONGEST_CHAIN + 1)
        ]
        assert limits == sorted(limits)
    assert chain_limits(8, torch.float32) == chain_limits(1, torch.float32)
    assert default_chain_length(torch.float32) > default_chain_length(torch.bfloat16) > 1
