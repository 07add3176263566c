"""Layers and sites of a run that are diagnosed, and words on the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.finding import Diagnosis
from compare.diagnosis.report import render_diagnosis
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import Run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Verdict

# Up to attention: no experts run to judge a layer.
RUN = replace(
    sweep_run(Span(0, 4), sites_level="all"),
    sites=tuple(site for site in Site if site.order <= Site.ATTN_DELTA.order),
)

Diagnose = Callable[..., Diagnosis]


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return (tensor.float() * (1 + 0.3 * noise)).to(tensor.dtype)


@pytest.fixture
def diagnosed(golden: Path, toy: Path, copyist: Any) -> Diagnose:
    """Diagnoses a run whose sites at some places are noisy, by a mistake that explains none of it."""

    def run(
        *places: tuple[int | None, Site | ModelSite],
        run: Run = RUN,
        stop_before: int | None = None,
        **options: Any,
    ) -> Diagnosis:
        target = copyist.device_run(dict.fromkeys(places, noisy), run=run, stop_before=stop_before)
        mistakes = ("k_v_swapped",)
        return diagnose(Capture.open(golden), Capture.open(target), model=toy, mistakes=mistakes, **options)

    return run


def places(found: Diagnosis) -> list[tuple[int | None, tuple[str, ...]]]:
    return [(blame.layer, blame.sites) for blame in found.unexplained_blame]


ALIKE = [(layer, Site.K_NORM) for layer in (0, 1, 2)]


def test_layers_behind_one_that_is_passed_over_are_diagnosed(diagnosed: Diagnose) -> None:
    found = diagnosed(*ALIKE, (3, Site.V_PROJ))
    assert [layer.layer for layer in found.layers] == [0, 1, 3]
    assert [(passed.layers, passed.like) for passed in found.passed_over] == [((2,), (0, 1))]
    assert places(found) == [(0, ("k_norm",)), (1, ("k_norm",)), (2, ("k_norm",)), (3, ("v_proj",))]


def test_chosen_layers_are_all_diagnosed_and_no_others(diagnosed: Diagnose) -> None:
    found = diagnosed(*ALIKE, (3, Site.V_PROJ), layers=(0, 1, 2))
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    assert found.passed_over == ()
    assert places(found) == [(0, ("k_norm",)), (1, ("k_norm",)), (2, ("k_norm",))]


class Advances(list[tuple[int, bool]]):
    """A progress that notes each layer, and whether bytes were read for it."""

    def __enter__(self) -> Advances:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, layer: int, *, num_bytes: int) -> None:
        self.append((layer, num_bytes > 0))


def test_right_layer_beside_wrong_ones_passes(diagnosed: Diagnose) -> None:
    asked, advances = [], Advances()

    def open_progress(num_layers: int) -> Advances:
        asked.append(num_layers)
        return advances

    found = diagnosed(*ALIKE, layers=(3,), open_progress=open_progress)
    assert (found.verdict, found.is_failed, found.unexplained_blame) == (Verdict.PASS, False, ())
    (layer,) = found.layers
    assert (layer.is_blamed, layer.is_right, layer.blame) == (False, True, ())
    assert (asked, advances) == ([1], [(3, True)])


class TestRunThatStopped:
    def test_is_no_pass(self, diagnosed: Diagnose) -> None:
        found = diagnosed(stop_before=1)
        assert (found.verdict, found.exit_code) == (Verdict.INCOMPARABLE, 3)
        assert "compared 10 of 40 sites" in render_diagnosis(found)
        assert any("run it again" in note for note in found.notes)

    def test_layers_that_ran_are_diagnosed(self, diagnosed: Diagnose) -> None:
        assert diagnosed(stop_before=2, layers=(0, 1)).verdict is Verdict.PASS
        assert diagnosed((0, Site.V_PROJ), stop_before=1).verdict is Verdict.FAIL


class TestOutside:
    RUN = replace(RUN, span=Span(0, 2), model_sites=(ModelSite.FINAL_NORM,))
    WRONG = (None, ModelSite.FINAL_NORM)

    def test_site_that_cannot_be_judged_is_noted(self, diagnosed: Diagnose) -> None:
        found = diagnosed(self.WRONG, run=self.RUN)
        assert (found.layers, found.is_failed) == ((), True)
        # The last layer's output, its input, was not captured.
        assert found.sites == ()
        (note,) = found.notes
        assert note.startswith("final_norm fails and was not diagnosed: ")

    def test_chosen_layers_leave_it_out_unless_they_are_all(self, diagnosed: Diagnose) -> None:
        assert diagnosed(self.WRONG, run=self.RUN, layers=(1,)).notes == ()
        found = diagnosed(self.WRONG, (1, Site.K_NORM), run=self.RUN, layers=(0, 1))
        assert (len(found.notes), found.is_failed) == (1, True)
        assert [layer.is_right for layer in found.layers] == [True, False]


def test_golden_of_another_tool_is_refused(golden: Path, toy: Path) -> None:
    class Foreign(Capture):
        @property
        def known_description(self) -> None:  # type: ignore[override]
            return None

    capture = Capture.open(golden)
    with pytest.raises(IncomparableError, match="does not say which model and tokens it is of"):
        diagnose(Foreign(golden, capture.manifest), capture, model=toy)
