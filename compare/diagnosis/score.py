"""Score: how well a hypothesis fits the values that the port gave at the judging sites. T tokens, F channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from compare.catalogue.mistake import Hypothesis
from compare.noise.yardstick import Yardstick, is_enough, trimmed_mean
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
