"""ρ: a target's error at a site, in units of what BF16 alone cost the golden there.

T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from compare.noise.input_error import InputError
from compare.noise.squared_errors import TINY, Squares, square_difference, square_rows
from minimax_tools.metrics.error_structure import Structure, measure_structure
from minimax_tools.results.results import NoiseRatio

# Relative L2 error of one rounding to BF16, of normally distributed values.
_BFLOAT16_ROUNDING = 1.7e-3
# Averages of fewer channels, such as two experts' weights that add up to one, may be next to nothing in the golden. Any
# port is then far off.
_FEWEST_CHANNELS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Judged tokens of one site on both sides, with what is known of the floor.

    Args:
        reference: [T,F], the golden.
        target: [T,F], the port.
        massive: bool [F], the channels that are massive over all real tokens of the golden.
        places: [T,2], row and position of each token in the batch.
        twin: [T,F] float32, the golden's float32 twin; None where it was not kept.
        floor: (reference − twin)² summed per token, where it was kept or summed already.
        widest: (golden or variant − twin)² summed per token, the largest of them; None of a golden without variants.
        widest_averages: How many times as far as the golden's the averages of its variants stray, in the order of
            `Structure.figures`; None where that was not measured.
        input_error: Error of a chained layer's input; None in isolated runs.
        stored_dtype: What the golden holds it in, where `reference` is of another dtype.
    """

    reference: torch.Tensor
    target: torch.Tensor
    massive: torch.Tensor
    places: torch.Tensor
    twin: torch.Tensor | None = None
    floor: Squares | None = None
    widest: Squares | None = None
    widest_averages: tuple[float, ...] | None = None
    input_error: InputError | None = None
    stored_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the golden holds the site."""
        return self.stored_dtype or self.reference.dtype

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.reference.shape[0]

    @property
    def has_floor(self) -> bool:
        """True where ρ can be computed."""
        return self.twin is not None or self.floor is not None

    def select(self, tokens: torch.Tensor) -> Rows:
        """Select some tokens, bool [T]; massive channels stay the same."""
        return replace(
            self,
            reference=self.reference[tokens],
            target=self.target[tokens],
            places=self.places[tokens],
            twin=None if self.twin is None else self.twin[tokens],
            floor=None if self.floor is None else self.floor.select(tokens),
            widest=None if self.widest is None else self.widest.select(tokens),
            input_error=None if self.input_error is None else self.input_error.select(tokens),
        )


def noise_ratio(rows: Rows) -> NoiseRatio:
    """Compute ρ over all tokens and per token.

    With the twin, the error is ‖target − twin‖. Without it, target and reference are taken to be
    independently noisy, so that ‖target − twin‖² is about ‖target − reference‖² − ‖reference − twin‖².

    Raises:
        ValueError: The rows have no floor.
    """
    floor = _floor(rows)
    error = _error(rows, floor)
    norms = square_rows(rows.reference, massive=rows.massive)
    widened = _widen(floor, norms, rows)
    per_token = _per_token(error.whole, widened.whole)
    worst = int(per_token.argmax())
    row, position = rows.places[worst].tolist()
    structure = _structure(rows)
    has_channels = rows.reference.shape[1] >= _FEWEST_CHANNELS
    if structure is not None and rows.widest is not None:
        # What strays further does so in its averages too.
        widened_by = _rho(floor.widest(rows.widest).whole, floor.whole)
        structure = structure.divided(rows.widest_averages or (widened_by,) * len(structure.figures))
    return NoiseRatio(
        whole=_rho(error.whole, widened.whole),
        ordinary=_rho(error.ordinary, widened.ordinary),
        massive=_rho(error.massive, widened.massive) if bool(rows.massive.any()) else None,
        token_median=float(per_token.median()),
        token_p99=float(torch.quantile(per_token, 0.99)),
        token_worst=float(per_token[worst]),
        worst_token=(row, position),
        is_estimated=rows.twin is None,
        is_widened=rows.widest is not None,
        incoming=rows.input_error.overall if rows.input_error else 0.0,
        floor=_relative(widened.whole, norms.whole),
        interval=rho_interval(error.whole, widened.whole, rows.places),
        token_gain=structure.token_gain if structure else None,
        channel_gain=structure.channel_gain if structure and has_channels else None,
        channel_offset=structure.channel_offset if structure and has_channels else None,
        channel_worst=structure.channel_worst if structure else None,
        worst_channel=structure.worst_channel if structure else None,
    )


def token_ratios(rows: Rows) -> torch.Tensor:
    """Compute ρ of each token, float64 [T].

    Raises:
        ValueError: The rows have no floor.
    """
    floor = _floor(rows)
    widened = _widen(floor, square_rows(rows.reference, massive=rows.massive), rows)
    return _per_token(_error(rows, floor).whole, widened.whole)


def _structure(rows: Rows) -> Structure | None:
    """Measure the error's averages; None unless a twin shows both errors and rounding alone makes the port's."""
    if rows.num_tokens == 0 or rows.twin is None or rows.input_error is not None or _is_rounded(rows):
        return None
    return measure_structure(rows.twin, rows.reference, rows.target, massive=rows.massive)


def _is_rounded(rows: Rows) -> bool:
    """Decide whether the port rounded to BF16 what the golden holds in float32."""
    return rows.dtype == torch.float32 and torch.equal(
        rows.target, rows.target.bfloat16().to(rows.target.dtype)
    )


def foreseen_error(rows: Rows) -> Squares:
    """Return the error that a right port may have against the float32 twin: the floor, widened as for ρ.

    Raises:
        ValueError: The rows have no floor.
    """
    return _widen(_floor(rows), square_rows(rows.reference, massive=rows.massive), rows)


def foreseen_error_at(rows: Rows, values: torch.Tensor) -> Squares:
    """Scale the floor to float32 `values` [T,F] that are not the golden's.

    The largest of three, token by token:

    - The median token's floor relative to its values: a sum that cancels in one token tells nothing of another.
    - The token's own floor, smaller where all values are smaller.
    - One rounding, where the golden holds the site rounded.

    Raises:
        ValueError: The rows have no floor.
    """
    floor = foreseen_error(rows)
    before, after = (square_rows(side, massive=rows.massive) for side in (rows.reference, values))
    rounding = 0.0 if rows.dtype == torch.float32 else _BFLOAT16_ROUNDING**2
    return Squares(
        ordinary=_to_scale(floor.ordinary, before.ordinary, after.ordinary, rounding=rounding),
        massive=_to_scale(floor.massive, before.massive, after.massive, rounding=rounding),
    )


def _to_scale(
    floor: torch.Tensor, before: torch.Tensor, after: torch.Tensor, *, rounding: float
) -> torch.Tensor:
    """Scale the floor from values of squared norms `before` to those of `after`: float64 [T] each."""
    usual = (floor / before.clamp(min=TINY)).median()
    shrinking = (after / before.clamp(min=TINY)).median().clamp(max=1.0)
    return torch.maximum(torch.maximum(usual, usual.new_tensor(rounding)) * after, shrinking * floor)


def _floor(rows: Rows) -> Squares:
    if rows.floor is not None:
        return rows.floor
    if rows.twin is None:
        raise ValueError("these rows have no noise floor")
    return square_difference(rows.twin, rows.reference, massive=rows.massive)


def _error(rows: Rows, floor: Squares) -> Squares:
    if rows.twin is not None:
        return square_difference(rows.twin, rows.target, massive=rows.massive)
    return square_difference(rows.reference, rows.target, massive=rows.massive).plus(floor, factor=-1.0)


def _widen(floor: Squares, norms: Squares, rows: Rows) -> Squares:
    """Widen the floor by errors that no port is to blame for.

    - Another right way to compute the layer may stray further than the golden does.
    - A right port may round to BF16 what the golden holds in float32, which shows in its bits.
    - A chained layer's input has an error.
    """
    if rows.widest is not None:
        floor = floor.widest(rows.widest)
    if _is_rounded(rows):
        floor = floor.plus(norms, factor=_BFLOAT16_ROUNDING**2)
    if rows.input_error is not None:
        floor = floor.plus(norms, factor=rows.input_error.widest.square())
    return floor


def _relative(floor: torch.Tensor, norms: torch.Tensor) -> float | None:
    total = float(norms.sum())
    return math.sqrt(float(floor.sum()) / total) if total > TINY else None


def _rho(error: torch.Tensor, floor: torch.Tensor) -> float:
    """Return ρ; a floor of zero asks for bit equality."""
    numerator, denominator = float(error.sum()), float(floor.sum())
    if denominator <= TINY:
        return 0.0 if numerator <= TINY else math.inf
    return math.sqrt(numerator / denominator)


def _per_token(error: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return ρ per token [T]; a token with an unusually small floor is held against the median token's."""
    if float(floor.sum()) <= TINY:
        return torch.where(error <= TINY, 0.0, math.inf).double()
    return (error / torch.maximum(floor, floor.median()).clamp(min=TINY)).sqrt()


