"""The search outside the layers: the mistakes that explain what a port gives at one site. T tokens, F channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from compare.diagnosis.finding import MistakeFinding, SiteDiagnosis
from compare.diagnosis.model.case import SiteCase
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.naming import LIMITS

_MOST_NEAREST = 3
# Predictions that leave as much to this share, in squares, are the same: the catalogue's order decides.
_SAME = 1.02


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
    findings = list(_try(case, mistakes, null))
    best = _best_of_each(findings)
    most = min(max(LIMITS.leaves, LIMITS.leaves_of_large * null), LIMITS.most_leaves)
    explaining = [one for one in best if one.leaves <= most and one.leaves < null]
    named = [
        one for one in explaining if one.leaves**2 <= LIMITS.resembling * explaining[0].leaves ** 2 + 1e-12
    ]
    names = [one.mistake for one in named]
    return SiteDiagnosis(
        site=case.site,
        unexplained=null,
        is_blamed=is_blamed,
        named=tuple(
            replace(one, resembles=tuple(name for name in names if name != one.mistake)) for one in named
        ),
        nearest=() if named else tuple(best[:_MOST_NEAREST]),
        num_hypotheses=len(findings),
        notes=case.notes,
    )


def _try(case: SiteCase, mistakes: Sequence[ModelMistake], null: float) -> Iterator[MistakeFinding]:
    """Hold every mistake, with each of its candidates, against the port; `null` is ρ without a mistake."""
    for mistake in mistakes:
        for parameters in case.candidates(mistake) if case.may_have(mistake) else ():
            prediction = case.predict(mistake, parameters)
            if prediction is None:
                continue
            leaves = case.unit.rho(case.port, prediction)
            amplitude, z = _project(case, prediction, leaves)
            # An error that is infinite in units of a floor of zero cannot be.
            share = (leaves / null) ** 2 if math.isfinite(null) else 0.0
            yield MistakeFinding(
                layer=None,
                mistake=mistake.name,
                parameters=parameters,
                explains=max(1.0 - share, 0.0),
                leaves=leaves,
                amplitude=amplitude,
                z=z,
                what=mistake.what,
                look_at=mistake.look_at,
                sources=mistake.sources,
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


def _best_of_each(findings: Iterable[MistakeFinding]) -> list[MistakeFinding]:
    """Return the best finding of each mistake, the one that leaves least first."""
    best: dict[str, MistakeFinding] = {}
    for one in findings:
        # The first candidate is the commonest: a later one must explain more.
        if one.mistake not in best or one.leaves**2 * _SAME < best[one.mistake].leaves ** 2:
            best[one.mistake] = one
    most = _SAME * min((one.leaves for one in best.values()), default=0.0) ** 2 + 1e-12
    alike = [one for one in best.values() if one.leaves**2 <= most]
    others = [one for one in best.values() if one.leaves**2 > most]
    return [*alike, *sorted(others, key=lambda one: one.leaves)]
