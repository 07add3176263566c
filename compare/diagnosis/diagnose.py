"""The diagnosis of a device run: which known mistakes explain its layers. `diagnose` is the library's entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from compare.comparer import compare_captures
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
from compare.sides.batch import Batch
from compare.sides.captured_input import CapturedInput, read_captured_input
from compare.sides.golden_weights import CheckpointWeights, refuse_other_model
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import IncomparableError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
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
        target: The device run; its layers were fed the golden's values, each by itself, or each other's outputs.
        model: The checkpoint's folder.
        layers: The layers to diagnose, to blame or not; None for those that the comparison blames.
        mistakes: Names of the mistakes to try; empty for the whole catalogue.
        progress: Told of every layer.

    Raises:
        IncomparableError: The captures must not be compared, are not of this checkpoint, or of no layer that is to
            be diagnosed both sides hold what it was fed.
        CheckpointError: The checkpoint cannot be read.
        UsageError: A mistake is not in the catalogue, or the run has no such layer.
    """
    entries = find_mistakes(mistakes, also=MODEL_CATALOGUE)
    golden = _own_capture(reference)
    criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    pattern = f"layer_{layers[0]}" if layers is not None and len(layers) == 1 else "layer_*"
    weights = CheckpointWeights(model=str(model))
    comparison = compare_captures(golden, target, criteria=criteria, layer_pattern=pattern, weights=weights)
    chosen = layers if layers is not None else _blamed_layers(comparison)
    sides = Sides(reference=golden, target=target, batch=Batch.of(golden, target), criteria=criteria)
    judged = {site.layer for site in comparison.sites if site.layer is not None}
    seen = {layer: _find_feed(sides, layer) for layer in (sorted(judged) if layers is None else layers)}
    feeds = {layer: feed for layer in chosen if (feed := seen[layer]) is not None}
    has_model = layers is None or judged <= set(layers)
    sites, site_notes = (
        _diagnose_model(sides, comparison, golden=golden, model=model, mistakes=find_model_mistakes(mistakes))
        if has_model
        else ((), ())
    )
    if chosen and not feeds and all(site.is_right for site in sites):
        raise _not_held(chosen[0])
    found = (
        _diagnose_layers(
            golden,
            target,
            model=model,
            suspects={layer: _suspects(comparison, layer) for layer in feeds},
            where={layer: _where(comparison, layer) for layer in feeds},
            handed_on=frozenset(layer for layer, feed in feeds.items() if feed.is_handed_on),
            mistakes=entries,
            progress=progress or NoProgress(),
        )
        if feeds
        else ()
    )
    diagnosed = tuple(found)
    blame = tuple(
        one
        for one in comparison.blame
        if (has_model if one.layer is None else layers is None or one.layer in layers)
    )
    return Diagnosis(
        reference=str(golden.directory),
        target=str(target.directory),
        is_failed=any(
            site.status is SiteStatus.FAIL
            for site in comparison.sites
            if layers is None or site.layer in layers
        )
        or bool(blame)
        # What a chain's comparison allows for, the port's own input does not excuse.
        or any(feeds[one.layer].is_handed_on and one.unexplained > LIMITS.leaves for one in diagnosed),
        layers=diagnosed,
        sites=sites,
        unexplained=tuple(one for one in blame if not _is_explained(one, diagnosed, sites)),
        notes=(
            *site_notes,
            *(str(_not_held(layer)) for layer in chosen if layer not in feeds),
            *(_chain_notes(seen, chosen) if layers is None else ()),
        ),
    )


def _diagnose_layers(
    golden: CaptureSource,
    target: CaptureSource,
    *,
    model: Path,
    suspects: Mapping[int, frozenset[Site]],
    where: Mapping[int, tuple[str, ...]],
    handed_on: frozenset[int],
    mistakes: Sequence[Mistake],
    progress: Progress,
) -> Iterator[LayerDiagnosis]:
    """One layer after the other; what explained one is tried first on the next."""
    spec = ModelSpec.from_folder(model)
    expected: dict[str, Hypothesis] = {}
    with CheckpointReader(model, layers=range(min(suspects), max(suspects) + 1)) as reader:
        for layer, sites in suspects.items():
            num_bytes_before = reader.num_bytes_read
            refuse_other_model(golden, ModelFingerprint.of(reader, spec, range(layer, layer + 1)), str(model))
            case = LayerCase(
                golden,
                target,
                reader=reader,
                spec=spec,
                layer=layer,
                suspects=sites,
                is_handed_on=layer in handed_on,
            )
            with torch.no_grad():
                outcome = search_layer(
                    case.open_trial(), mistakes, suspects=sites, expected=tuple(expected.values())
                )
            found = [score.hypothesis for score in outcome.named]
            # The last layer's parameters are the likeliest ones of the next.
            expected |= {one.name: one for one in found}
            progress.advance(layer, num_bytes=reader.num_bytes_read - num_bytes_before)
            # A mistake that has a name says where it is; of another its place is all that is known.
            notes = case.notes if outcome.named else (*case.notes, *where[layer])
            yield LayerDiagnosis.of(layer, outcome, sites=case.sites, is_blamed=bool(sites), notes=notes)


