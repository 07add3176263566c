"""The diagnosis of a device run: which known mistakes explain its layers. `diagnose` is the library's entry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import torch

from compare.comparer import compare_captures
from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.diagnosis.catalogue.catalogue import find_mistakes
from compare.diagnosis.finding import Diagnosis, Finding, LayerDiagnosis
from compare.diagnosis.layer_case import judging_sites, make_scene, open_trial
from compare.diagnosis.layer_weights import LayerWeights
from compare.diagnosis.mistake import Value
from compare.diagnosis.search import Outcome, search_layer
from compare.diagnosis.trial import Score
from compare.feed import read_feed
from compare.judge import Criteria
from compare.sides import Sides
from compare.batch import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import IncomparableError
from minimax_tools.progress import NoProgress, Progress
from minimax_tools.results import Comparison, Verdict
from minimax_tools.sites import Site
from minimax_tools.spec import ModelSpec

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def diagnose(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    model: Path,
    layer_pattern: str | None = None,
    mistakes: tuple[str, ...] = (),
    criteria: Criteria | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Name the known mistakes that explain a device run's layers.

    Args:
        reference: The golden, a capture of mm2's own.
        target: The device run; its layers were fed the golden's values, each by itself.
        model: The checkpoint's folder.
        layer_pattern: The layers to diagnose, to blame or not, such as `layer_7` or `layer_*`; None for those that the
            comparison blames.
        mistakes: Names of the mistakes to try; empty for the whole catalogue.
        criteria: How the comparison judges; by the noise floor where absent.
        progress: Told of every layer.

    Raises:
        IncomparableError: The captures must not be compared, are not of this checkpoint, or no layer that is to be
            diagnosed was fed the golden's own values.
        CheckpointError: The checkpoint cannot be read.
        UsageError: A mistake is not in the catalogue, or no layer matches the pattern.
    """
    entries = find_mistakes(mistakes)
    criteria = criteria or Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    comparison = compare_captures(
        reference, target, criteria=criteria, layer_pattern=layer_pattern or "layer_*"
    )
    golden = _own_capture(reference)
    layers = comparison.layers if layer_pattern is not None else _blamed_layers(comparison)
    progress = progress or NoProgress()
    sides = Sides(
        reference=reference, target=target, batch=Batch.of(reference, target), criteria=criteria
    )
    found = []
    handed_on = [layer for layer in layers if not _is_fed_golden(sides, layer)]
    if layers and len(handed_on) == len(layers):
        raise _chained(handed_on[0])
    spec = ModelSpec.from_folder(model)
    with CheckpointReader(model, layers=_range(layers)) as reader:
        _refuse_other_model(golden, reader, spec, layers)
        for layer in layers:
            if layer not in handed_on:
                found.append(_LayerSearch(golden, target, reader, spec, comparison).run(layer, entries))
                progress.advance(layer, num_bytes=reader.num_bytes_read)
    return Diagnosis(
        reference=str(reference.directory),
        target=str(target.directory),
        verdict_failed=comparison.verdict is Verdict.FAIL,
        blame=comparison.blame,
        layers=tuple(found),
        notes=tuple(str(_chained(layer)) for layer in handed_on),
    )


class _LayerSearch:
    """The search of single layers, with what is the same for all of them."""

    def __init__(
        self,
        golden: Capture,
        target: CaptureSource,
        reader: CheckpointReader,
        spec: ModelSpec,
        comparison: Comparison,
    ) -> None:
        self._golden = golden
        self._target = target
        self._reader = reader
        self._spec = spec
        self._comparison = comparison

    def run(self, layer: int, mistakes: tuple) -> LayerDiagnosis:  # type: ignore[type-arg]
        dtype = _DTYPES[self._golden.description.provenance.dtypes["weights"]]
        description = self._target.known_description
        scene = make_scene(
            self._golden.read_inputs(),
            LayerWeights(self._reader, self._spec, layer=layer, dtype=dtype),
            self._spec,
            num_decoded=description.run.decode_rows if description else 0,
        )
        suspects = frozenset(
            Site(site) for blame in self._comparison.blame if blame.layer == layer for site in blame.sites
        )
        sites = judging_sites(self._golden, self._target, layer, suspects)
        with torch.no_grad():
            trial = open_trial(
                self._golden, self._target, scene=scene, layer=layer, sites=sites, dtype=dtype
            )
            outcome = search_layer(trial, mistakes, suspects=suspects)
        return _describe(layer, sites, outcome)


