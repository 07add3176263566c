"""Score: fit of a hypothesis to the values that the port gave at the judging sites, and what counts as an explanation.

All limits are calibrated on right ports. A clear error must be taken away down to the noise. A faint one, which the
noise covers, must correlate with the predicted error beyond chance. T tokens, F channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from compare.catalogue.candidates import is_list
from compare.catalogue.mistake import Hypothesis
from compare.noise.yardstick import MOST_LEFT, RIGHT_RHO, Yardstick, is_enough, trimmed_mean
from minimax_tools.model.sites import Site

# Tokens of which a difference is told, at least.
_FEWEST_TOKENS = 6
# Effective number of tokens, (Σx)² / Σx² of their weights: with fewer, one token decides, and the spread over tokens
# says nothing of the uncertainty.
_FEWEST_EFFECTIVE = 4.0
# Standard errors from which a mean over tokens is beyond chance.
_LEAST_ERRORS = 4.0
# Mean square of a token's rest along the predicted error, in units of noise, that is noise: a right port's, and the
# golden's own.
_NOISE_ALONG = 4.0
# A mistake may leave what a right port may have, `RIGHT_RHO`. A port that is wrong in a large part of the stream has
# more BF16 noise than the golden: of a ρ above 200, a hundredth may be left, at most 10.
_LEFT_OF_LARGE_RHO = 0.01
# The same of a mistake with a number that was fitted to the port: a number fits what is only close, too.
_FITTED_RHO = 1.5
# A mistake that leaves at most 1.3 of a ρ of 10 or more is proved: nothing else is tried. Of a smaller ρ, a mistake
# that is only close leaves as little.
_PROOF_LEFT, PROOF_RHO = 1.3, 10.0
# ρ from which an error is clear, above the noise, and the least share of its ρ² - 1 that a mistake must take away.
CLEAR_RHO = 1.5
_CLEAR_SHARE = 0.9
# Least share of the energy that it must take away where ρ is above FAINT_RHO: a mistake that makes noise itself grow
# may leave little of it, and yet explain nothing.
_LEAST_TAKEN = 0.8
# Largest unevenness of what explains a clear error, over 1 / ρ, and of what explains one of any size: the factor on its
# predicted error is then the same for all tokens. Of 761 layers with a mistake of the catalogue, at most 7 are beyond.
_UNEVEN_IN_NOISE, _MOST_UNEVEN = 0.32, 0.02
# ρ up to which the noise may cover a mistake. Such a mistake needs a high z, since some 300 hypotheses are tried on a
# layer; its amplitude must be close to 1, and it must take away some of the error's energy.
FAINT_RHO = 6.0
_FAINT_Z, _FAINT_AMPLITUDE_OFF, _FAINT_SHARE = 8.0, 0.3, 0.02
# The same for a mistake that rounds values, which can be predicted only in part; the share is for a clear error.
_ROUNDING_AMPLITUDE_OFF, _ROUNDING_SHARE = 0.5, 0.2
# Least likeness of a mistake, as a share of the largest likeness of any hypothesis.
_LIKENESS_SHARE = 0.8
# Factor on the misfit that a later candidate of a mistake must get below to replace an earlier, commoner one.
_BETTER = 0.98
# Factor on the squared ρ of the best mistake up to which others cannot be told from it.
RESEMBLING = 1.1
_NONE = torch.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Score:
    """Fit of a hypothesis to the port's values, over the tokens that count."""

    hypothesis: Hypothesis  # the supposed mistake
    is_decode_only: bool  # whether the mistake was assumed in decoded tokens alone
    leaves: float  # ρ of the port against the hypothesis, at the site where it is largest
    unexplained: float  # the same ρ against the layer without a mistake
    misfit: float  # ρ² against the hypothesis, averaged over the sites
    explains: float  # share of the error's energy that the hypothesis takes away
    amplitude: float  # factor on the predicted error that fits the port's best; about 1 if it is the cause
    z: float  # the amplitude in units of its own uncertainty over tokens
    likeness: float  # squared correlation of the port's error with the predicted one
    # Distance of a token's own amplitude from `amplitude`, beyond noise: about 0 for the cause.
    unevenness: float = 0.0
    # Mean ρ² against the hypothesis over the sites, by token: float64 [T]; NaN for tokens that do not count.
    misfits: torch.Tensor = _NONE
    energies: torch.Tensor = (
        _NONE  # squared norm of the predicted error in units of noise, by token: float64 [T]
    )
    # The predicted error itself on the tokens that count, all sites in one: bfloat16 [n]; empty unless asked for.
    predicted: torch.Tensor = _NONE

    @property
    def is_silent(self) -> bool:
        """True if the hypothesis predicts no error on these tokens: they say nothing of it."""
        return self.amplitude == 0.0 and self.likeness == 0.0

    def is_worse_than(self, misfits: torch.Tensor) -> bool:
        """Decide whether the hypothesis leaves more of the error than other misfits [T] do, beyond chance."""
        return _is_beyond_chance(self.misfits - misfits)

    def is_better_than(self, misfits: torch.Tensor) -> bool:
        """Decide whether the hypothesis leaves less of the error than other misfits [T] do, beyond chance."""
        return _is_beyond_chance(misfits.log1p() - self.misfits.log1p())


