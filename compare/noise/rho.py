"""ρ: error of a target at a site, over the noise floor of the golden there.

T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from scipy.special import stdtrit

from compare.noise.input_error import InputError
from compare.noise.squared_errors import TINY, Squares, square_difference, square_rows
from minimax_tools.metrics.error_structure import Structure, measure_structure
from minimax_tools.results.results import NoiseRatio

# Relative L2 error of one rounding to BF16, of normally distributed values.
_BFLOAT16_ROUNDING = 1.7e-3
# Averages over fewer channels may be near 0 in the golden by chance, such as those of two routing weights, which add up
# to one. Each port would then be far off.
_FEWEST_CHANNELS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Judged tokens of one site on both sides, with the noise floor.

    Args:
        reference: [T,F], the golden.
        target: [T,F], the port.
        massive: bool [F], the massive channels, over all real tokens of the golden.
        places: [T,2], row and position of each token in the batch.
        twin: [T,F] float32, the golden's float32 twin; None where it was not kept.
        floor: (reference − twin)² summed per token; None where only the twin is known.
        widest: Largest (golden or variant − twin)² summed per token; None for a golden without variants.
        widest_averages: Averages of the variants over those of the golden, in the order of `Structure.figures`; None
            where they were not measured.
        input_error: Error of a chained layer's input; None in isolated runs.
        stored_dtype: Dtype that the golden holds, where `reference` has another.
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
        """Dtype that the golden holds."""
        return self.stored_dtype or self.reference.dtype

    @property
    def num_tokens(self) -> int:
        """Number of judged tokens, T."""
        return self.reference.shape[0]

    @property
    def has_floor(self) -> bool:
        """True where ρ can be computed."""
        return self.twin is not None or self.floor is not None

    def select(self, tokens: torch.Tensor) -> Rows:
        """Select tokens, bool [T]; the massive channels stay."""
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

    With the twin, the error is ‖target − twin‖. Without it, target and reference are assumed to have independent noise:
    ‖target − twin‖² is about ‖target − reference‖² − ‖reference − twin‖².

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
        # The averages of variants stray further too.
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
    """Measure the structure of the error; None without a twin, or where the port may have errors besides rounding."""
    if rows.num_tokens == 0 or rows.twin is None or rows.input_error is not None or _is_rounded(rows):
        return None
    return measure_structure(rows.twin, rows.reference, rows.target, massive=rows.massive)


def _is_rounded(rows: Rows) -> bool:
    """Decide whether the port rounded to BF16 a value that the golden holds in float32."""
    return rows.dtype == torch.float32 and torch.equal(
        rows.target, rows.target.bfloat16().to(rows.target.dtype)
    )


def foreseen_error(rows: Rows) -> Squares:
    """Compute the expected error of a right port against the float32 twin: the floor, widened as for ρ.

    Raises:
        ValueError: The rows have no floor.
    """
    return _widen(_floor(rows), square_rows(rows.reference, massive=rows.massive), rows)


def foreseen_error_at(rows: Rows, values: torch.Tensor) -> Squares:
    """Compute the expected error of a right port against float32 `values` [T,F] that are not the golden's.

    It is the floor, scaled to the values by the median token: a sum that cancels in one token tells nothing of another.
    It is at least the token's own floor, reduced where all values are smaller, and at least one rounding to BF16 where
    the golden holds BF16.

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
    """Scale the floor of values with squared norms `before` to values with `after`, float64 [T] each."""
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

    - Variants of the golden may stray further than the golden itself.
    - A right port may round to BF16 a value that the golden holds in float32.
    - A chained layer inherits the error of its input.
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
    """Compute the root of error over floor; a floor of zero demands bit equality."""
    numerator, denominator = float(error.sum()), float(floor.sum())
    if denominator <= TINY:
        return 0.0 if numerator <= TINY else math.inf
    return math.sqrt(numerator / denominator)


def _per_token(error: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Compute ρ per token [T]; a token with an unusually small floor is compared with the median floor."""
    if float(floor.sum()) <= TINY:
        return torch.where(error <= TINY, 0.0, math.inf).double()
    return (error / torch.maximum(floor, floor.median()).clamp(min=TINY)).sqrt()


_UPPER_QUANTILE = 0.975
_FEWEST_PROMPTS = 3
_NUM_BLOCKS = 10


def rho_interval(
    error: torch.Tensor, floor: torch.Tensor, places: torch.Tensor
) -> tuple[float, float] | None:
    """Compute the 95 % interval of ρ = sqrt(Σ error / Σ floor) by a jackknife on its logarithm.

    Prompts are left out one by one; with fewer than three, blocks of neighbouring tokens are.

    Args:
        error: Squared errors per token [T], float64.
        floor: Squared floor per token [T], float64.
        places: Row and position of each token, [T,2].

    Returns:
        The lower and the upper end; None with two tokens or fewer, without an error or without a floor.
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
    reach = deviation * float(stdtrit(num_groups - 1, _UPPER_QUANTILE))
    return rho * math.exp(-reach), rho * math.exp(reach)


def _groups(places: torch.Tensor) -> torch.Tensor:
    """Number the group of each token, int64 [T]."""
    groups: torch.Tensor = places[:, 0].unique(return_inverse=True)[1]
    if groups.numel() and int(groups.max()) + 1 >= _FEWEST_PROMPTS:
        return groups
    num_tokens = places.shape[0]
    return torch.arange(num_tokens) * min(_NUM_BLOCKS, num_tokens) // max(num_tokens, 1)
