"""The search outside the layers: which mistakes are named, which are only near, and on which tokens they are judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from compare.catalogue.candidates import values_of
from compare.catalogue.outside import ModelInputs, ModelMistake
from compare.diagnosis.finding import SiteDiagnosis
from compare.diagnosis.outside import ModelCases, SiteCase, SiteNoise, search_site
from compare.sides.golden_weights import CheckpointWeights
from compare.sides.sides import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite, Site

SITE = ModelSite.FINAL_NORM
CORRECT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
NOISE = SiteNoise(variance=torch.full((4,), 1e-4), size=torch.ones(4))

Open = Callable[..., SiteCase | str]


def case(port: torch.Tensor, correct: torch.Tensor = CORRECT, **parts: Any) -> SiteCase:
    inputs = cast("ModelInputs", None)  # these mistakes read none
    return SiteCase(
        **{"site": SITE, "inputs": inputs, "port": port, "correct": correct, "noise": NOISE, **parts}
    )


def scaling(name: str, *factors: float, **parts: Any) -> ModelMistake:
    return ModelMistake(
        **{
            "name": name,
            "site": SITE,
            "predict": lambda _, correct, factor: correct * factor,
            "candidates": values_of("factor", *factors),
            **parts,
        }
    )


def search(port: torch.Tensor, *mistakes: ModelMistake, correct: torch.Tensor = CORRECT) -> SiteDiagnosis:
    return search_site(case(port, correct), mistakes, is_blamed=True)


def test_nothing_is_tried_on_a_right_site() -> None:
    found = search(CORRECT + 0.01, scaling("double", 2.0))
    assert found.unexplained == pytest.approx(1.0, abs=0.1)
    assert (found.named, found.num_hypotheses, found.is_right) == ((), 0, True)


def test_mistake_that_explains_the_error_is_named() -> None:
    found = search(2 * CORRECT, scaling("triple", 3.0), scaling("double", 1.5, 2.0, 2.5))
    (named,) = found.named
    assert (named.mistake, dict(named.parameters), named.resembles) == ("double", {"factor": 2.0}, ())
    assert (named.explains, named.leaves, named.amplitude) == (1.0, 0.0, pytest.approx(1.0))
    # The energy of the predicted error in units of noise, which is as large as twice the values.
    growth = (2 * CORRECT).square().mean(0).clamp(min=1.0)
    assert named.z == pytest.approx(float((CORRECT.square() / (1e-4 * growth)).sum().sqrt()), rel=1e-5)
    assert (found.num_hypotheses, found.nearest) == (4, ())


def test_mistakes_that_explain_alike_are_named_in_the_catalogues_order() -> None:
    found = search(2 * CORRECT, scaling("first", 2.0001), scaling("second", 2.0), scaling("far", 1.9))
    assert [(one.mistake, one.resembles) for one in found.named] == [("second", ())]
    found = search(2 * CORRECT, scaling("first", 2.0), scaling("second", 2.0))
    assert [(one.mistake, one.resembles) for one in found.named] == [
        ("first", ("second",)),
        ("second", ("first",)),
    ]


def test_three_nearest_are_told_best_first_where_nothing_explains() -> None:
    factors = {"a": 4.0, "b": 2.5, "c": 0.5, "d": 3.0, "e": 2.6}
    found = search(2 * CORRECT, *(scaling(name, factor) for name, factor in factors.items()))
    assert found.named == ()
    assert [one.mistake for one in found.nearest] == ["b", "e", "d"]
    # What adds error explains none.
    assert [one.explains for one in search(2 * CORRECT, scaling("a", -0.5)).nearest] == [0.0]


def test_later_candidate_must_be_better() -> None:
    found = search(2 * CORRECT, scaling("near", 2.001, 2.000999))
    assert dict(found.named[0].parameters) == {"factor": 2.001}


def test_without_right_values_a_finite_prediction_explains_all() -> None:
    unknown = torch.full_like(CORRECT, torch.nan)
    finite = scaling("finite", 1.0, predict=lambda *_, factor: CORRECT)
    found = search(CORRECT, scaling("lost", 2.0), finite, correct=unknown)
    assert found.unexplained == torch.inf
    assert [(one.mistake, one.explains) for one in found.named] == [("finite", 1.0)]
    nearest = search(CORRECT, scaling("lost", 2.0), correct=unknown).nearest
    assert [(one.explains, one.amplitude, one.z) for one in nearest] == [(0.0, 0.0, 0.0)]


def test_mistakes_that_cannot_show_are_not_tried() -> None:
    elsewhere = scaling("elsewhere", 2.0, site=ModelSite.EMBEDDING)
    partly = scaling("partly", 2.0, 3.0, predict=lambda *_, factor: None if factor == 2.0 else 3 * CORRECT)
    found = search(2 * CORRECT, elsewhere, partly)
    assert (found.num_hypotheses, [one.mistake for one in found.nearest]) == (1, ["partly"])


def test_factor_that_fits_best_is_tried_beside_the_usual_ones() -> None:
    fitted = scaling("scaled", 4.0, fits_factor=True)
    tried = [parameters["factor"] for parameters in case(3 * CORRECT).candidates(fitted)]
    assert tried == [4.0, pytest.approx(3.0)]
    # A tensor that was not loaded is no scale.
    for port in (0 * CORRECT, CORRECT * torch.nan):
        assert len(case(port).candidates(fitted)) == 1
    assert len(case(3 * CORRECT, site=ModelSite.LOGITS, is_through_norm=True).candidates(fitted)) == 1


def test_norm_shows_at_the_logits_if_it_is_not_held() -> None:
    norm, head = scaling("norm", 2.0), scaling("head", 2.0, site=ModelSite.LOGITS)
    through, beside = (case(CORRECT, site=ModelSite.LOGITS, is_through_norm=it) for it in (True, False))
    assert (through.may_have(norm), through.may_have(head)) == (True, True)
    assert (beside.may_have(norm), beside.may_have(head)) == (False, True)


@pytest.fixture
def open_site(golden: Path, toy: Path, copyist: Any) -> Iterator[Open]:
    """Opens a site of the golden's own run, changed at some places."""
    source = Capture.open(golden)
    with ExitStack() as stack, torch.no_grad():
        weights = stack.enter_context(CheckpointWeights(model=str(toy)).open_layer(3, source))

        def open_site(site: ModelSite, changes: Any = None, **parts: Any) -> SiteCase | str:
            run = replace(full_run(4, sites_level="layer"), **parts)
            target = Capture.open(copyist.device_run(changes, run=run))
            batch = Batch.of(source, target)
            return ModelCases(source, target, batch=batch, last_layer=3, weights=weights).open(site)

        yield open_site


