"""Naming: decides which scores explain a layer, and which only come near; all limits are calibrated on right ports.

A clear error must be taken away down to the noise. A faint one, which the noise covers, must correlate with the
predicted error beyond chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from compare.catalogue.candidates import is_list
from compare.diagnosis.score import Score
from compare.noise.yardstick import MOST_LEFT, RIGHT_RHO

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


def most_left(unexplained: float, *, is_fitted: bool = False) -> float:
    """Return the largest ρ that a mistake may leave of the port's ρ, `unexplained`."""
    least = _FITTED_RHO if is_fitted else RIGHT_RHO
    return min(max(least, _LEFT_OF_LARGE_RHO * unexplained), MOST_LEFT)


def is_explanation(score: Score) -> bool:
    """Decide whether a hypothesis explains the port's error.

    - A rounding, of a ρ up to `FAINT_RHO`: by z, amplitude and the share that it takes away.
    - Others must leave little. Of a clear error they must take most away, of each token alike; of a faint one, as for a
      rounding.
    """
    is_clear = score.unexplained >= CLEAR_RHO
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
