"""Chain noise: the error at the end of a chain of layers, in units of what BF16 alone costs the layers one by one.

The unit adds up the squares of each layer's difference between two right implementations, as if no layer changed the
error that it inherits. Layers do change it: they amplify it, and a flipped expert gives a token an error that no floor
foretells. So right ports exceed the unit too, the more the longer the chain is (see scripts/bench_chained_ends.py).
T judged tokens, F channels of the output.
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
    """The error at the end of a chain, in the unit above.

    Quantiles over the tokens, of the ordinary channels: a few tokens go astray in right ports too, whole quarters of
    them less so. The massive channels, over all tokens.
    """

    lower_quartile: float
    median: float
    upper_quartile: float
    ninth_decile: float
    massive: float

    def excess(self, limits: ChainError) -> float:
        """Return the largest of its parts in units of its limit."""
        return max(float(getattr(self, name) / getattr(limits, name)) for name in PARTS)

    def worst_part(self, limits: ChainError) -> str:
        """Return the name of that part."""
        return max(PARTS, key=lambda name: getattr(self, name) / getattr(limits, name))

    def times(self, factor: float) -> ChainError:
        """Return this error times a factor."""
        return ChainError(**{name: factor * getattr(self, name) for name in PARTS})


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
    """The unit above, per token.

    Args:
        squares: Its square, [T].
        norms: Squared norms of the golden's output, [T].
    """

    squares: Squares
    norms: Squares

    @property
    def relative(self) -> float:
        """The median token's, relative to its output, over the ordinary channels."""
        return float((self.squares.ordinary / self.norms.ordinary.clamp(min=TINY)).sqrt().median())


def measure_unit(golden: CaptureSource, span: Span, *, batch: Batch, layer_error: float) -> ChainUnit:
    """Measure the unit at the end of the chain `span`.

    Args:
        golden: The golden, with the outputs of the chain's layers.
        span: The layers.
        batch: Its real tokens.
        layer_error: What BF16 costs a layer, relative to its output, where the golden kept no floor.

    Raises:
        CaptureError: A tensor cannot be read.
    """
    squares: Squares | None = None
    for layer in span:
        # Two implementations that are right, each with an error of its own.
        floor = _floor(golden, layer, batch=batch, layer_error=layer_error)
        squares = floor.plus(floor, factor=1.0) if squares is None else squares.plus(floor, factor=2.0)
    assert squares is not None, "a span is never empty"
    return ChainUnit(squares=squares, norms=_norms(golden, span.last, batch=batch))


def measure_error(reference: torch.Tensor, target: torch.Tensor, unit: ChainUnit) -> ChainError:
    """Measure the error of a chain's output, both [T,F] and finite."""
    massive = massive_channels(reference)
    error = square_difference(reference, target, massive=massive)
    ordinary = unit.squares.ordinary
    # A token whose own unit is unusually small is held against the median token's.
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
    floor = LayerFloor(golden, batch, layer=layer)
    squares = floor.squares(Site.OUTPUT)
    if squares is not None:
        twin = golden.read_twin(layer, Site.OUTPUT)
        if twin is not None:
            rows, exact = (batch.rows(side, Site.OUTPUT) for side in (golden.read(layer, Site.OUTPUT), twin))
            floor.measure(Site.OUTPUT, rows, exact, massive=massive_channels(rows))
        return squares
    norms = _norms(golden, layer, batch=batch)
    nothing = Squares(ordinary=torch.zeros_like(norms.ordinary), massive=torch.zeros_like(norms.massive))
    # Halved: it is added twice.
    return nothing.plus(norms, factor=layer_error**2 / 2)


def _norms(golden: CaptureSource, layer: int, *, batch: Batch) -> Squares:
    rows = batch.rows(golden.read(layer, Site.OUTPUT), Site.OUTPUT)
    return square_rows(rows, massive=massive_channels(rows))
