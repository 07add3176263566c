"""The diagnosis of a device run: the known mistakes that explain its layers, and the sites outside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch

from compare.blame.blame import join_causes
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.mistake import Hypothesis, Mistake
from compare.catalogue.outside import MODEL_CATALOGUE, ModelMistake
from compare.catalogue.words import require_fitting, require_known
from compare.comparer import JudgedRun, judge_run
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, PassedOver, SiteDiagnosis
from compare.diagnosis.layer_group import withdraw_rare, withdraw_unequal
from compare.diagnosis.outside import diagnose_outside
from compare.diagnosis.search import LayerSearch
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.noise.yardstick import RIGHT_RHO
from compare.sides.golden_weights import CheckpointWeights, WeightSource
from compare.sides.pairing import declared_layers, is_of_shape
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.run_commands import RunCommands
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.sites import Site
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import WEIGHTS, Blame, Comparison, SiteResult, SiteStatus, Verdict

# Layers blamed for the same sites that are diagnosed in vain, before the others are passed over: each costs a whole
# search, and the first alone may be an exception.
_MOST_IN_VAIN = 2

Entry = TypeVar("Entry", Mistake, ModelMistake)
# The sites of each blame of a cause.
_Place = tuple[tuple[str, ...], ...]
_SITES = frozenset(map(str, Site))

# From the number of layers that are diagnosed, or of proofs, to the context of their progress.
OpenProgress = Callable[[int], AbstractContextManager[Progress]]


def diagnose(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    model: str | Path,
    layers: tuple[int, ...] | None = None,
    mistakes: tuple[str, ...] = (),
    open_progress: OpenProgress = lambda _: nullcontext(NoProgress()),
    take_run: Callable[[JudgedRun], None] = lambda _: None,
) -> Diagnosis:
    """Name the known mistakes that explain a device run's layers.

    Args:
        reference: The golden, a capture of mm2's own.
        target: The device run, isolated or chained.
        model: Folder or hub id of the checkpoint; of a hub's, the shards of the layers that are needed are fetched.
        layers: Layers to diagnose, blamed or not; None for those that the comparison blames, without those that are
            like two that nothing explains. Sites outside the layers are diagnosed unless some of the run's layers are
            left out here.
        mistakes: Names of the mistakes to try; empty for the whole catalogue.
        open_progress: Opens the progress that receives each diagnosed layer.
        take_run: Takes the judged run, before mistakes are searched: for a report of both.

    Raises:
        IncomparableError: The captures must not be compared, are not of this checkpoint, or hold no layer's input.
        CheckpointError: The checkpoint cannot be read.
        UsageError: A mistake is not in the catalogue, or the run has no such layer.
    """
    require_known(mistakes)
    if reference.known_description is None:
        raise IncomparableError(
            f"{reference.directory} does not say which model and tokens it is of",
            expected="a golden of mm2's own",
            next_step="Capture one: mm2-gpu extract-all --model DIR.",
        )
    require_fitting(mistakes, reference.graph)
    weights = CheckpointWeights(model=str(model))
    run = judge_run(
        reference,
        target,
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        # A pattern cannot list several layers: then all are judged, and the others are passed over below.
        layer_pattern=f"layer_{layers[0]}" if layers is not None and len(layers) == 1 else "layer_*",
        weights=weights,
    )
    take_run(run)
    # Whoever asks for some of the layers does not ask for the sites outside them.
    includes_outside = layers is None or set(declared_layers(target)) <= set(layers)
    return diagnose_run(
        run,
        weights=weights,
        layers=layers,
        includes_outside=includes_outside,
        mistakes=mistakes,
        open_progress=open_progress,
    )


def diagnose_run(
    run: JudgedRun,
    *,
    weights: WeightSource,
    layers: tuple[int, ...] | None = None,
    includes_outside: bool = True,
    mistakes: tuple[str, ...] = (),
    open_progress: OpenProgress = lambda _: nullcontext(NoProgress()),
) -> Diagnosis:
    """Name the known mistakes that explain a run that was judged, as `diagnose` does."""
    comparison, reference, target = run.comparison, run.sides.reference, run.sides.target
    sites, site_notes = (
        diagnose_outside(run, reference, weights, _chosen(MODEL_CATALOGUE, mistakes))
        if includes_outside
        else ((), ())
    )
    chosen = _blamed_layers(comparison) if layers is None else layers
    judgeable = tuple(layer for layer in chosen if _has_finite_input(run, layer))
    # Nothing was diagnosed, and nothing can be.
    if chosen and not judgeable and all(site.is_right for site in sites):
        raise _lacks_input(run, chosen[0])
    with open_progress(len(judgeable)) as progress:
        found = list(
            _diagnose_layers(
                run,
                reference,
                weights,
                judgeable,
                mistakes=[
                    mistake for mistake in _chosen(CATALOGUE, mistakes) if mistake.fits(reference.graph)
                ],
                passes_over=layers is None,
                tries_shapes=bool(mistakes),
                progress=progress,
            )
        )
    equal = withdraw_unequal(found)
    diagnoses = withdraw_rare(equal, _passed_over(run, judgeable, equal))
    unproved = _word_unproved(comparison, layers, diagnoses)
    # The blame of the chosen layers, and of sites outside the layers if these are diagnosed.
    wrong = [
        blamed
        for blamed in comparison.blame
        if (includes_outside if blamed.layer is None else layers is None or blamed.layer in layers)
    ]
    blame = [blamed for blamed in wrong if blamed.sites != (WEIGHTS,)]
    return Diagnosis(
        reference=address_of(reference.directory),
        target=address_of(target.directory),
        model_type=reference.family.model_type,
        graph=reference.graph,
        is_failed=bool(wrong)
        or _has_failing_site(run, layers)
        or _is_any_wrong_on_port_input(run, diagnoses),
        layers=diagnoses,
        sites=sites,
        weights=tuple(blamed for blamed in wrong if blamed.sites == (WEIGHTS,)),
        unexplained_blame=tuple(blamed for blamed in blame if not _is_explained(blamed, diagnoses, sites)),
        passed_over=_passed_over(run, judgeable, diagnoses),
        notes=(
            *reference.row_notes,
            *site_notes,
            *(str(_lacks_input(run, layer)) for layer in chosen if layer not in judgeable),
            *(_chain_notes(run, chosen) if layers is None else ()),
            *(comparison.notes if unproved else ()),
        ),
        unproved=unproved,
        untested=comparison.untested,
    )


def _word_unproved(
    comparison: Comparison, layers: tuple[int, ...] | None, diagnoses: Sequence[LayerDiagnosis]
) -> str:
    """Tell how much an incomparable run showed; empty if each of the chosen layers was diagnosed all the same."""
    is_settled = layers is not None and set(layers) <= {diagnosis.layer for diagnosis in diagnoses}
    if comparison.verdict is not Verdict.INCOMPARABLE or is_settled:
        return ""
    return f"compared {comparison.compared} of {comparison.of} sites"


def _chosen(catalogue: Mapping[str, Entry], names: tuple[str, ...]) -> tuple[Entry, ...]:
    """Return the mistakes of these names, those of other places passed over; all of them if no name is given."""
    return tuple(mistake for name, mistake in catalogue.items() if not names or name in names)


def _blamed_layers(comparison: Comparison) -> tuple[int, ...]:
    return tuple(
        sorted({blame.layer for blame in comparison.blame if blame.layer is not None and _is_of_sites(blame)})
    )


def _is_of_sites(blame: Blame) -> bool:
    """Decide whether sites of a layer are blamed, in what the run's prefill and steps gave: not its cache, or order."""
    return not blame.in_chunks and all(site in _SITES for site in blame.sites)


