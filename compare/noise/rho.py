"""ρ: the port's error at a site, in units of what BF16 alone costs the golden there (the noise floor).

    ρ = ‖port − float32 twin‖ / ‖golden − float32 twin‖

The float32 twin is the golden's layer computed in float32. A port with ρ = 1 is as good as the golden. Its 95 %
interval is that of the jackknife: ρ without one group of tokens, again and again. A group is a prompt, since only the
errors of different prompts are independent. T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math

import torch
from scipy.special import stdtrit

from compare.noise.rows import TINY, BothErrors, Rows, Squares, square_difference, square_rows
from minimax_tools.metrics.noise_floor import Structure, compare_sums
from minimax_tools.results.results import NoiseRatio

# The interval leaves out 2.5 % at either end.
_UPPER_QUANTILE = 0.975
# With fewer groups, there is no interval.
_FEWEST_GROUPS = 3
# If there are fewer prompts, this many blocks of neighbouring tokens are the groups.
_NUM_BLOCKS = 10


def rho_interval(
    error: torch.Tensor, floor: torch.Tensor, places: torch.Tensor
) -> tuple[float, float] | None:
    """Compute the interval of ρ = sqrt(Σ error / Σ floor), on the logarithm of ρ.

    `error` and `floor` are squares per token, [T]; `places` [T,2] are the tokens' rows (prompts) and positions. None
    with two tokens or fewer, and if a sum without one group is 0 or not finite.
    """
    groups = _groups(places)
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    if num_groups < _FEWEST_GROUPS:
        return None
    errors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, error.double())
    floors = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups, floor.double())
    without_error, without_floor = errors.sum() - errors, floors.sum() - floors
    # ρ is a square root, so its logarithm is half that of the ratio of squares. It is not finite if a sum is 0.
    logarithms = 0.5 * (without_error / without_floor).log()
    if not bool(logarithms.isfinite().all()):
        return None
    # The jackknife's standard error, from the spread of the values without one group each.
    deviation = math.sqrt(
        float((logarithms - logarithms.mean()).square().sum()) * (num_groups - 1) / num_groups
    )
    rho = math.sqrt(float(errors.sum() / floors.sum()))
    reach = deviation * float(stdtrit(num_groups - 1, _UPPER_QUANTILE))
    return rho * math.exp(-reach), rho * math.exp(reach)


def _groups(places: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's group, int64 [T]: its prompt, or its block if there are few prompts."""
    groups: torch.Tensor = places[:, 0].unique(return_inverse=True)[1]
    if groups.numel() and int(groups.max()) + 1 >= _FEWEST_GROUPS:
        return groups
    # At most _NUM_BLOCKS blocks, of equal length to within one token.
    num_tokens = places.shape[0]
    return torch.arange(num_tokens) * min(_NUM_BLOCKS, num_tokens) // max(num_tokens, 1)


# Relative L2 error of one rounding to BF16, of normally distributed values.
_BFLOAT16_ROUNDING = 1.7e-3
# Fewest channels for ρ of a channel's averages. With fewer, the golden's own average may be near 0 by chance, and every
# port would be far off: two routing weights add up to one, so their errors cancel.
_FEWEST_CHANNELS = 16


def noise_ratio(rows: Rows) -> NoiseRatio:
    """Compute ρ over all tokens and per token, and ρ of averages of the error (see `_structure`).

    ρ is the error over the one foreseen of a right port: the floor, widened by what no port is to blame for. With the
    twin, the error is ‖target − twin‖. Without the twin, ρ is estimated (see `_error`).
    """
    errors = rows.measure_errors()
    if errors is None:
        floor, norms = _floor(rows), square_rows(rows.reference, massive=rows.massive)
        error = _error(rows, floor)
    else:
        floor = rows.floor or Squares.of_errors(errors.golden)
        error, norms = Squares.of_errors(errors.port), Squares.of_values(errors.golden)
    foreseen = _widen(floor, norms, rows)
    per_token = _per_token(error.whole, foreseen.whole)
    worst = int(per_token.argmax())
    row, position = rows.places[worst].tolist()  # row: here the token's sequence in the batch
    structure = None if errors is None else _structure(rows, floor, errors)
    has_channels = rows.reference.shape[1] >= _FEWEST_CHANNELS
    return NoiseRatio(
        whole=_rho(error.whole, foreseen.whole),
        ordinary=_rho(error.ordinary, foreseen.ordinary),
        massive=_rho(error.massive, foreseen.massive) if bool(rows.massive.any()) else None,
        token_median=float(per_token.median()),
        token_p99=float(torch.quantile(per_token, 0.99)),
        token_worst=float(per_token[worst]),
        worst_token=(row, position),
        is_estimated=rows.twin is None,
        is_widened=rows.widened_floor is not None,  # by variants
        incoming=rows.input_error.overall if rows.input_error else 0.0,  # of a chained layer's input
        floor=_relative(foreseen.whole, norms.whole),
        interval=rho_interval(error.whole, foreseen.whole, rows.places),
        token_gain=structure.token_gain if structure else None,
        channel_gain=structure.channel_gain if structure and has_channels else None,
        channel_offset=structure.channel_offset if structure and has_channels else None,
        channel_worst=structure.channel_worst if structure else None,
        worst_channel=structure.worst_channel if structure else None,
    )


