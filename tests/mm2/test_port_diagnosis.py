from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mm2
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CheckpointError

Run = Callable[..., mm2.Recording]


def test_mistake_is_named(run: Run, swapped: Any, layer: mm2.GoldenLayer) -> None:
    diagnosis = mm2.diagnose(layer, run(swapped))
    assert diagnosis.mistakes == ("gate_up_swapped",)
    assert diagnosis.findings[0].leaves < 1.2
    assert "gate_up_swapped" in str(diagnosis)
    assert repr(diagnosis) == "PortDiagnosis(gate_up_swapped)"
    assert [found["mistake"] for found in diagnosis.to_json()["diagnosis"]] == ["gate_up_swapped"]


def test_nothing_is_named_in_a_right_port(
    run: Run, example: Callable[[str], Any], layer: mm2.GoldenLayer
) -> None:
    diagnosis = mm2.diagnose(layer, run(example("minimal_port.py")))
    assert (diagnosis.mistakes, diagnosis.findings) == ((), ())
    assert repr(diagnosis) == "PortDiagnosis(no known mistake named)"


def test_diagnosis_needs_the_checkpoint(run: Run, swapped: Any, golden: Path) -> None:
    without = mm2.GoldenLayers(Capture.open(golden), weights=None)
    with pytest.raises(CheckpointError, match=r"not on this machine.*--mm2-model DIR"):
        mm2.diagnose(without.layer(1), run(swapped))