# Student's t at 97.5 % by degrees of freedom, for those that differ from the normal 1.96 by more than 10 %.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_NORMAL = 1.96
_FEWEST_PROMPTS = 3
_NUM_BLOCKS = 10


def rho_interval(
    error: torch.Tensor, floor: torch.Tensor, places: torch.Tensor
) -> tuple[float, float] | None:
    """Return the 95 % interval of ρ = sqrt(Σ error / Σ floor), by a jackknife on its logarithm.

    Prompts are left out one by one; where there are fewer than three, blocks of neighbouring tokens are.

    Args:
        error: Squared errors per token [T], float64.
        floor: Squared floor per token [T], float64.
        places: Row and position of each token, [T,2].

    Returns:
        The lower and the upper end; None where they cannot be told: two tokens or fewer, no error or no floor.
    """
    groups = _groups(places)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    if num_groups < _FEWEST_PROMPTS:
        return None
    errors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, error.double())
    floors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, floor.double())
    without_error, without_floor = errors.sum() - errors, floors.sum() - floors
    if bool((without_error <= TINY).any()) or bool((without_floor <= TINY).any()):
        return None
    logarithms = 0.5 * (without_error / without_floor).log()
    if not bool(logarithms.isfinite().all()):
        return None
    deviation = math.sqrt(
        float((logarithms - logarithms.mean()).square().sum()) * (num_groups - 1) / num_groups
    )
    rho = math.sqrt(float(errors.sum() / floors.sum()))
    freedom = num_groups - 1
    reach = deviation * (_STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL)
    return rho * math.exp(-reach), rho * math.exp(reach)


def _groups(places: torch.Tensor) -> torch.Tensor:
    """Return the group that each token belongs to, int64 [T]."""
    groups: torch.Tensor = places[:, 0].unique(return_inverse=True)[1]
    if groups.numel() and int(groups.max()) + 1 >= _FEWEST_PROMPTS:
        return groups
    num_tokens = places.shape[0]
    return torch.arange(num_tokens) * min(_NUM_BLOCKS, num_tokens) // max(num_tokens, 1)