def token_ratios(rows: Rows) -> torch.Tensor:
    """Compute ρ of each token, float64 [T]."""
    floor = _floor(rows)
    foreseen = _widen(floor, square_rows(rows.reference, massive=rows.massive), rows)
    return _per_token(_error(rows, floor).whole, foreseen.whole)


def foreseen_error(rows: Rows) -> Squares:
    """Return the squared error expected of a right port against the float32 twin: the floor, widened as for ρ."""
    return _widen(_floor(rows), square_rows(rows.reference, massive=rows.massive), rows)


def foreseen_error_at(rows: Rows, values: torch.Tensor) -> Squares:
    """Return the squared error expected of a right port against float32 `values` [T,F] that are not the golden's.

    It is the largest of three:

    - the floor relative to the golden's values, at the median token, times the new values
    - the token's own floor, reduced in proportion if the values of the median token are smaller
    - one rounding of the new values to BF16, if the golden holds BF16
    """
    floor = foreseen_error(rows)
    before, after = (square_rows(side, massive=rows.massive) for side in (rows.reference, values))
    rounding = 0.0 if rows.dtype == torch.float32 else _BFLOAT16_ROUNDING**2
    return Squares(
        ordinary=_to_scale(floor.ordinary, before.ordinary, after.ordinary, rounding=rounding),
        massive=_to_scale(floor.massive, before.massive, after.massive, rounding=rounding),
    )


def _floor(rows: Rows) -> Squares:
    """Return (reference − twin)² summed per token."""
    if rows.floor is not None:
        return rows.floor
    if rows.twin is None:
        raise ValueError("these rows have no noise floor")
    return square_difference(rows.twin, rows.reference, massive=rows.massive)


def _error(rows: Rows, floor: Squares) -> Squares:
    """Return (target − twin)² summed per token.

    Without the twin it is about (target − reference)² − floor, if the noise of both sides is independent.
    """
    if rows.twin is not None:
        return square_difference(rows.twin, rows.target, massive=rows.massive)
    return square_difference(rows.reference, rows.target, massive=rows.massive).plus(floor, factor=-1.0)


def _widen(floor: Squares, norms: Squares, rows: Rows) -> Squares:
    """Widen the floor by errors that no port is to blame for."""
    # Variants, other right ways to round the layer, may be further off than the golden.
    if rows.widened_floor is not None:
        floor = floor.maximum(rows.widened_floor)
    # A right port may round to BF16 a value that the golden holds in float32.
    if _is_rounded(rows):
        floor = floor.plus(norms, factor=rows.num_roundings * _BFLOAT16_ROUNDING**2)
    # A chained layer inherits the error of its input.
    if rows.input_error is not None:
        floor = floor.plus(norms, factor=rows.input_error.inherited.square())
    return floor


def _is_rounded(rows: Rows) -> bool:
    """Decide whether the port rounded to BF16 a value that the golden holds in float32."""
    return rows.dtype == torch.float32 and torch.equal(
        rows.target, rows.target.bfloat16().to(rows.target.dtype)
    )


def _per_token(error: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Return ρ per token [T]; a token whose own floor is below the median floor is judged by the median."""
    if float(floor.sum()) <= TINY:
        return torch.where(error <= TINY, 0.0, math.inf).double()
    return (error / torch.maximum(floor, floor.median()).clamp(min=TINY)).sqrt()


def _rho(error: torch.Tensor, floor: torch.Tensor) -> float:
    """Return sqrt(Σ error / Σ floor); with a floor of zero, 0 for bit-equal values and infinity for others."""
    numerator, denominator = float(error.sum()), float(floor.sum())
    if denominator <= TINY:
        return 0.0 if numerator <= TINY else math.inf
    return math.sqrt(numerator / denominator)


def _relative(floor: torch.Tensor, norms: torch.Tensor) -> float | None:
    """Return the floor relative to the values; None if they are all zero."""
    total = float(norms.sum())
    return math.sqrt(float(floor.sum()) / total) if total > TINY else None


def _structure(rows: Rows, floor: Squares, errors: BothErrors) -> Structure | None:
    """Measure ρ of the averages of the port's error, relative to the variants' if the golden has any.

    The averages are gains, offsets and worst channels (see `minimax_tools.metrics.noise_floor`). None if the port's
    error is not the layer's BF16 noise alone: a chained layer, or a value that the golden holds in float32 and the port
    rounded.
    """
    if rows.input_error is not None or _is_rounded(rows):
        return None
    structure = compare_sums(errors.golden, errors.port)
    if structure is None or rows.widened_floor is None:
        return structure
    # The averages of variants are larger than the golden's. Where they were not measured, they count as larger by as
    # much as the variants' errors are.
    widened_by = _rho(floor.maximum(rows.widened_floor).whole, floor.whole)
    return structure.divided(rows.variant_averages or (widened_by,) * len(structure.figures))


def _to_scale(
    floor: torch.Tensor, before: torch.Tensor, after: torch.Tensor, *, rounding: float
) -> torch.Tensor:
    """Scale the floor of values with squared norms `before` to values with `after`, float64 [T] each."""
    # The median, since a sum that cancels in one token tells nothing of another.
    usual = (floor / before.clamp(min=TINY)).median()
    shrinking = (after / before.clamp(min=TINY)).median().clamp(max=1.0)
    return torch.maximum(torch.maximum(usual, usual.new_tensor(rounding)) * after, shrinking * floor)
