"""The unit of a chain: the floors of its layers together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from compare.chains.chain_judge import ChainUnit, measure_error, measure_unit
from compare.noise.rows import square_rows
from compare.sides.sides import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.model.span import Span


def unit_of(golden: Path, span: Span) -> ChainUnit:
    capture = Capture.open(golden)
    return measure_unit(capture, span, batch=Batch.of(capture, capture), layer_error=0.01)


def test_unit_of_a_chain_adds_the_floors_of_its_layers(golden: Path) -> None:
    chain = unit_of(golden, Span(0, 3)).squares.whole
    layers = [unit_of(golden, Span.single(layer)).squares.whole for layer in range(3)]
    torch.testing.assert_close(chain, sum(layers, torch.zeros_like(chain)))


def test_unit_of_a_golden_without_a_floor_is_the_usual_error_of_a_layer(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(golden, folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"noise_floor": "full"', '"noise_floor": "off"'))
    assert unit_of(folder, Span.single(2)).relative == pytest.approx(0.01)


def test_output_without_massive_channels_has_no_error_there() -> None:
    output = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    norms = square_rows(output, massive=torch.zeros(64, dtype=torch.bool))
    unit = ChainUnit(squares=norms.times(1e-4), norms=norms)
    found = measure_error(output, 1.02 * output, unit)
    assert found.massive == 0.0
    assert found.median == pytest.approx(2.0, rel=1e-3)
