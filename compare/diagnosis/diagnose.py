"""The diagnosis of a device run: the known mistakes that explain its layers. `diagnose` is the library's entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from compare.comparer import JudgedRun, judge_run
from compare.diagnosis.catalogue.catalogue import find_mistakes
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, SiteDiagnosis
from compare.diagnosis.layer_case import LayerCase
from compare.diagnosis.mistake import Hypothesis, Mistake
from compare.diagnosis.model.case import ModelCases, SiteCase
from compare.diagnosis.model.catalogue import MODEL_CATALOGUE, find_model_mistakes
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.model.search import search_site
from compare.diagnosis.naming import LIMITS
from compare.diagnosis.search import search_layer
from compare.limits.criteria import DEFAULT_ATOL, DEFAULT_RTOL, Criteria
from compare.sides.golden_weights import CheckpointWeights, WeightSource
from minimax_tools.capture.source import CaptureSource
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import IncomparableError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame, Comparison, SiteStatus
from reports.wording import word_layers


def diagnose(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    model: Path,
    layers: tuple[int, ...] | None = None,
    mistakes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Diagnosis:
    """Name the known mistakes that explain a device run's layers.

    Args:
        reference: The golden, a capture of mm2's own.
        target: The device run, isolated or chained.
        model: The checkpoint's folder.
        layers: The layers to diagnose, to blame or not; None for those that the comparison blames.
        mistakes: Names of the mistakes to try; empty for the whole catalogue.
        progress: Told of every layer.

    Raises:
        IncomparableError: The captures must not be compared, are not of this checkpoint, or hold the input of no
            layer that is to be diagnosed.
        CheckpointError: The checkpoint cannot be read.
        UsageError: A mistake is not in the catalogue, or the run has no such layer.
    """
    entries = find_mistakes(mistakes, also=MODEL_CATALOGUE)
    if reference.known_description is None:
        raise IncomparableError(
            f"{reference.directory} does not say which model and tokens it is of",
            expected="a golden of mm2's own",
            next_step="Capture one: mm2-gpu extract-all --model DIR.",
        )
    weights = CheckpointWeights(model=str(model))
    run = judge_run(
        reference,
        target,
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        layer_pattern=f"layer_{layers[0]}" if layers is not None and len(layers) == 1 else "layer_*",
        weights=weights,
    )
    comparison = run.comparison
    chosen = layers if layers is not None else _blamed_layers(comparison)
    has_model = layers is None or set(comparison.layers) <= set(layers)
    sites, site_notes = (
        _diagnose_outside(run, reference, weights, find_model_mistakes(mistakes)) if has_model else ((), ())
    )
    judgeable = tuple(layer for layer in chosen if _has_finite_input(run, layer))
    if chosen and not judgeable and all(site.is_right for site in sites):
        raise _not_held(chosen[0])
    diagnosed = tuple(
        _diagnose_layers(
            run, reference, weights, judgeable, mistakes=entries, progress=progress or NoProgress()
        )
    )
    blame = tuple(
        one
        for one in comparison.blame
        if (has_model if one.layer is None else layers is None or one.layer in layers)
    )
    is_failing = any(
        site.status is SiteStatus.FAIL and (layers is None or site.layer in layers)
        for site in comparison.sites
    )
    # A chain's comparison allows for inherited errors; on the port's own input there are none.
    is_wrong_alone = any(
        run.inputs[one.layer].is_inherited and one.unexplained > LIMITS.leaves for one in diagnosed
    )
    return Diagnosis(
        reference=str(reference.directory),
        target=str(target.directory),
        is_failed=is_failing or bool(blame) or is_wrong_alone,
        layers=diagnosed,
        sites=sites,
        unexplained=tuple(one for one in blame if not _is_explained(one, diagnosed, sites)),
        notes=(
            *site_notes,
            *(str(_not_held(layer)) for layer in chosen if layer not in judgeable),
            *(_chain_notes(run, chosen) if layers is None else ()),
        ),
    )


def _diagnose_layers(
    run: JudgedRun,
    golden: CaptureSource,
    source: WeightSource,
    layers: Sequence[int],
    *,
    mistakes: Sequence[Mistake],
    progress: Progress,
) -> Iterator[LayerDiagnosis]:
    """Diagnose one layer after the other; mistakes that explained one are tried first on the next."""
    expected: dict[str, Hypothesis] = {}
    for layer in layers:
        suspects = frozenset(
            Site(site) for one in run.comparison.blame if one.layer == layer for site in one.sites
        )
        with source.open_layer(layer, golden) as weights, torch.no_grad():
            case = LayerCase(
                golden,
                run.sides.target,
                weights=weights,
                layer=layer,
                suspects=suspects,
                is_inherited=run.inputs[layer].is_inherited,
            )
            outcome = search_layer(
                case.open_trial(), mistakes, suspects=suspects, expected=tuple(expected.values())
            )
            progress.advance(layer, num_bytes=weights.tensors.reader.num_bytes_read)
        # The last layer's parameters are the likeliest ones of the next.
        expected |= {one.hypothesis.name: one.hypothesis for one in outcome.named}
        # A mistake that has a name says where it is; of another its place is all that is known.
        notes = case.notes if outcome.named else (*case.notes, *_word_regions(run.comparison, layer))
        yield LayerDiagnosis.of(layer, outcome, sites=case.sites, is_blamed=bool(suspects), notes=notes)


def _diagnose_outside(
    run: JudgedRun, golden: CaptureSource, source: WeightSource, mistakes: Sequence[ModelMistake]
) -> tuple[tuple[SiteDiagnosis, ...], tuple[str, ...]]:
    """Diagnose the sites outside the layers, each on the port's own input; and note those that could not be judged."""
    comparison, target = run.comparison, run.sides.target
    held = [site for site in ModelSite if site in golden.model_sites() and site in target.model_sites()]
    if not held:
        return (), ()
    blamed = {site for one in comparison.blame if one.layer is None for site in one.sites}
    failing = {one.site for one in comparison.of_layer(None) if one.status is SiteStatus.FAIL}
    last = max(comparison.layers)
    found, notes = [], []
    with source.open_layer(last, golden) as weights, torch.no_grad():
        cases = ModelCases(golden, target, batch=run.sides.batch, last_layer=last, weights=weights)
        for site in held:
            case = cases.open(site)
            if isinstance(case, SiteCase):
                found.append(search_site(case, mistakes, is_blamed=site in blamed))
            elif site in failing:
                notes.append(f"{site} fails and was not diagnosed: {case}")
    return tuple(found), tuple(notes)


