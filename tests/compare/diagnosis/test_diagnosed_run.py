"""Layers and sites of a run that are diagnosed, and words on the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.finding import Diagnosis
from compare.diagnosis.report import render_diagnosis
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import Run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Verdict

# Up to attention: no experts run to judge a layer.
RUN = replace(
    sweep_run(Span(0, 4), sites_level="all"),
    sites=tuple(site for site in ModelGraph().sites if site.order <= Site.ATTN_DELTA.order),
)

Command = Callable[..., click.testing.Result]
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
    advances = Advances()
    found = diagnosed(*ALIKE, layers=(3,), open_progress=lambda _: advances)
    assert (found.verdict, found.is_failed, found.unexplained_blame) == (Verdict.PASS, False, ())
    (layer,) = found.layers
    assert (layer.is_blamed, layer.is_right, layer.blame, advances) == (False, True, (), [(3, True)])


def test_run_that_stopped_is_no_pass_but_of_layers_that_ran(diagnosed: Diagnose) -> None:
    found = diagnosed(stop_before=1)
    assert (found.verdict, found.exit_code) == (Verdict.INCOMPARABLE, 3)
    assert "compared 10 of 40 sites" in render_diagnosis(found)
    assert any("run it again" in note for note in found.notes)
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


class TestWrongShape:
    """A layer that fails by shapes alone is told so: no mistake of the catalogue is tried on it."""

    @pytest.fixture
    def asked(self, toy: Path, golden: Path, run_port: Callable[..., Path]) -> Callable[[str], Any]:
        """Options of a diagnosis of a port of `tokens_first.py`, which ran on the golden's input of layer 1."""

        def options(name: str) -> tuple[object, ...]:
            run = run_port("single-layer", f"tokens_first.py:{name}", "--layer", 1)
            return ("--model", toy, "--golden", golden, "--run", run, "--quiet")

        return options

    def test_tries_no_mistake_but_one_that_was_asked_for(self, asked: Any, command: Command) -> None:
        paths = asked("OtherShape")
        result = command(mm2_diagnose, *paths, "--prove")
        text = " ".join(result.stdout.split())
        assert result.exit_code == 1
        assert text.startswith("FAIL: layer 1, q_rope and k_rope: the shape is wrong")
        # Of queries with 8 heads, 48 tokens, and 64 channels in a head.
        shapes = "expected (2, 8, 48, 64), found (2, 8, 64, 48): axes 2 and 3 are exchanged"
        assert f"q_rope: shape: {shapes}" in text
        assert "Nothing to prove: no mistake was named." in text
        record = json.loads(command(mm2_diagnose, *paths, "--json").stdout)
        (layer,) = record["layers"]
        assert (record["verdict"], record["diagnosis"], layer["num_hypotheses"]) == ("fail", [], 0)
        assert layer["unexplained"] < 1.5
        assert [note.partition(":")[0] for note in layer["notes"]] == ["q_rope", "k_rope"]
        record = json.loads(command(mm2_diagnose, *paths, "--mistake", "rope_theta", "--json").stdout)
        assert record["layers"][0]["num_hypotheses"] > 0

    def test_wrong_figure_beside_it_is_searched(self, asked: Any, command: Command) -> None:
        result = command(mm2_diagnose, *asked("OtherShapeAndTheta"), "--json")
        assert (result.exit_code, json.loads(result.stdout)["diagnosis"][0]["mistake"]) == (1, "rope_theta")

    @pytest.mark.parametrize(
        ("expected", "found", "words"),
        [
            ((2, 8, 3, 4), (2, 3, 8, 4), ": axes 1 and 2 are exchanged"),
            ((2, 8, 3), (3, 8, 2), ": axes 0 and 2 are exchanged"),
            ((2, 8, 3, 4), (2, 3, 4, 8), ""),
            ((2, 8, 3, 4), (2, 8, 3, 5), ""),
            ((2, 8, 3, 4), (2, 3, 9, 4), ""),
            ((2, 8, 3, 4), (2, 8, 12), ""),
        ],
    )
    def test_two_exchanged_axes_are_told(
        self, expected: tuple[int, ...], found: tuple[int, ...], words: str
    ) -> None:
        mismatch = find_mismatch(torch.zeros(expected), torch.zeros(found))
        assert mismatch == f"shape: expected {expected}, found {found}{words}"
