"""Chain noise: the error at the end of a chain of layers, in units of what BF16 alone costs the layers one by one.

    unit² = sum over the chain's layers of 2 · floor², the squared difference of two right implementations of the layer

The unit takes each layer to pass on the error that it inherits unchanged. In fact layers amplify it, and a flip (a
token sent to other experts) adds an error that no floor foretells. So right ports exceed the unit, the more the longer
the chain is: `chain_limits` tells by how much. T judged tokens, F channels of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from compare.noise.squared_errors import TINY, Squares, square_difference, square_rows
from compare.sides.batch import Batch
from compare.sides.layer_floor import LayerFloor
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import massive_channels
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainError:
    """The error at the end of a chain, in the unit of this file.

    The first four are quantiles over the tokens, of the error in the ordinary channels. In right ports too a few tokens
    have large errors, so no limit is on the worst.
    """

    lower_quartile: float
    median: float
    upper_quartile: float
    ninth_decile: float
    massive: float  # error over all tokens in the massive channels

    def excess(self, limits: ChainError) -> float:
        """Return the largest of its parts, each in units of its limit."""
        return max(float(getattr(self, name) / getattr(limits, name)) for name in PARTS)

    def worst_part(self, limits: ChainError) -> str:
        """Return the name of the part that is largest in units of its limit."""
        return max(PARTS, key=lambda name: getattr(self, name) / getattr(limits, name))

    def times(self, factor: float) -> ChainError:
        """Return this error times a factor."""
        return ChainError(**{name: factor * getattr(self, name) for name in PARTS})


# The parts of a `ChainError`, in words.
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "lower_quartile": "of three tokens in four",
        "median": "of every second token",
        "upper_quartile": "of one token in four",
        "ninth_decile": "of one token in ten",
        "massive": "of the massive channels",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainUnit:
    """The unit at the end of one chain, per token."""

    squares: Squares  # the unit squared, [T]
    norms: Squares  # squared norms of the golden's output there, [T]

    @property
    def relative(self) -> float:
        """The unit of the median token relative to its output, in the ordinary channels."""
        return float((self.squares.ordinary / self.norms.ordinary.clamp(min=TINY)).sqrt().median())


def measure_unit(golden: CaptureSource, span: Span, *, batch: Batch, layer_error: float) -> ChainUnit:
    """Measure the unit at the end of the chain `span`.

    For a golden without a floor, `layer_error` is the usual difference of two right implementations of a layer,
    relative to its output.

    Raises:
        CaptureError: A tensor cannot be read.
    """
    total = _floor(golden, span.start, batch=batch, layer_error=layer_error)
    for layer in range(span.start + 1, span.stop):
        total = total.plus(_floor(golden, layer, batch=batch, layer_error=layer_error), factor=1.0)
    # Twice each floor: two right implementations each have an error of that size.
    return ChainUnit(squares=total.times(2.0), norms=_norms(golden, span.last, batch=batch))


def measure_error(reference: torch.Tensor, target: torch.Tensor, unit: ChainUnit) -> ChainError:
    """Measure the error of a chain's output, both [T,F] and finite."""
    massive = massive_channels(reference)
    error = square_difference(reference, target, massive=massive)
    ordinary = unit.squares.ordinary
    # A token whose own unit is below the median token's is judged by the median.
    tokens = (error.ordinary / torch.maximum(ordinary, ordinary.median()).clamp(min=TINY)).sqrt()
    shares = torch.tensor((0.25, 0.5, 0.75, 0.9), dtype=tokens.dtype)
    lower, median, upper, ninth = torch.quantile(tokens, shares).tolist()
    total = float(unit.squares.massive.sum())
    return ChainError(
        lower_quartile=lower,
        median=median,
        upper_quartile=upper,
        ninth_decile=ninth,
        massive=float((error.massive.sum() / total).sqrt()) if total > TINY else 0.0,
    )


def _floor(golden: CaptureSource, layer: int, *, batch: Batch, layer_error: float) -> Squares:
    """Return the squared noise floor of a layer's output; without one, the square of the usual error of a layer.

    Raises:
        CaptureError: The stored floor does not fit the golden's own values.
    """
    floor = LayerFloor(golden, batch, layer=layer)
    squares = floor.squares(Site.OUTPUT)
    if squares is not None:
        twin = golden.read_twin(layer, Site.OUTPUT)
        if twin is not None:
            # Measured only to refuse a stored floor that the golden's own values contradict.
            rows, exact = (batch.rows(side, Site.OUTPUT) for side in (golden.read(layer, Site.OUTPUT), twin))
            floor.prove(Site.OUTPUT, square_difference(exact, rows, massive=massive_channels(rows)))
        return squares
    # Half of its square, since `measure_unit` adds it twice.
    return _norms(golden, layer, batch=batch).times(layer_error**2 / 2)


def _norms(golden: CaptureSource, layer: int, *, batch: Batch) -> Squares:
    """Return the squared norms of a layer's output."""
    rows = batch.rows(golden.read(layer, Site.OUTPUT), Site.OUTPUT)
    return square_rows(rows, massive=massive_channels(rows))
