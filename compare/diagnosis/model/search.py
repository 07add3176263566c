"""The search outside the layers: the mistakes that explain what a port gives at one site. T tokens, F channels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from compare.diagnosis.finding import MistakeFinding, SiteDiagnosis
from compare.diagnosis.mistake import Parameters
from compare.diagnosis.model.case import SiteCase
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.naming import LIMITS

_MOST_NEAREST = 3
# Predictions that leave as much to this share, in squares, are the same: the catalogue's order decides.
_SAME = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """A mistake's fit to the port.

    Args:
        order: Its place in the catalogue.
        mistake: The mistake.
        parameters: Its parameters.
        leaves: ρ that it leaves.
        amplitude: The port's error along the predicted one.
        z: That in units of its uncertainty.
    """

    order: int
    mistake: ModelMistake
    parameters: Parameters
    leaves: float
    amplitude: float
    z: float


def search_site(case: SiteCase, mistakes: Sequence[ModelMistake], *, is_blamed: bool) -> SiteDiagnosis:
    """Find the mistakes that explain a site; of a site that is right by its own input none is tried.

    Args:
        case: The port's values and what they are computed from.
        mistakes: The catalogue's entries to try.
        is_blamed: Whether the comparison blames the site.
    """
    null = case.unit.rho(case.port, case.right)
    if null <= LIMITS.leaves:
        return SiteDiagnosis(site=case.site, unexplained=null, is_blamed=is_blamed, notes=case.notes)
    scores = list(_scores(case, mistakes))
    best = _best_of_each(scores)
    most = min(max(LIMITS.leaves, LIMITS.leaves_of_large * null), LIMITS.most_leaves)
    explaining = [one for one in best if one.leaves <= most and one.leaves < null]
    named = [
        one for one in explaining if one.leaves**2 <= LIMITS.resembling * explaining[0].leaves ** 2 + 1e-12
    ]
    names = [one.mistake.name for one in named]
    nearest = () if named else best[:_MOST_NEAREST]
    return SiteDiagnosis(
        site=case.site,
        unexplained=null,
        is_blamed=is_blamed,
        named=tuple(_finding(one, null, alike=names) for one in named),
        nearest=tuple(_finding(one, null, alike=()) for one in nearest),
        num_hypotheses=len(scores),
        notes=case.notes,
    )


def _scores(case: SiteCase, mistakes: Sequence[ModelMistake]) -> Iterator[_Score]:
    for order, mistake in enumerate(mistakes):
        if not case.may_have(mistake):
            continue
        for parameters in mistake.candidates(case.scene, case.port):
            prediction = case.predict(mistake, parameters)
            if prediction is None:
                continue
            leaves = case.unit.rho(case.port, prediction)
            amplitude, z = _project(case, prediction, leaves)
            yield _Score(
                order=order, mistake=mistake, parameters=parameters, leaves=leaves, amplitude=amplitude, z=z
            )


def _project(case: SiteCase, prediction: torch.Tensor, leaves: float) -> tuple[float, float]:
    variance = case.unit.widened(prediction.nan_to_num(nan=0.0))
    predicted, error = (prediction - case.right).double(), (case.port - case.right).double()
    told = predicted.isfinite().all(dim=-1)
    predicted, error = predicted[told], error[told]
    across = float((predicted.square() / variance).sum())
    if not (0.0 < across < math.inf):
        return 0.0, 0.0
    amplitude = float((error * predicted / variance).sum()) / across
    return amplitude, amplitude * math.sqrt(across) / max(leaves, 1.0)


def _best_of_each(scores: Sequence[_Score]) -> list[_Score]:
    """Return the best score of each mistake, the one that leaves least first."""
    best: dict[str, _Score] = {}
    for score in scores:
        name = score.mistake.name
        # The first candidate is the commonest: a later one must explain more.
        if name not in best or score.leaves**2 * _SAME < best[name].leaves ** 2:
            best[name] = score
    ordered = sorted(best.values(), key=lambda score: score.leaves)
    if not ordered:
        return []
    alike = [one for one in ordered if one.leaves**2 <= _SAME * ordered[0].leaves ** 2 + 1e-12]
    return [*sorted(alike, key=lambda score: score.order), *ordered[len(alike) :]]


def _finding(score: _Score, null: float, *, alike: Sequence[str]) -> MistakeFinding:
    mistake = score.mistake
    # An error that is infinite in units of a floor of zero cannot be.
    share = (score.leaves / null) ** 2 if math.isfinite(null) else 0.0
    return MistakeFinding(
        layer=None,
        mistake=mistake.name,
        parameters=MappingProxyType(dict(score.parameters)),
        explains=max(1.0 - share, 0.0),
        leaves=score.leaves,
        amplitude=score.amplitude,
        z=score.z,
        what=mistake.what,
        look_at=mistake.look_at,
        sources=mistake.sources,
        resembles=tuple(name for name in alike if name != mistake.name),
    )