def _describe(layer: int, sites: tuple[Site, ...], outcome: Outcome) -> LayerDiagnosis:
    named = tuple(_finding(layer, score, outcome.named) for score in outcome.named)
    return LayerDiagnosis(
        layer=layer,
        sites=tuple(str(site) for site in sites),
        unexplained=outcome.null.leaves,
        named=named,
        nearest=() if named else tuple(_finding(layer, score, ()) for score in outcome.nearest),
        num_hypotheses=outcome.num_tried,
    )


def _finding(layer: int, score: Score, alike: tuple[Score, ...]) -> Finding:
    mistakes = score.hypothesis.mistakes
    return Finding(
        layer=layer,
        mistake=score.hypothesis.name,
        parameters=MappingProxyType(dict(_parameters(score))),
        explains=score.explains,
        leaves=score.leaves,
        amplitude=score.amplitude,
        z=score.z,
        what=" ".join(mistake.what for mistake in mistakes),
        look_at="; ".join(mistake.look_at for mistake in mistakes),
        sources=tuple(source for mistake in mistakes for source in mistake.sources),
        resembles=tuple(
            dict.fromkeys(
                other.hypothesis.name
                for other in alike
                if other.hypothesis.name != score.hypothesis.name
            )
        ),
    )


def _parameters(score: Score) -> Iterator[tuple[str, Value]]:
    hypothesis = score.hypothesis
    for mistake, parameters in zip(hypothesis.mistakes, hypothesis.parameters, strict=True):
        for name, value in parameters.items():
            yield (name if len(hypothesis.mistakes) == 1 else f"{mistake.name}.{name}"), value
    if score.is_decode_only:
        yield "rows", "decode"


def _blamed_layers(comparison: Comparison) -> tuple[int, ...]:
    return tuple(sorted({blame.layer for blame in comparison.blame if blame.layer is not None}))


def _is_fed_golden(sides: Sides, layer: int) -> bool:
    if layer not in sides.target.layers:
        return False
    feed = read_feed(sides, layer)
    return feed.is_recorded and not feed.is_handed_on


def _range(layers: tuple[int, ...]) -> range:
    return range(layers[0], layers[-1] + 1) if layers else range(0)


def _own_capture(reference: CaptureSource) -> Capture:
    if not isinstance(reference, Capture):
        raise IncomparableError(
            f"{reference.directory} does not say which model and tokens it is of",
            expected="a golden of mm2's own, made by mm2-gpu",
            next_step="Capture one: mm2-gpu extract-all --model DIR.",
        )
    return reference


def _refuse_other_model(
    golden: Capture, reader: CheckpointReader, spec: ModelSpec, layers: tuple[int, ...]
) -> None:
    if not layers:
        return
    mine = golden.description.provenance.model
    differences = mine.differences(ModelFingerprint.of(reader, spec, _range(layers)))
    if differences:
        raise IncomparableError(
            f"the golden is not of the checkpoint at {reader.folder}",
            found="; ".join(differences),
            next_step=f"Give --model the checkpoint that it was made of: {golden.description.provenance.model_source}.",
        )


def _chained(layer: int) -> IncomparableError:
    return IncomparableError(
        f"layer {layer} was fed another layer's output: nobody can tell its own mistakes from what it was handed",
        next_step=f"Run it on the golden's input: mm2-test single-layer --layer {layer} --golden DIR, and diagnose that.",
    )
