"""The head of a chained run is judged on the port's own last output: wrong heads are blamed, right ones are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights, HeadWeights
from compare.sides.port_head import PortHeadGolden, on_port_output
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.rounding import Float32Head
from minimax_tools.results.results import Comparison, Verdict
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

Judge = Callable[..., Comparison]
LAST = 3


@pytest.fixture(scope="module")
def weights(toy: Path, golden: Path) -> HeadWeights:
    with CheckpointWeights(model=str(toy)).open_head(Capture.open(golden)) as opened:
        return opened


@pytest.fixture
def run_with_head(copyist: Any, weights: HeadWeights) -> Callable[..., Path]:
    """A chained run whose last output is a little off the golden's, with a head of these weights behind it."""

    def run(
        *, norm: torch.Tensor = weights.norm, lm_head: torch.Tensor = weights.lm_head, name: str = "device"
    ) -> Path:
        output = copyist.source.read(LAST, Site.OUTPUT).float()
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        output = (output * (1 + 1e-3 * noise)).bfloat16()
        head = Float32Head(norm, lm_head, eps=weights.spec.rms_norm_eps)
        normed = (head.scale(output).bfloat16().float() * norm.float()).bfloat16()
        changes = {
            (LAST, Site.OUTPUT): lambda _: output,
            (None, ModelSite.FINAL_NORM): lambda _: normed,
            (None, ModelSite.LOGITS): lambda _: head.score(normed).bfloat16(),
        }
        device: Path = copyist.device_run(changes, run=full_run(LAST + 1, sites_level="all"), name=name)
        return device

    return run


def blamed(comparison: Comparison) -> list[tuple[int | None, tuple[str, ...]]]:
    return [(blame.layer, blame.sites) for blame in comparison.blame]


def test_right_head_passes(run_with_head: Callable[..., Path], judge: Judge, toy: Path) -> None:
    comparison = judge(run_with_head(), model=toy)
    assert (comparison.verdict, comparison.blame) == (Verdict.PASS, ())


def test_wrong_heads_are_blamed(run_with_head: Any, judge: Judge, toy: Path, weights: HeadWeights) -> None:
    for name, head, site in (
        ("rows", {"lm_head": weights.lm_head.roll(1, dims=0)}, "logits"),
        # A scale that the output of the layers hides.
        ("scale", {"lm_head": (weights.lm_head.float() * 1.02).bfloat16()}, "logits"),
        # The logits behind a wrong norm are right.
        ("norm", {"norm": 1 + weights.norm}, "final_norm"),
    ):
        assert blamed(judge(run_with_head(name=name, **head), model=toy)) == [(None, (site,))], name


def test_head_of_another_model_is_refused(run_with_head: Any, judge: Judge, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthesize(other, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=4_000_000, seed=1)
    with pytest.raises(IncomparableError, match="is not of the checkpoint"):
        judge(run_with_head(), model=other)


def test_computed_head_has_twin_and_floor(golden: Path, weights: HeadWeights) -> None:
    source = Capture.open(golden)
    found = PortHeadGolden(source, source, layer=LAST, weights=weights)
    real = source.read_inputs().attention_mask.bool()
    for site in (ModelSite.FINAL_NORM, ModelSite.LOGITS):
        computed, stored = (side.read(None, site)[real].float() for side in (found, source))
        assert float((computed - stored).norm() / stored.norm()) < 0.01
        twin = found.read_twin(None, site)
        assert twin is not None
        assert (twin.dtype, found.read(None, site).dtype) == (torch.float32, torch.bfloat16)
        for name in (f"{site}.error", f"random_1/{site}.error"):
            assert found.read_floor(None, name) is not None
    embedding = ModelSite.EMBEDDING
    assert torch.equal(found.read(None, embedding), source.read(None, embedding))
    assert found.read_floor(None, "embedding.error") is None
    assert found.model_sites() == source.model_sites()
    output = found.read(LAST, Site.OUTPUT)
    assert torch.equal(output[real], source.read(LAST, Site.OUTPUT)[real])
    assert not bool(output[~real].any())
    assert torch.equal(found.read(1, Site.OUTPUT), source.read(1, Site.OUTPUT))
    assert (found.description.noise_floor, found.description.floor_variants) == ("full", ("random_1",))


@pytest.mark.parametrize(
    ("change", "is_computed"),
    [
        (None, False),
        (lambda tensor: tensor * 2, True),
        (lambda tensor: tensor * torch.nan, False),
        (lambda tensor: tensor[..., :8], False),
    ],
)
def test_head_is_computed_from_an_output_that_differs_and_is_finite(
    golden: Path, toy: Path, copyist: Any, change: Any, is_computed: bool
) -> None:
    changes = {} if change is None else {(LAST, Site.OUTPUT): change}
    source, target = (
        Capture.open(path)
        for path in (golden, copyist.device_run(changes, run=full_run(LAST + 1, sites_level="layer")))
    )
    sides = Sides(
        reference=source,
        target=target,
        batch=Batch.of(source, target),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        weights=CheckpointWeights(model=str(toy)),
    )
    assert (on_port_output(sides, LAST) is not None) is is_computed
    assert on_port_output(replace(sides, weights=None), LAST) is None