def _is_beyond_chance(differences: torch.Tensor) -> bool:
    """Decide whether the mean of differences by token [T] is positive beyond chance; NaN do not count."""
    counted = differences[differences.isfinite()]
    if len(counted) < _FEWEST_TOKENS:
        return False
    error = float(counted.std()) / math.sqrt(len(counted))
    return float(counted.mean()) > _LEAST_ERRORS * error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SitePrediction:
    """Values of a site under a hypothesis; `growth`, float32 [T] or [1], is their squared norm less the right one."""

    rows: torch.Tensor  # the values, float32 [T,F]
    growth: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    def limited_to(self, is_decoded: torch.Tensor, exact: torch.Tensor) -> SitePrediction:
        """Keep the prediction on decoded tokens, bool [T], and the right values `exact` [T,F] on all others."""
        return SitePrediction(
            rows=torch.where(is_decoded[:, None], self.rows, exact),
            growth=torch.where(is_decoded, self.growth, 0.0),
        )


def score_predictions(
    hypothesis: Hypothesis,
    predictions: Mapping[Site, SitePrediction],
    *,
    yardsticks: Mapping[Site, Yardstick],
    judged: torch.Tensor,
    is_decode_only: bool,
    keeps_predicted: bool = False,
) -> Score:
    """Score the predictions of a hypothesis by the port's values; `judged`, bool [T], are the tokens that count."""
    # Mean squares of the port's error in units of noise, at each site: against the hypothesis, and against the right
    # layer with its own noise and with the hypothesis's.
    left, without, without_widened = [], [], []
    misfits, predicted = [], []
    product = rest_along = predicted_energy = error_energy = torch.zeros(len(judged), dtype=torch.float64)
    for site, yardstick in yardsticks.items():
        prediction = predictions[site].rows
        variance = yardstick.widened(predictions[site].growth)
        misfits.append(yardstick.misfit(prediction, variance))
        left.append(trimmed_mean(misfits[-1][judged]))
        without.append(trimmed_mean(yardstick.misfit(yardstick.exact, yardstick.variance)[judged]))
        without_widened.append(trimmed_mean(yardstick.misfit(yardstick.exact, variance)[judged]))
        projection = yardstick.project(prediction, variance)
        if keeps_predicted:
            error = torch.where(judged[:, None], (prediction - yardstick.exact) / variance.sqrt(), 0.0)
            predicted.append(error.bfloat16().flatten())
        product = product + projection.product
        rest_along = rest_along + projection.rest
        predicted_energy = predicted_energy + projection.predicted_energy
        error_energy = error_energy + projection.error_energy
    is_told = is_enough(judged)
    rest, before = sum(left), sum(without_widened)
    amplitude, z = _fit_amplitude(product[judged], predicted_energy[judged])
    return Score(
        hypothesis=hypothesis,
        is_decode_only=is_decode_only,
        leaves=math.sqrt(max(left)) if is_told else math.inf,
        unexplained=math.sqrt(max(without)),
        misfit=rest / len(left) if is_told else math.inf,
        explains=1.0 - rest / before if before > 0.0 and math.isfinite(rest) else 0.0,
        amplitude=amplitude,
        z=z,
        likeness=_likeness(product[judged], predicted_energy[judged], error_energy[judged]),
        # The port's error shares roundings with the golden's; where the golden sent a token elsewhere, the rest is free
        # of that.
        unevenness=min(
            _unevenness((product - amplitude * predicted_energy)[judged], predicted_energy[judged]),
            _unevenness(rest_along[judged], predicted_energy[judged]),
        ),
        misfits=torch.where(judged, torch.stack(misfits).mean(0), torch.nan),
        energies=torch.where(judged, predicted_energy, 0.0),
        predicted=torch.cat(predicted) if predicted else _NONE,
    )


