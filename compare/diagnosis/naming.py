"""Naming: decides which scores explain a layer, and which only come near.

There are two ways to explain an error. A clear one must be taken away down to the noise. A faint one, which the noise
covers, must correlate with the predicted error beyond chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compare.diagnosis.score import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class NamingLimits:
    """Limits on naming a mistake, calibrated on right ports.

    Args:
        leaves: Largest ρ that a mistake may leave: right ports reach it at a site.
        leaves_of_large: The same as a share of the port's ρ; the larger of both limits counts.
        most_leaves: Largest ρ that a mistake may leave, however large the port's ρ is.
        proof: Largest ρ that a mistake may leave to be proved, so that no other mistake is tried.
        proof_of: Least ρ of the port for such a proof: below it, a mistake that is only close leaves as little.
        clear: ρ of the port from which its error is clear, above the noise.
        excess: Least share of a clear error, less the noise, that a mistake must take away.
        faint_below: ρ of the port up to which the noise may cover its mistake.
        faint_z: Least z of a faint mistake; it is high since some 300 hypotheses are tried on a layer.
        faint_amplitude: Largest distance of a faint mistake's amplitude from 1.
        faint_share: Least share of the error's energy that a faint mistake must take away.
        rounding_amplitude: Largest distance of a rounding's amplitude from 1.
        rounding_share: Least share of a clear error's energy that a rounding must take away.
        alike: Least likeness of a mistake, as a share of the largest likeness of any hypothesis.
        same: Factor on the misfit that a later candidate of a mistake must get below to replace an earlier one.
        resembling: Factor on the best misfit up to which mistakes cannot be told apart.
    """

    leaves: float = 2.0
    leaves_of_large: float = 0.01
    most_leaves: float = 10.0
    proof: float = 1.3
    proof_of: float = 10.0
    clear: float = 1.5
    excess: float = 0.8
    faint_below: float = 6.0
    faint_z: float = 8.0
    faint_amplitude: float = 0.3
    faint_share: float = 0.02
    rounding_amplitude: float = 0.5
    rounding_share: float = 0.2
    alike: float = 0.8
    same: float = 0.98
    resembling: float = 1.1


LIMITS = NamingLimits()


def is_explanation(score: Score, limits: NamingLimits = LIMITS) -> bool:
    """Decide whether a hypothesis explains the port's error."""
    is_clear = score.unexplained >= limits.clear
    if score.hypothesis.is_rounding and score.unexplained <= limits.faint_below:
        return (
            score.z >= limits.faint_z
            and abs(score.amplitude - 1.0) <= limits.rounding_amplitude
            and score.explains >= (limits.rounding_share if is_clear else limits.faint_share)
        )
    # A port that is wrong in a large part of the stream has more BF16 noise than the golden.
    most = min(max(limits.leaves, limits.leaves_of_large * score.unexplained), limits.most_leaves)
    if not score.leaves <= most or not score.explains > 0.0:
        return False
    if is_clear:
        # The square of ρ is 1 for noise alone, so what is above 1 is error.
        return 1.0 - (score.leaves**2 - 1.0) / (score.unexplained**2 - 1.0) >= limits.excess
    return (
        score.z >= limits.faint_z
        and abs(score.amplitude - 1.0) <= limits.faint_amplitude
        and score.explains >= limits.faint_share
    )


def is_proof(score: Score, limits: NamingLimits = LIMITS) -> bool:
    """Decide whether a hypothesis explains the port so well that no other mistake needs to be tried."""
    return score.unexplained >= limits.proof_of and score.leaves <= limits.proof


def best_first(scores: Sequence[Score], limits: NamingLimits = LIMITS) -> list[Score]:
    """Return the best score of each mistake, in all rows and in decoded ones; the least misfit comes first."""
    best: dict[tuple[str, bool], Score] = {}
    for score in scores:
        key = (score.hypothesis.name, score.is_decode_only)
        # The first candidate of a mistake is its commonest: a later one must explain more.
        if key not in best or score.misfit < limits.same * best[key].misfit:
            best[key] = score
    return sorted(best.values(), key=lambda score: score.misfit)


def name_mistakes(scores: Sequence[Score], limits: NamingLimits = LIMITS) -> tuple[Score, ...]:
    """Return the scores that explain the port: the best, and those that resemble it; none if nothing explains it."""
    largest = max((score.likeness for score in scores), default=0.0)
    # A rounding is not measured by chance likenesses: one token that goes to other experts may look like any rounding.
    beyond_chance = max((score.likeness for score in scores if score.z >= limits.faint_z), default=0.0)
    explaining = []
    for score in best_first(scores):
        least = limits.alike * (beyond_chance if score.hypothesis.is_rounding else largest)
        if score.likeness >= least and is_explanation(score, limits):
            explaining.append(score)
    return tuple(score for score in explaining if score.misfit <= limits.resembling * explaining[0].misfit)