def _has_finite_input(run: JudgedRun, layer: int) -> bool:
    captured = run.inputs.get(layer)
    return (
        captured is not None and captured.is_recorded and (captured.error is None or captured.error.is_finite)
    )


def _lacks_input(run: JudgedRun, layer: int) -> IncomparableError:
    commands = RunCommands.of(run.sides.reference, run.sides.target)
    return IncomparableError(
        f"the input of layer {layer} is not held on both sides, or not finite: its own mistakes cannot be told from "
        "inherited errors",
        next_step=f"Capture the layer's input too, or run mm2-test single-layer --layer {layer} on the golden, and "
        "diagnose that run.",
        commands=() if commands is None or commands.port is None else (commands.single_layer(layer),),
    )


def _diagnose_layers(
    run: JudgedRun,
    golden: CaptureSource,
    source: WeightSource,
    layers: Sequence[int],
    *,
    mistakes: Sequence[Mistake],
    passes_over: bool,
    tries_shapes: bool,
    progress: Progress,
) -> Iterator[LayerDiagnosis]:
    """Diagnose one layer after the other; mistakes that explain a layer are tried first on the next ones.

    With `passes_over`, a cause is passed over if it names the same sites as that of two layers which nothing explains;
    after the first of these, pairs of mistakes are not tried on it.
    Nothing is tried on a layer that fails by shapes alone, unless `tries_shapes`.
    """
    expected: dict[str, Hypothesis] = {}
    # By the sites of a cause that nothing explained: the mistakes that led nowhere, for each time.
    in_vain: defaultdict[_Place, list[frozenset[str]]] = defaultdict(list)
    for layer in layers:
        blame = _blame_of(run, layer)
        wrong_shapes = _find_wrong_shapes(run.comparison, layer)
        if wrong_shapes and not tries_shapes:
            progress.advance(layer, num_bytes=0)
            yield _diagnose_shapes(run.comparison, layer, wrong_shapes, blame=blame)
            continue
        causes = {
            cause: _worth_trying(mistakes, in_vain[_place(cause)] if passes_over else ())
            for cause in join_causes(blame) or ((),)
            if not passes_over or len(in_vain[_place(cause)]) < _MOST_IN_VAIN
        }
        if not causes:
            continue
        with source.open_layer(layer, golden) as weights, torch.no_grad():
            search = LayerSearch(
                run=run,
                golden=golden,
                layer=layer,
                weights=weights,
                blame=blame,
                in_vain=frozenset(cause for cause in causes if passes_over and in_vain[_place(cause)]),
            )
            found = search.explain(causes, expected=expected)
            progress.advance(layer, num_bytes=weights.tensors.reader.num_bytes_read)
        for part in found:
            if not part.diagnosis.named:
                in_vain[part.diagnosis.place].append(part.hopeless)
            yield part.diagnosis