def _is_explained(blame: Blame, layers: Sequence[LayerDiagnosis], sites: Sequence[SiteDiagnosis]) -> bool:
    """Decide whether a named mistake explains a blame."""
    if blame.layer is not None:
        return any(one.named for one in layers if one.layer == blame.layer)
    return any(one.named for one in sites if one.site in blame.sites)


def _blamed_layers(comparison: Comparison) -> tuple[int, ...]:
    return tuple(sorted({blame.layer for blame in comparison.blame if blame.layer is not None}))


def _word_regions(comparison: Comparison, layer: int) -> tuple[str, ...]:
    """Say where the wrong tokens and channels of a layer's blamed sites lie."""
    return tuple(f"{site.site}: {sentence}" for site in comparison.of_layer(layer) for sentence in site.where)


def _has_finite_input(run: JudgedRun, layer: int) -> bool:
    """Decide whether both sides hold a layer's input, and it is finite."""
    captured = run.inputs.get(layer)
    return (
        captured is not None and captured.is_recorded and (captured.error is None or captured.error.is_finite)
    )


def _chain_notes(run: JudgedRun, blamed: tuple[int, ...]) -> tuple[str, ...]:
    """Note layers of a chained run in which the comparison may have missed a mistake, and how to look closer."""
    inherited = [
        layer for layer, one in run.inputs.items() if one.is_inherited and _has_finite_input(run, layer)
    ]
    if not set(inherited) - set(blamed):
        return ()
    return (
        f"{word_layers(inherited)} ran on each other's outputs, and the comparison allows for the errors that they "
        "inherited: --layer-pattern 'layer_*' judges every layer on the port's own input",
    )


def _not_held(layer: int) -> IncomparableError:
    return IncomparableError(
        f"the input of layer {layer} is not held on both sides, or not finite: its own mistakes cannot be told from "
        "inherited errors",
        next_step=f"Capture the layer's input too, or run mm2-test single-layer --layer {layer} --golden DIR, and "
        "diagnose that run.",
    )
