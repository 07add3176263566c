"""Ends of chains, judged against the toy's golden: its own outputs, changed. The curve of a chained run."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import sign

from compare.chains.chain_judge import (
    PARTS,
    ChainJudge,
    ChainUnit,
    chain_limits,
    default_chain_length,
    measure_error,
    measure_unit,
)
from compare.chains.curve import trace_curve
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL, LONGEST_CHAIN
from compare.noise.rows import square_rows
from compare.sides.sides import Batch
from minimax_tools.capture.passes import ModelPasses
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics.noise_floor import ROUTER_MARGIN, massive_channels
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Chain
from minimax_tools.results.results import CurvePoint, SiteResult, SiteStatus, Verdict

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


def test_golden_itself_is_right_and_longer_chains_see_less(capture: Capture) -> None:
    chains = [judge(capture, span, capture.read(2, Site.OUTPUT)) for span in SPANS]
    for chain in chains:
        assert (chain.is_right, chain.reason) == (True, "")
        assert chain.excess < 1.0
    visible = [chain.visible for chain in chains]
    assert visible == sorted(visible)
    assert visible[0] < 0.01 < visible[-1]


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


@pytest.fixture
def without_floor(golden: Path, tmp_path: Path) -> Callable[[str], Capture]:
    """Copies the golden without its floor, and as one of another dtype."""

    def copy(dtype: str = "bfloat16") -> Capture:
        folder = tmp_path / dtype
        shutil.copytree(golden, folder)
        manifest = folder / "manifest.json"
        text = manifest.read_text().replace('"noise_floor": "full"', '"noise_floor": "off"')
        manifest.write_text(text.replace('"weights": "bfloat16"', f'"weights": "{dtype}"'))
        return Capture.open(folder)

    return copy


def test_golden_without_a_floor_judges_by_fixed_limits(
    capture: Capture, without_floor: Callable[..., Capture]
) -> None:
    output, other = capture.read(2, Site.OUTPUT), without_floor()
    assert other.description.noise_floor == "off"
    for span in SPANS:
        right = judge(other, span, output)
        assert right.is_right
        assert right.visible > judge(capture, span, output).visible
        assert not judge(other, span, with_noise(other, 3.0)).is_right
    # Float32 sees a thousand times less.
    float32 = judge(without_floor("float32"), Span(1, 3), output).visible
    assert 1000 < judge(other, Span(1, 3), output).visible / float32 < 10_000
    # Its unit is the usual error of a layer.
    assert unit_of(other, Span.single(2)).relative == pytest.approx(0.01)


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


def unit_of(capture: Capture, span: Span) -> ChainUnit:
    return measure_unit(capture, span, batch=Batch.of(capture, capture), layer_error=0.01)


def test_unit_of_a_chain_adds_the_floors_of_its_layers(capture: Capture) -> None:
    chain = unit_of(capture, Span(0, 3)).squares.whole
    layers = [unit_of(capture, Span.single(layer)).squares.whole for layer in range(3)]
    torch.testing.assert_close(chain, sum(layers, torch.zeros_like(chain)))


def test_output_without_massive_channels_has_no_error_there() -> None:
    output = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    norms = square_rows(output, massive=torch.zeros(64, dtype=torch.bool))
    unit = ChainUnit(squares=norms.times(1e-4), norms=norms)
    found = measure_error(output, 1.02 * output, unit)
    assert found.massive == 0.0
    assert found.median == pytest.approx(2.0, rel=1e-3)


class WholePort(Capture):
    """A run of a whole port."""

    def read_passes(self) -> ModelPasses | None:
        return ModelPasses(num_passes=1)


def test_curve_tells_where_the_error_begins_and_the_command_that_looks_there(
    capture: Capture, copyist: Any
) -> None:
    points = tuple(
        CurvePoint(layer=layer, error=0.1, handed_on=0.0, floor=0.01, ratio=9.0) for layer in range(4)
    )
    places = ((0, SiteStatus.PASS), (None, SiteStatus.FAIL), (2, SiteStatus.FAIL), (3, SiteStatus.FAIL))
    wrong = tuple(SiteResult(layer=layer, site="output", status=status) for layer, status in places)
    chained = Capture.open(copyist.device_run(run=full_run(4, sites_level="layer")))
    found = trace_curve(points, wrong, target=chained, golden=capture)
    assert found is not None
    assert (found.points, found.onset) == (points, 2)
    assert "single-layer --layer 2" in found.command
    # A run whose layers are right has no command, and a whole port is not run as a layer.
    whole = WholePort(chained.directory, chained.manifest)
    for results, target, onset in ((wrong[:2], chained, None), (wrong, whole, 2)):
        found = trace_curve(points, results, target=target, golden=capture)
        assert found is not None
        assert (found.onset, found.command) == (onset, "")
    isolated = copyist.device_run(run=sweep_run(Span(0, 4), sites_level="layer"), name="isolated")
    assert trace_curve(points, wrong, target=Capture.open(isolated), golden=capture) is None