def _fit_amplitude(product: torch.Tensor, predicted_energy: torch.Tensor) -> tuple[float, float]:
    """Return the factor on the predicted error that fits best over tokens, and its ratio to its uncertainty.

    The ratio is 0 if so few tokens weigh that nothing tells the uncertainty. For the sums [T] see `Projection`.
    """
    total = float(predicted_energy.sum())
    if total <= 0.0 or not math.isfinite(total) or not bool(product.isfinite().all()):
        return 0.0, 0.0
    amplitude = float(product.sum()) / total
    if total**2 < _FEWEST_EFFECTIVE * float(predicted_energy.square().sum()):
        return amplitude, 0.0
    spread = float((product - amplitude * predicted_energy).square().sum().sqrt())
    return amplitude, amplitude * total / spread if spread > 0.0 else math.inf


def _unevenness(rest: torch.Tensor, predicted_energy: torch.Tensor) -> float:
    """Return by how much the factor on the predicted error differs between most tokens, beyond noise.

    `rest` [T] is what is left along the predicted error. A factor on a site, say, fits the mean of what an epsilon
    does, and leaves a little in each channel: that lies along what it predicts.
    """
    is_predicted = predicted_energy > 0.0
    energy = predicted_energy[is_predicted]
    if not len(energy):
        return 0.0
    along = trimmed_mean(rest[is_predicted].square() / energy)
    return math.sqrt(max(along - _NOISE_ALONG, 0.0) / float(energy.mean()))


def _likeness(product: torch.Tensor, predicted_energy: torch.Tensor, error_energy: torch.Tensor) -> float:
    """Return the squared correlation of the port's error with the predicted one; 0 if either is zero or infinite."""
    energies = float(predicted_energy.sum() * error_energy.sum())
    return float(product.sum()) ** 2 / energies if 0.0 < energies < math.inf else 0.0


def most_left(unexplained: float, *, is_fitted: bool = False) -> float:
    """Return the largest ρ that a mistake may leave of the port's ρ, `unexplained`."""
    least = _FITTED_RHO if is_fitted else RIGHT_RHO
    return min(max(least, _LEFT_OF_LARGE_RHO * unexplained), MOST_LEFT)


