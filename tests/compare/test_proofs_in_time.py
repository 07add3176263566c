"""No verdict is told of captures that were damaged, whatever judging them came to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from damage.tampering import change_tensor

from compare.comparer import proved
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison

FILE = "layer_1.safetensors"


@proved
def count(reference: CaptureSource, target: CaptureSource, *, fails: bool = False) -> int:
    """Read a site of both sides."""
    num = sum(side.read(1, Site.OUTPUT).numel() for side in (reference, target))
    if fails:
        raise ValueError("what was read makes no sense")
    return num


@pytest.fixture
def sides(copyist: Any) -> tuple[Path, Path]:
    return copyist.golden(), copyist.device_run()


def damage(directory: Path) -> None:
    change_tensor(directory, FILE, "output", torch.zeros_like)


def opened(sides: tuple[Path, Path]) -> tuple[Capture, Capture]:
    return Capture.open(sides[0]), Capture.open(sides[1])


def test_what_is_whole_is_judged(sides: tuple[Path, Path]) -> None:
    golden, run = opened(sides)
    assert count(golden, run) > 0
    assert count(golden, golden) > 0
    with pytest.raises(ValueError, match="makes no sense"):
        count(golden, run, fails=True)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_damage_is_told_whatever_came_of_it(sides: tuple[Path, Path], side: int, *, fails: bool) -> None:
    damage(sides[side])
    captures = opened(sides)
    with pytest.raises(CaptureError, match=rf"{('golden', 'run')[side]} .*output of layer 1"):
        count(*captures, fails=fails)
    # It is not taken for proved since.
    with pytest.raises(CaptureError, match="output of layer 1"):
        captures[side].read(1, Site.OUTPUT)


def test_of_two_damaged_sides_the_golden_is_named(
    sides: tuple[Path, Path], judge: Callable[..., Comparison]
) -> None:
    for directory in sides:
        damage(directory)
    with pytest.raises(CaptureError, match="the golden"):
        judge(sides[1], reference=sides[0])
