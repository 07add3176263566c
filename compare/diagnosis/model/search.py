"""The search outside the layers: the mistakes that explain what a port gives at one site. T tokens, F channels.

The catalogue of mistakes outside the layers, by name; if two explain a site alike, the earlier is named first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from compare.diagnosis.finding import MistakeFinding, SiteDiagnosis
from compare.diagnosis.model.case import SiteCase
from compare.diagnosis.model.embedding import EMBEDDING_MISTAKES
from compare.diagnosis.model.final_norm import FINAL_NORM_MISTAKES
from compare.diagnosis.model.head import HEAD_MISTAKES
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.naming import RESEMBLING, RIGHT_RHO, most_left

MODEL_CATALOGUE: Mapping[str, ModelMistake] = MappingProxyType(
    {entry.name: entry for entry in (*EMBEDDING_MISTAKES, *FINAL_NORM_MISTAKES, *HEAD_MISTAKES)}
)


def find_model_mistakes(names: tuple[str, ...]) -> tuple[ModelMistake, ...]:
    """Return the mistakes of these names that lie outside the layers; all of them if no name is given.

    Other names are passed over: `find_mistakes` has refused unknown ones.
    """
    if not names:
        return tuple(MODEL_CATALOGUE.values())
    return tuple(MODEL_CATALOGUE[name] for name in names if name in MODEL_CATALOGUE)


_MOST_NEAREST = 3
# Ratio of squares of ρ below which two predictions are equally good: the catalogue's order decides between them.
_SAME = 1.02
# Added to squares of ρ: two that are zero up to float32 are equally good.
_TINY = 1e-12


def search_site(case: SiteCase, mistakes: Sequence[ModelMistake], *, is_blamed: bool) -> SiteDiagnosis:
    """Find which mistakes explain a site; if the site is right on the port's own input, none is tried.

    `is_blamed` says whether the comparison blames the site. `null` is ρ of the port without a mistake.
    """
    null = case.noise.rho(case.port, case.correct)
    if null <= RIGHT_RHO:
        return SiteDiagnosis(site=case.site, unexplained=null, is_blamed=is_blamed, notes=case.notes)
    findings = list(_try_mistakes(case, mistakes, null))
    best = _best_of_each(findings)
    # `leaves` is ρ of the port against the prediction with the mistake, `most_left` the largest that explains.
    explaining = [finding for finding in best if finding.leaves <= most_left(null) and finding.leaves < null]
    named = [
        finding
        for finding in explaining
        if finding.leaves**2 <= RESEMBLING * explaining[0].leaves ** 2 + _TINY
    ]
    names = [finding.mistake for finding in named]
    return SiteDiagnosis(
        site=case.site,
        unexplained=null,
        is_blamed=is_blamed,
        named=tuple(
            replace(finding, resembles=tuple(name for name in names if name != finding.mistake))
            for finding in named
        ),
        nearest=() if named else tuple(best[:_MOST_NEAREST]),
        num_hypotheses=len(findings),
        notes=case.notes,
    )


def _try_mistakes(case: SiteCase, mistakes: Sequence[ModelMistake], null: float) -> Iterator[MistakeFinding]:
    """Compare the port with every mistake and each of its candidates."""
    for mistake in filter(case.may_have, mistakes):
        for parameters in case.candidates(mistake):
            prediction = case.predict(mistake, parameters)
            if prediction is None:
                continue
            leaves = case.noise.rho(case.port, prediction)
            amplitude, z = _fit_amplitude(case, prediction, leaves)
            # The share of the error that the mistake leaves.
            share = (leaves / null) ** 2 if math.isfinite(null) else float(not math.isfinite(leaves))
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


def _fit_amplitude(case: SiteCase, prediction: torch.Tensor, leaves: float) -> tuple[float, float]:
    """Return the factor on the predicted error that fits the port's best, and its ratio to its uncertainty."""
    variance = case.noise.widened(prediction.nan_to_num(nan=0.0))  # of the noise, by channel: [F]
    predicted, error = (prediction - case.correct).double(), (case.port - case.correct).double()
    is_predicted = predicted.isfinite().all(dim=-1)
    predicted, error = predicted[is_predicted], error[is_predicted]
    energy = float((predicted.square() / variance).sum())
    if not 0.0 < energy < math.inf:
        return 0.0, 0.0
    amplitude = float((error * predicted / variance).sum()) / energy
    # Noise alone makes the amplitude uncertain by 1 / √energy, and what the mistake does not explain by `leaves` of it.
    return amplitude, amplitude * math.sqrt(energy) / max(leaves, 1.0)


def _best_of_each(findings: Iterable[MistakeFinding]) -> list[MistakeFinding]:
    """Return the best finding of each mistake: first those as good as the best, in the catalogue's order."""
    best: dict[str, MistakeFinding] = {}
    for finding in findings:
        # The first candidate of a mistake is its commonest: a later one must explain more.
        previous = best.get(finding.mistake)
        if previous is None or finding.leaves**2 * _SAME < previous.leaves**2:
            best[finding.mistake] = finding
    most = _SAME * min((finding.leaves for finding in best.values()), default=0.0) ** 2 + _TINY
    alike = [finding for finding in best.values() if finding.leaves**2 <= most]
    others = [finding for finding in best.values() if finding.leaves**2 > most]
    return [*alike, *sorted(others, key=lambda finding: finding.leaves)]
