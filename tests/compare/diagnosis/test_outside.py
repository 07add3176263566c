"""The search outside the layers: which mistakes are named, which are only near, and on which tokens they are judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from compare.catalogue.candidates import values_of
from compare.catalogue.outside import ModelInputs, ModelMistake
from compare.diagnosis.outside import SiteCase, SiteNoise, search_site
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.sites import ModelSite

SITE = ModelSite.FINAL_NORM
CORRECT = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
NOISE = SiteNoise(variance=torch.full((4,), 1e-4), size=torch.ones(4))


def case(port: torch.Tensor, correct: torch.Tensor = CORRECT, **parts: Any) -> SiteCase:
    # These mistakes read nothing of them.
    inputs = cast("ModelInputs", SimpleNamespace(spec=SimpleNamespace(family=MINIMAX_M2)))
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


def search(port: torch.Tensor, *mistakes: ModelMistake, correct: torch.Tensor = CORRECT) -> str:
    """Return the mistakes named of a site, or nearest, and the figures."""
    found = search_site(case(port, correct), mistakes, is_blamed=True)
    lines = [f"rho {found.unexplained:.3f}, {found.num_hypotheses} tried"]
    for title, findings in (("named", found.named), ("nearest", found.nearest)):
        lines += [
            f"{title}: {one.mistake} {dict(one.parameters)}, explains {one.explains:.3f}, leaves {one.leaves:.3f}, "
            f"amplitude {one.amplitude:.3f}, z {one.z:.1f}, like {', '.join(one.resembles) or 'none'}"
            for one in findings
        ]
    return "\n".join(lines)


def test_searches_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    wrong, unknown = 2 * CORRECT, torch.full_like(CORRECT, torch.nan)
    nearest = [scaling(name, factor) for name, factor in zip("abcde", (4.0, 2.5, 0.5, 3.0, 2.6), strict=True)]
    finite = scaling("finite", 1.0, predict=lambda *_, factor: CORRECT)
    partly = scaling("partly", 2.0, 3.0, predict=lambda *_, factor: None if factor == 2.0 else 3 * CORRECT)
    cases = {
        "nothing is tried on a right site": search(CORRECT + 0.01, scaling("double", 2.0)),
        "a mistake that explains the error": search(
            wrong, scaling("triple", 3.0), scaling("double", 1.5, 2.0)
        ),
        "one that explains it better": search(
            wrong, scaling("first", 2.0001), scaling("second", 2.0), scaling("far", 1.9)
        ),
        "two that explain it alike": search(wrong, scaling("first", 2.0), scaling("second", 2.0)),
        "three are nearest, the best first": search(wrong, *nearest),
        "what adds error explains none": search(wrong, scaling("a", -0.5)),
        "a later candidate must be better": search(wrong, scaling("near", 2.001, 2.000999)),
        "a finite prediction without right values": search(
            CORRECT, scaling("lost", 2.0), finite, correct=unknown
        ),
        "no finite prediction": search(CORRECT, scaling("lost", 2.0), correct=unknown),
        "mistakes that cannot show": search(
            wrong, scaling("elsewhere", 2.0, site=ModelSite.EMBEDDING), partly
        ),
    }
    expect_text("outside.txt", cases)


def test_z_is_of_the_energy_in_units_of_noise() -> None:
    (named,) = search_site(case(2 * CORRECT), [scaling("double", 2.0)], is_blamed=True).named
    # The noise is as large as twice the values.
    growth = (2 * CORRECT).square().mean(0).clamp(min=1.0)
    assert named.z == pytest.approx(float((CORRECT.square() / (1e-4 * growth)).sum().sqrt()), rel=1e-5)


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