def opened(found: SiteCase | str) -> SiteCase:
    assert isinstance(found, SiteCase), found
    return found


@pytest.mark.parametrize("site", list(ModelSite))
def test_golden_is_right_at_each_site(open_site: Open, site: ModelSite) -> None:
    found = opened(open_site(site))
    # Of the embedding nothing is rounded.
    rho = 0.0 if site is ModelSite.EMBEDDING else 1.0
    assert found.noise.rho(found.port, found.correct) == pytest.approx(rho, abs=0.1)
    assert (found.notes, found.is_through_norm) == ((), False)
    # All of so few tokens are judged.
    assert len(found.port) == 81


def test_first_token_of_each_prompt_has_none_before(open_site: Open) -> None:
    previous = opened(open_site(ModelSite.EMBEDDING)).inputs.previous
    assert previous.tolist() == [-1, *range(47), -1, *range(48, 80)]


def test_norm_that_is_not_held_is_computed(open_site: Open) -> None:
    held = opened(open_site(ModelSite.LOGITS))
    through = opened(open_site(ModelSite.LOGITS, model_sites=(ModelSite.LOGITS,)))
    assert through.is_through_norm
    assert held.inputs.normed is not None
    assert through.inputs.normed is not None
    torch.testing.assert_close(through.inputs.normed, held.inputs.normed, rtol=1e-2, atol=1e-3)


def lost(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 3, 0] = torch.nan
    return tensor


def test_lost_tokens_are_left_out_and_noted(open_site: Open) -> None:
    found = opened(open_site(SITE, {(None, SITE): lost}))
    assert len(found.port) == 80
    assert found.notes == (
        "1 tokens hold NaN or Inf and were left out: no mistake of the catalogue makes any",
    )
    # A lost input is not the site's own fault.
    found = opened(open_site(SITE, {(3, Site.OUTPUT): lost}))
    assert (len(found.port), found.notes) == (80, ())


def test_reason_tells_why_a_site_cannot_be_judged(open_site: Open) -> None:
    wrong = {(None, SITE): lambda tensor: tensor[..., :8]}
    assert str(open_site(SITE, wrong)).startswith("shape: expected ")
    assert open_site(SITE, {(3, Site.OUTPUT): None}) == "its input is not held"
    everything = {(None, SITE): lambda tensor: tensor * torch.nan}
    assert open_site(SITE, everything) == "no token of it is held and finite"


class TestNoise:
    """Two channels, ones and zeros in the golden."""

    GOLDEN = torch.tensor([[1.0, 0.0], [1.0, 0.0]])

    def noise(self, *, rounding: float = 0.5) -> SiteNoise:
        return SiteNoise.measure(self.GOLDEN, self.GOLDEN, rounding=rounding)

    def test_is_at_least_one_rounding(self) -> None:
        # Of a channel of zeros, that of a hundredth of the mean channel.
        torch.testing.assert_close(self.noise().variance, torch.tensor([0.25, 0.25 * 1e-4 * 0.5]))
        far = SiteNoise.measure(self.GOLDEN, self.GOLDEN + 3, rounding=0.5)
        assert far.variance.tolist() == [9.0, 9.0]

    def test_grows_with_the_prediction(self) -> None:
        noise = self.noise()
        assert noise.widened(self.GOLDEN / 2).tolist() == noise.variance.tolist()
        widened = noise.widened(torch.tensor([[2.0, 1e9]]))
        assert widened.tolist() == pytest.approx([1.0, 0.25 * 0.5e-4 * 1e12])

    def test_rho_leaves_out_tokens_without_a_prediction(self) -> None:
        noise, port = self.noise(), torch.tensor([[2.0, 0.0], [50.0, 0.0]])
        prediction = torch.tensor([[1.0, 0.0], [math.nan, 0.0]])
        # An error of 1 in one of two channels, in units of 0.5.
        assert noise.rho(port, prediction) == pytest.approx(math.sqrt(2.0))
        assert noise.rho(port, prediction * math.nan) == math.inf
        assert noise.rho(port * math.inf, self.GOLDEN) == math.inf