def _diagnose_model(
    sides: Sides,
    comparison: Comparison,
    *,
    golden: CaptureSource,
    model: Path,
    mistakes: Sequence[ModelMistake],
) -> tuple[tuple[SiteDiagnosis, ...], tuple[str, ...]]:
    """Return what lies outside the layers, each site on the port's own input to it; and why one could not be judged."""
    target = sides.target
    held = [site for site in ModelSite if site in golden.model_sites() and site in target.model_sites()]
    if not held:
        return (), ()
    blamed = {site for one in comparison.blame if one.layer is None for site in one.sites}
    failing = {one.site for one in comparison.of_layer(None) if one.status is SiteStatus.FAIL}
    last, spec = max(comparison.layers), ModelSpec.from_folder(model)
    found, notes = [], []
    with CheckpointReader(model, layers=range(last, last + 1)) as reader, torch.no_grad():
        refuse_other_model(golden, ModelFingerprint.of(reader, spec, range(last, last + 1)), str(model))
        cases = ModelCases(golden, target, batch=sides.batch, last_layer=last, reader=reader, spec=spec)
        for site in held:
            case = cases.open(site)
            if isinstance(case, SiteCase):
                found.append(search_site(case, mistakes, is_blamed=site in blamed))
            elif site in failing:
                notes.append(f"{site} fails and was not diagnosed: {case}")
    return tuple(found), tuple(notes)


def _is_explained(blame: Blame, layers: Sequence[LayerDiagnosis], sites: Sequence[SiteDiagnosis]) -> bool:
    """Return whether a named mistake explains what the comparison blames."""
    if blame.layer is not None:
        return any(one.named for one in layers if one.layer == blame.layer)
    return any(one.named for one in sites if one.site in blame.sites)


def _blamed_layers(comparison: Comparison) -> tuple[int, ...]:
    return tuple(sorted({blame.layer for blame in comparison.blame if blame.layer is not None}))


def _suspects(comparison: Comparison, layer: int) -> frozenset[Site]:
    return frozenset(Site(site) for blame in comparison.blame if blame.layer == layer for site in blame.sites)


def _where(comparison: Comparison, layer: int) -> tuple[str, ...]:
    """What the wrong tokens and channels of a layer's sites to blame have in common."""
    return tuple(f"{site.site}: {sentence}" for site in comparison.of_layer(layer) for sentence in site.where)


def _find_feed(sides: Sides, layer: int) -> CapturedInput | None:
    """What a layer was fed; None where that is not known, or is not finite."""
    if layer not in sides.target.layers:
        return None
    feed = read_captured_input(sides, layer)
    is_finite = feed.incoming is None or feed.incoming.is_finite
    return feed if feed.is_recorded and is_finite else None


def _chain_notes(feeds: Mapping[int, CapturedInput | None], blamed: tuple[int, ...]) -> tuple[str, ...]:
    """What a comparison of a chained run may have missed, and how to look closer."""
    handed_on = [layer for layer, feed in feeds.items() if feed is not None and feed.is_handed_on]
    if not set(handed_on) - set(blamed):
        return ()
    return (
        f"{word_layers(handed_on)} were fed each other's outputs, and the comparison allows for the errors that they "
        "were handed: --layer-pattern 'layer_*' judges every layer on the port's own input",
    )


def _own_capture(reference: CaptureSource) -> CaptureSource:
    if reference.known_description is None:
        raise IncomparableError(
            f"{reference.directory} does not say which model and tokens it is of",
            expected="a golden of mm2's own",
            next_step="Capture one: mm2-gpu extract-all --model DIR.",
        )
    return reference


def _not_held(layer: int) -> IncomparableError:
    return IncomparableError(
        f"what layer {layer} was fed is not held on both sides, or not finite: its own mistakes cannot be told from "
        "what it was handed",
        next_step=f"Capture the layer's input too, or run mm2-test single-layer --layer {layer} --golden DIR, and "
        "diagnose that run.",
    )