def _worth_trying(mistakes: Sequence[Mistake], in_vain: Sequence[frozenset[str]]) -> Sequence[Mistake]:
    """Return the mistakes to try on a cause like others that nothing explained: without those that led nowhere."""
    return [mistake for mistake in mistakes if not any(mistake.name in hopeless for hopeless in in_vain)]


def _place(cause: Sequence[Blame]) -> _Place:
    return tuple(blame.sites for blame in cause)


def _find_wrong_shapes(comparison: Comparison, layer: int) -> tuple[SiteResult, ...]:
    """Return the failing sites of a layer if all of them fail by their shape; else none."""
    failing = tuple(site for site in comparison.of_layer(layer) if site.status is SiteStatus.FAIL)
    return failing if all(is_of_shape(site.reason) for site in failing) else ()


def _diagnose_shapes(
    comparison: Comparison, layer: int, wrong: Sequence[SiteResult], *, blame: tuple[Blame, ...]
) -> LayerDiagnosis:
    """Return the diagnosis of a layer of which nothing but shapes is wrong: no mistake changes a shape."""
    ratios = {
        Site(site.site): site.noise.whole for site in comparison.of_layer(layer) if site.noise is not None
    }
    return LayerDiagnosis(
        layer=layer,
        sites=tuple(ratios),
        blame=blame,
        unexplained=max(ratios.values(), default=0.0),
        is_of_shape=True,
        notes=tuple(f"{site.site}: {site.reason}" for site in wrong),
    )


def _blame_of(run: JudgedRun, layer: int) -> tuple[Blame, ...]:
    return tuple(blame for blame in run.comparison.blame if blame.layer == layer and _is_of_sites(blame))


def _passed_over(
    run: JudgedRun, layers: Sequence[int], diagnoses: Sequence[LayerDiagnosis]
) -> tuple[PassedOver, ...]:
    """Return the layers with causes that no diagnosis is of, by the layers that they are like."""
    diagnosed = {blame for diagnosis in diagnoses for blame in diagnosis.blame}
    alike: dict[tuple[int, ...], list[int]] = {}
    for layer in layers:
        for cause in join_causes(_blame_of(run, layer)):
            if not diagnosed.issuperset(cause):
                place = _place(cause)
                like = tuple(other.layer for other in diagnoses if other.place == place and not other.named)
                alike.setdefault(like, []).append(layer)
    # A layer with several causes is passed over once.
    return tuple(PassedOver(layers=tuple(dict.fromkeys(passed)), like=like) for like, passed in alike.items())


def _has_failing_site(run: JudgedRun, layers: tuple[int, ...] | None) -> bool:
    """Decide whether a site of the chosen layers fails; None for all sites."""
    failing = [site for site in run.comparison.sites if site.status is SiteStatus.FAIL]
    return any(layers is None or site.layer in layers for site in failing)


def _is_any_wrong_on_port_input(run: JudgedRun, diagnoses: Sequence[LayerDiagnosis]) -> bool:
    """Decide whether a layer that got a wrong input is wrong on that input too; the comparison may excuse it."""
    return any(
        run.inputs[diagnosis.layer].is_inherited and diagnosis.unexplained > RIGHT_RHO
        for diagnosis in diagnoses
    )


def _is_explained(blame: Blame, layers: Sequence[LayerDiagnosis], sites: Sequence[SiteDiagnosis]) -> bool:
    if blame.layer is not None:
        return any(diagnosis.named for diagnosis in layers if blame in diagnosis.blame)
    return any(diagnosis.named for diagnosis in sites if diagnosis.site in blame.sites)


def _chain_notes(run: JudgedRun, blamed: tuple[int, ...]) -> tuple[str, ...]:
    """Note layers of a chained run in which the comparison may have missed a mistake, and how to look closer."""
    inherited = [
        layer
        for layer, captured in run.inputs.items()
        if captured.is_inherited and _has_finite_input(run, layer)
    ]
    if not set(inherited) - set(blamed):
        return ()
    return (
        f"{word_layers(inherited)} ran on each other's outputs, and the comparison allows for the errors that they "
        "inherited: --layer-pattern 'layer_*' judges every layer on the port's own input",
    )
