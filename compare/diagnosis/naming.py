"""Naming: which of the scores explain a layer, and which only come near. The limits are calibrated on clean ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compare.diagnosis.trial import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class NamingLimits:
    """Limits on naming a mistake.

    Args:
        leaves: Most that it may leave: what a right port may have at a site.
        leaves_of_large: The same as a share of the port's ρ, which counts where that is large.
        most_leaves: Most that it may leave, however large that is.
        proof: Most that it may leave where nothing else is tried, since other layers were explained by it.
        proof_of: Least ρ of the port that it must explain for that: of less, mistakes that are close leave as little.
        clear: ρ of the port from which its error is above the noise.
        excess: Share of the error above the noise that it must take away there.
        faint_below: ρ of the port up to which its error may be of a mistake that the noise covers.
        faint_z: Least z of a mistake below that; some 300 hypotheses are tried on a layer.
        faint_amplitude: By how much its amplitude may differ from 1.
        faint_share: Least share of the whole error's energy that it must take away there.
        rounding_amplitude: By how much the amplitude of a rounding may differ from 1.
        rounding_share: Least share of the whole error's energy that a rounding must take away above the noise.
        alike: Least share of the largest likeness of any hypothesis that a mistake must have: with less it is close to
            what happened at most.
        same: What a later candidate of a mistake must leave, in squares, to be better than an earlier one.
        resembling: How much more a mistake may leave, in squares, than one that it resembles.
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
    """Decide whether a hypothesis explains the port: down to the noise, or, below it, beyond chance."""
    is_clear = score.unexplained >= limits.clear
    if score.hypothesis.is_rounding and score.unexplained <= limits.faint_below:
        return (
            score.z >= limits.faint_z
            and abs(score.amplitude - 1.0) <= limits.rounding_amplitude
            and score.explains >= (limits.rounding_share if is_clear else limits.faint_share)
        )
    # Where a large part of the stream is wrong, BF16 costs more than in the golden.
    most = min(max(limits.leaves, limits.leaves_of_large * score.unexplained), limits.most_leaves)
    if not score.leaves <= most or not score.explains > 0.0:
        return False
    if is_clear:
        return 1.0 - (score.leaves**2 - 1.0) / (score.unexplained**2 - 1.0) >= limits.excess
    return (
        score.z >= limits.faint_z
        and abs(score.amplitude - 1.0) <= limits.faint_amplitude
        and score.explains >= limits.faint_share
    )


def is_proof(score: Score, limits: NamingLimits = LIMITS) -> bool:
    """Decide whether it explains the port so well that no other mistake needs to be tried."""
    return score.unexplained >= limits.proof_of and score.leaves <= limits.proof


def best_first(scores: Sequence[Score], limits: NamingLimits = LIMITS) -> list[Score]:
    """Return the best score of each hypothesis by name, the least misfit first."""
    best: dict[tuple[str, bool], Score] = {}
    for score in scores:
        key = (score.hypothesis.name, score.is_decode_only)
        # The first candidate is the commonest: a later one must explain more.
        if key not in best or score.misfit < limits.same * best[key].misfit:
            best[key] = score
    return sorted(best.values(), key=lambda score: score.misfit)


def name_mistakes(scores: Sequence[Score], limits: NamingLimits = LIMITS) -> tuple[Score, ...]:
    """Return the scores that explain the port: the best, and those that resemble it; none where nothing does."""
    likeness = max((score.likeness for score in scores), default=0.0)
    # One token that goes to other experts may look like any rounding, by chance.
    beyond_chance = max((score.likeness for score in scores if score.z >= limits.faint_z), default=0.0)
    explaining = [
        score
        for score in best_first(scores)
        if is_explanation(score, limits)
        and score.likeness >= limits.alike * (beyond_chance if score.hypothesis.is_rounding else likeness)
    ]
    if not explaining:
        return ()
    most = limits.resembling * explaining[0].misfit
    return tuple(score for score in explaining if score.misfit <= most)
