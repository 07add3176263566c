"""ρ: a target's error at a site, in units of what BF16 alone cost the golden there.

T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minimax_tools.floor import massive_channels
from minimax_tools.results import NoiseRatio

_BLOCK_ROWS = 64
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """One site's judged tokens on both sides, with what is known of the floor.

    Args:
        reference: [T,F], the golden.
        target: [T,F], the port.
        twin: [T,F] float32, the golden's float32 twin; None where only its distances were kept.
        error: [T], ‖reference − twin‖ per token, where the twin was not kept.
        error_ordinary: [T], the same without the massive channels.
        places: [T,2], row and position of each token in the batch.
        incoming: Relative error of the input that a chained layer was handed; 0 in isolated runs.
    """

    reference: torch.Tensor
    target: torch.Tensor
    twin: torch.Tensor | None
    error: torch.Tensor | None
    error_ordinary: torch.Tensor | None
    places: torch.Tensor
    incoming: float = 0.0

    @property
    def has_floor(self) -> bool:
        """Whether ρ can be computed."""
        return self.twin is not None or self.error is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Squares:
    """Squared norms per token [T], float64: over all channels, and over the ordinary ones."""

    whole: torch.Tensor
    ordinary: torch.Tensor

    def massive(self) -> torch.Tensor:
        return (self.whole - self.ordinary).clamp(min=0.0)


def noise_ratio(rows: Rows) -> NoiseRatio:
    """ρ over all tokens and per token.

    With the twin, the error is ‖target − twin‖. Without it, target and reference are taken to be
    independently noisy, so that ‖target − twin‖² is about ‖target − reference‖² − ‖reference − twin‖².

    Raises:
        ValueError: The rows have no floor.
    """
    ordinary = ~massive_channels(rows.reference)
    floor = _floor(rows, ordinary)
    error = _error(rows, ordinary, floor)
    widened = _widen(floor, rows, ordinary)
    per_token = _per_token(error.whole, widened.whole)
    worst = int(per_token.argmax())
    has_massive = not bool(ordinary.all())
    row, position = rows.places[worst].tolist()
    return NoiseRatio(
        whole=_rho(error.whole, widened.whole),
        ordinary=_rho(error.ordinary, widened.ordinary),
        massive=_rho(error.massive(), widened.massive()) if has_massive else None,
        token_median=float(per_token.median()),
        token_p99=float(torch.quantile(per_token, 0.99)),
        token_worst=float(per_token[worst]),
        worst_token=(row, position),
        is_estimated=rows.twin is None,
        incoming=rows.incoming,
    )


def relative_error(reference: torch.Tensor, target: torch.Tensor) -> float:
    """‖target − reference‖ / ‖reference‖ over [T,F]."""
    everything = torch.ones(reference.shape[-1], dtype=torch.bool)
    difference = float(_squares(reference, target, everything).whole.sum())
    norm = float(_squares(reference, None, everything).whole.sum())
    return math.sqrt(difference / max(norm, _TINY))


def _floor(rows: Rows, ordinary: torch.Tensor) -> _Squares:
    if rows.twin is not None:
        return _squares(rows.reference, rows.twin, ordinary)
    if rows.error is None or rows.error_ordinary is None:
        raise ValueError("these rows have no noise floor")
    return _Squares(whole=rows.error.double().square(), ordinary=rows.error_ordinary.double().square())


def _error(rows: Rows, ordinary: torch.Tensor, floor: _Squares) -> _Squares:
    if rows.twin is not None:
        return _squares(rows.twin, rows.target, ordinary)
    difference = _squares(rows.reference, rows.target, ordinary)
    return _Squares(
        whole=(difference.whole - floor.whole).clamp(min=0.0),
        ordinary=(difference.ordinary - floor.ordinary).clamp(min=0.0),
    )


def _widen(floor: _Squares, rows: Rows, ordinary: torch.Tensor) -> _Squares:
    """The floor of a layer that was handed an input with an error of its own."""
    if rows.incoming == 0.0:
        return floor
    norms = _squares(rows.reference, None, ordinary)
    share = rows.incoming**2
    return _Squares(whole=floor.whole + share * norms.whole, ordinary=floor.ordinary + share * norms.ordinary)


def _squares(reference: torch.Tensor, target: torch.Tensor | None, ordinary: torch.Tensor) -> _Squares:
    """Squared row norms of target − reference, or of the reference alone, a block of rows at a time."""
    whole, kept = [], []
    for start in range(0, reference.shape[0], _BLOCK_ROWS):
        block = reference[start : start + _BLOCK_ROWS].double()
        if target is not None:
            block = target[start : start + _BLOCK_ROWS].double() - block
        squares = block.square()
        whole.append(squares.sum(dim=-1))
        kept.append(squares[:, ordinary].sum(dim=-1))
    return _Squares(whole=torch.cat(whole), ordinary=torch.cat(kept))


def _rho(error: torch.Tensor, floor: torch.Tensor) -> float:
    """A floor of zero asks for bit equality."""
    numerator, denominator = float(error.sum()), float(floor.sum())
    if denominator <= _TINY:
        return 0.0 if numerator <= _TINY else math.inf
    return math.sqrt(numerator / denominator)


def _per_token(error: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """ρ per token [T]; a token whose own floor is unusually small is held against the median token's."""
    typical = floor.median()
    if float(floor.sum()) <= _TINY:
        return torch.where(error <= _TINY, 0.0, math.inf).double()
    return (error / torch.maximum(floor, typical).clamp(min=_TINY)).sqrt()
