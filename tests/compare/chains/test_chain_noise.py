"""The unit of a chain: the floors of its layers together."""

from __future__ import annotations

from pathlib import Path

import torch

from compare.chains.chain_noise import ChainUnit, measure_unit
from compare.sides.batch import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.model.span import Span


def unit_of(golden: Path, span: Span) -> ChainUnit:
    capture = Capture.open(golden)
    return measure_unit(capture, span, batch=Batch.of(capture, capture), layer_error=0.01)


def test_unit_of_a_chain_adds_the_floors_of_its_layers(golden: Path) -> None:
    chain = unit_of(golden, Span(0, 3)).squares.whole
    layers = [unit_of(golden, Span.single(layer)).squares.whole for layer in range(3)]
    torch.testing.assert_close(chain, sum(layers, torch.zeros_like(chain)))