def is_explanation(score: Score) -> bool:
    """Decide whether a hypothesis explains the port's error.

    - A rounding, of a ρ up to `FAINT_RHO`: by z, amplitude and the share that it takes away.
    - Others must leave little. Of a clear error they must take most away, of each token alike; of a faint one, as for a
      rounding. Lists of numbers explain no faint error: they would fit noise.
    """
    is_clear = score.unexplained >= CLEAR_RHO
    if score.hypothesis.has_list and not is_clear:
        return False
    if score.hypothesis.is_rounding and score.unexplained <= FAINT_RHO:
        return (
            score.z >= _FAINT_Z
            and abs(score.amplitude - 1.0) <= _ROUNDING_AMPLITUDE_OFF
            and score.explains >= (_ROUNDING_SHARE if is_clear else _FAINT_SHARE)
        )
    least = _LEAST_TAKEN if score.unexplained > FAINT_RHO else 0.0
    allowed = most_left(score.unexplained, is_fitted=score.hypothesis.is_fitted)
    if not score.leaves <= allowed or not score.explains > least:
        return False
    if is_clear:
        if score.unevenness > math.hypot(_UNEVEN_IN_NOISE / score.unexplained, _MOST_UNEVEN):
            return False
        # The square of ρ is 1 for noise alone, so what is above 1 is error.
        return 1.0 - (score.leaves**2 - 1.0) / (score.unexplained**2 - 1.0) >= _CLEAR_SHARE
    return (
        score.z >= _FAINT_Z
        and abs(score.amplitude - 1.0) <= _FAINT_AMPLITUDE_OFF
        and score.explains >= _FAINT_SHARE
    )


def is_proof(score: Score) -> bool:
    """Decide whether a hypothesis explains the port so well that no other mistake needs to be tried."""
    return score.unexplained >= PROOF_RHO and score.leaves <= _PROOF_LEFT


def best_first(scores: Sequence[Score]) -> list[Score]:
    """Return the best score of each mistake, of all tokens and of decoded ones; the least misfit comes first."""
    best: dict[tuple[str, bool], Score] = {}
    for score in scores:
        key = (score.hypothesis.name, score.is_decode_only)
        if key not in best or score.misfit < _BETTER * best[key].misfit:
            best[key] = score
    return sorted(best.values(), key=lambda score: score.misfit)


def name_mistakes(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Return the scores that explain the port: the best, and those that resemble it; none if nothing explains it.

    A factor on a site, which is no known mistake, is no name; nor is a mistake with a number of its own where such a
    factor explains the port as well.
    """
    return _names(_resembling(scores))


def describe_port(scores: Sequence[Score]) -> Score | None:
    """Return the factor on a site that explains the port where no known mistake does; None without one."""
    resembling = _resembling(scores)
    if _names(resembling):
        return None
    return next((score for score in resembling if not score.hypothesis.is_named), None)


def _names(resembling: list[Score]) -> tuple[Score, ...]:
    if any(not score.hypothesis.is_named for score in resembling):
        resembling = [
            score for score in resembling if score.hypothesis.is_factor or not score.hypothesis.has_number
        ]
    named = [score for score in resembling if score.hypothesis.is_named]
    # A number for each expert or token is no better than one for all.
    simple = [score for score in named if not _has_list(score)]
    return tuple(simple or named)


def _resembling(scores: Sequence[Score]) -> list[Score]:
    """Return the scores that explain the port best, and which the tokens cannot tell apart; the best comes first."""
    largest = max((score.likeness for score in scores), default=0.0)
    # A rounding is held only against likenesses that z proves: a token that goes to other experts may by chance give a
    # hypothesis a large likeness.
    beyond_chance = max((score.likeness for score in scores if score.z >= _FAINT_Z), default=0.0)
    explaining = []
    for score in best_first(scores):
        least = _LIKENESS_SHARE * (beyond_chance if score.hypothesis.is_rounding else largest)
        if score.likeness >= least and is_explanation(score) and not _is_one_factor(score, scores):
            explaining.append(score)
    return [
        score
        for score in explaining
        if score.misfit <= RESEMBLING * explaining[0].misfit
        and not score.is_worse_than(explaining[0].misfits)
    ]


def _is_one_factor(score: Score, scores: Sequence[Score]) -> bool:
    """Decide whether a number for each expert or token is no better than one factor for all, explain it or not."""
    return _has_list(score) and any(
        other.misfit <= RESEMBLING * score.misfit
        for other in scores
        if other.hypothesis.is_factor or not other.hypothesis.is_named
    )


def _has_list(score: Score) -> bool:
    return any(is_list(value) for parameters in score.hypothesis.parameters for value in parameters.values())
