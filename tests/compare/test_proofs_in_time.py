"""No verdict is told of captures that were damaged, whatever judging them came to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from damage.tampering import change_tensor

from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.run import multi_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, Verdict

CRITERIA = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)


def judge(golden: Capture, run: Capture) -> Comparison:
    return compare_captures(golden, run, criteria=CRITERIA, layer_pattern="layer_*")


def damage(directory: Path) -> None:
    change_tensor(directory, "layer_1.safetensors", "output", torch.zeros_like)


def make_sides(copyist: Any, *, fails: bool) -> tuple[Path, Path]:
    """Write a golden and a run; judging them `fails` at layer 3, behind the layer that may be damaged."""
    broken = {(3, Site.OUTPUT): lambda tensor: tensor * torch.nan} if fails else {}
    run = multi_layer_run(Span(1, 4), sites_level="layer")
    return copyist.golden(broken, run=run), copyist.device_run(run=run)


def test_what_is_whole_is_judged(copyist: Any) -> None:
    golden, run = map(Capture.open, make_sides(copyist, fails=False))
    assert judge(golden, run).verdict is Verdict.PASS
    assert judge(run, run).verdict is Verdict.PASS


def test_what_judging_raises_is_raised(copyist: Any) -> None:
    golden, run = map(Capture.open, make_sides(copyist, fails=True))
    with pytest.raises(IncomparableError, match="the golden's output of layer 3"):
        judge(golden, run)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_damage_is_told_whatever_came_of_it(copyist: Any, side: int, *, fails: bool) -> None:
    paths = make_sides(copyist, fails=fails)
    damage(paths[side])
    golden, run = map(Capture.open, paths)
    with pytest.raises(CaptureError, match=rf"{('golden', 'run')[side]} .*output of layer 1"):
        judge(golden, run)
    # It is not taken for proved since.
    with pytest.raises(CaptureError, match="output of layer 1"):
        (golden, run)[side].read(1, Site.OUTPUT)


def test_of_two_damaged_sides_the_golden_is_named(copyist: Any) -> None:
    paths = make_sides(copyist, fails=False)
    for directory in paths:
        damage(directory)
    with pytest.raises(CaptureError, match="the golden"):
        judge(*map(Capture.open, paths))
