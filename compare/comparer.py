"""The comparison of a device run with its golden: a result for every site of the run, the blame, and the verdict.

Its parts are the embedding, each layer and the head (see `ComparedPart`). No verdict is returned before what was read
of both sides is checked against their digests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from compare.blame.blame import group_blame
from compare.blame.operations import join_alike, join_findings
from compare.chains.curve import trace_curve
from compare.judging.held_weights import blame_weights, find_router_dtypes, judge_weights, note_weights
from compare.judging.model_judge import ModelJudge
from compare.limits.criteria import Criteria, layers_without_output
from compare.limits.limits import NOISE_FIGURES
from compare.model_runs.choices import draws_tokens, judge_choices
from compare.model_runs.chunks import join_chunks, judge_own_logits, judge_repetitions, open_chunks
from compare.model_runs.findings import add_findings, blame_findings
from compare.model_runs.passes import compare_passes, is_black_box, split_passes
from compare.model_runs.stream import LAYER_SKIPPED, judge_layer_order, judge_norm_input
from compare.notes import gather_notes, word_tokens
from compare.parts import ComparedPart, declared_sites, judge_layer, judge_outside
from compare.sides.captured_input import CapturedInput
from compare.sides.golden_weights import WeightSource, keep_layer_open
from compare.sides.pairing import declared_layers, refuse_other_runs, select_layers
from compare.sides.sides import Batch, Sides
from compare.untested import find_untested
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.passes import ModelPasses
from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.opening import without_expert_tokens
from minimax_tools.errors import IncomparableError, list_names
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import (
    Blame,
    Comparison,
    GeneratedRow,
    ModelFinding,
    PassLogits,
    SiteResult,
    SiteStatus,
    Verdict,
)

_SITE = "classes"
# Of the layers, the first stands for all.
_FIRST_LAYER, _EACH_LAYER = "layers.0.", "layers.*."
_MOST_NAMED = 6


def judge_classes(passes: ModelPasses) -> ModelFinding | None:
    """Warn of modules that the device gets in another class; None if there are none, or nobody looked."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, pair in (passes.other_classes or {}).items():
        here, there = pair
        places[here, there].append(path.replace(_FIRST_LAYER, _EACH_LAYER, 1))
    if not places:
        return None
    return ModelFinding(
        number=None,
        layer=None,
        sites=(_SITE,),
        reason="; ".join(_word(here, there, paths) for (here, there), paths in places.items()),
        mistake="class_of_the_cpu",
        what="The run had classes of the CPU where the device has others.",
        look_at="where the port chooses a class by its device; run on the device too",
        is_warning=True,
    )


def _word(here: str, there: str, paths: list[str]) -> str:
    where = list_names(paths, most=_MOST_NAMED)
    if not there:
        return f"the device has no {where}, a {here} in this run"
    ran = f"this run had {here}" if here else "this run had none"
    return f"the device gets {there} for {where}, where {ran}: that class is not judged here"


def find_model_faults(
    sides: Sides, embedding: ComparedPart, layers: Sequence[ComparedPart], head: ComparedPart
) -> tuple[ModelFinding, ...]:
    """Gather the findings of a whole port's run: wrong sites by pass, order of layers, chosen tokens; () otherwise."""
    passes = sides.target.read_passes()
    if passes is None:
        return ()
    classes = judge_classes(passes)
    order = judge_layer_order(sides, len(declared_layers(sides.target)))
    # A layer that never ran lacks all its sites: its own finding says why.
    skipped = {finding.layer for finding in order if finding.mistake == LAYER_SKIPPED}
    parts = [embedding, *(part for part in layers if part.layer not in skipped), head]
    findings = [*order, *judge_choices(sides), *judge_repetitions(sides)]
    findings += [finding for part in parts for finding in _of_sites(part)]
    findings += [finding for part in parts for finding in part.cache.findings]
    findings += [] if classes is None else [classes]
    return tuple(sorted(findings, key=lambda finding: finding.order))


def without_norm(
    sides: Sides, head: ComparedPart, *, last_layer: int
) -> tuple[ComparedPart, tuple[ModelFinding, ...]]:
    """Return the head without blame, and a finding, if its norm is wrong because of what it is given."""
    is_blamed = any(str(ModelSite.FINAL_NORM) in blame.sites for blame in head.blame)
    if not is_blamed or sides.weights is None or sides.target.read_passes() is None:
        return head, ()
    number = 0 if head.fault is None else head.fault.number
    with sides.weights.open_head(sides.reference) as weights:
        found = judge_norm_input(sides, weights, last_layer=last_layer, number=number)
    return (head, ()) if found is None else (replace(head, blame=(), fault=None), (found,))


def _of_sites(part: ComparedPart) -> list[ModelFinding]:
    """Return the blamed sites of a part, with the pass in which they are wrong first."""
    fault = part.fault
    blame = part.blame if fault is None else fault.blame
    return [
        ModelFinding(
            number=None if fault is None else fault.number,
            layer=part.layer,
            sites=blamed.sites,
            reason=blamed.reason,
            is_of_sites=True,
        )
        for blamed in blame
    ]


# Name in the place of a site, in the blame of generated tokens.
GENERATED_TOKENS = "generated_tokens"
# Prompts that this blame names.
_MOST_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """A comparison and the evidence that a diagnosis starts from."""

    comparison: Comparison
    sides: Sides
    inputs: Mapping[int, CapturedInput]  # inputs of every layer that ran
    recomputed: tuple[SiteResult, ...] = ()  # second results of sites that fail behind another failing site
    # The same prompts in chunks; None if there were none. `comparison` has what is wrong in them too.
    chunks: JudgedRun | None = None


def compare_captures(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    criteria: Criteria,
    layer_pattern: str,
    weights: WeightSource | None = None,
) -> Comparison:
    """Judge `target` against the golden `reference` (see `judge_run`)."""
    run = judge_run(reference, target, criteria=criteria, layer_pattern=layer_pattern, weights=weights)
    return run.comparison


def judge_run(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    criteria: Criteria,
    layer_pattern: str,
    weights: WeightSource | None = None,
) -> JudgedRun:
    """Judge `target` against the golden `reference`, and keep the evidence.

    `layer_pattern` chooses layers of the run, as `layer_7` or `layer_*`. Sites outside the layers are judged if all
    layers are chosen. With the golden's `weights`, flips (tokens that the port sends to other experts) are judged
    against the golden with the port's experts, and sites behind a failing one are recomputed from the port's values.
    Without them, flips are left out, and no second culprit behind a first is named.

    Raises:
        IncomparableError: The captures must not be judged against each other.
        UsageError: No layer matches the pattern.
        CaptureError: A capture was damaged or changed, even if the judgement itself raised: the digests of all that was
            read are checked on a thread beside it.
    """
    with ExitStack() as proofs:
        # Entered first, the golden's check is left last: if both sides are damaged, the golden's error is raised.
        for side in (reference, target):
            proofs.enter_context(side.proving_beside())
        return _judge_sides(
            reference, target, criteria=criteria, layer_pattern=layer_pattern, weights=weights
        )


def _judge_sides(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    criteria: Criteria,
    layer_pattern: str,
    weights: WeightSource | None,
) -> JudgedRun:
    """Judge a run, and its chunks if it has any, layer by layer."""
    reference, target = without_expert_tokens(reference, target)
    target = target.beside(reference)
    pairing_notes = refuse_other_runs(reference, target)
    layers = select_layers(reference, target, layer_pattern)
    chunks = open_chunks(target, has_weights=weights is not None and criteria.name != "classic")
    with ExitStack() as stack:
        source = stack.enter_context(keep_layer_open(weights))
        runs = [target]
        if isinstance(chunks, CaptureSource):
            stack.enter_context(chunks.proving_beside())
            chunks = chunks.beside(reference)
            runs.append(chunks)
        judges = [
            _RunJudge(reference, run, layers=layers, criteria=criteria, weights=source, num_runs=len(runs))
            for run in runs
        ]
        for layer, following in zip(layers, (*layers[1:], None), strict=True):
            for judge in judges:
                # Both are judged while the layer's weights are open.
                judge.judge_layer(layer, following=following)
        # `source` closes with this block; a diagnosis opens layers again.
        run, *others = (judge.conclude(pairing_notes, weights=weights) for judge in judges)
    if isinstance(chunks, CaptureSource):
        in_chunks = _with_own_logits(run, others[0])
        joined = join_chunks(run.comparison, in_chunks.comparison, chunks)
        return with_untested(replace(run, comparison=joined, chunks=in_chunks))
    return with_untested(replace(run, comparison=replace(run.comparison, chunks=chunks)))


def with_untested(run: JudgedRun) -> JudgedRun:
    """Say anew what a run's comparison has not looked at."""
    return replace(run, comparison=replace(run.comparison, untested=find_untested(run.sides, run.comparison)))


def _with_own_logits(run: JudgedRun, chunks: JudgedRun) -> JudgedRun:
    """Judge a black box's logits in chunks by its own of the same tokens, which have the noise of one port."""
    split = split_passes(chunks.sides)
    if split is None or not is_black_box(run.sides.target):
        return chunks
    findings = judge_own_logits(run.sides, chunks.sides, split)
    return replace(chunks, comparison=add_findings(chunks.comparison, findings))


class _RunJudge:
    """Judges one of `num_runs` device runs part by part: its layers one by one, then what is outside them."""

    def __init__(
        self,
        reference: CaptureSource,
        target: CaptureSource,
        *,
        layers: tuple[int, ...],
        criteria: Criteria,
        weights: WeightSource | None,
        num_runs: int,
    ) -> None:
        self._layers = layers
        self._model_sites = _declared_model_sites(target) if layers == declared_layers(target) else ()
        graph = reference.graph
        num_sites = len(self._model_sites) + sum(
            len(declared_sites(target, layer, graph=graph)) for layer in layers
        )
        sides = Sides(
            reference=reference,
            target=target,
            batch=Batch.of(reference, target),
            # The more figures are judged, the wider is each one's limit, for the same chance of a false alarm.
            criteria=replace(criteria, num_figures=num_runs * num_sites * len(NOISE_FIGURES)),
            weights=weights,
        )
        self._split = split_passes(sides) if weights is not None and not sides.is_classic else None
        if self._split is not None:
            # Each figure is judged for all tokens, for the prefill and for the decoded ones.
            sides = replace(
                sides, criteria=replace(sides.criteria, num_figures=3 * sides.criteria.num_figures)
            )
        self._sides = sides
        self._parts: list[ComparedPart] = []

    def judge_layer(self, layer: int, *, following: int | None) -> None:
        """Judge a layer; `following` is the next one, None behind the last."""
        if following is not None:
            self._sides.reference.read_ahead(following)
            self._sides.target.read_ahead(following)
        self._parts.append(judge_layer(self._sides, layer, split=self._split))

    def conclude(self, pairing_notes: tuple[str, ...], *, weights: WeightSource | None) -> JudgedRun:
        """Judge what is outside the layers, and put all together; `weights` are for a later diagnosis."""
        sides, split, sites = self._sides, self._split, self._model_sites
        of_head = tuple(site for site in sites if site is not ModelSite.EMBEDDING)
        embedding = judge_outside(sides, tuple(site for site in sites if site not in of_head), split=split)
        head = judge_outside(sides, of_head, split=split)
        head, findings = without_norm(sides, head, last_layer=max(self._layers))
        findings = (*find_model_faults(sides, embedding, self._parts, head), *findings)
        findings = tuple(sorted(findings, key=lambda finding: finding.order))
        generated: tuple[GeneratedRow, ...] = ()
        pass_logits: tuple[PassLogits, ...] = ()
        if ModelSite.LOGITS in sites:
            pass_logits = compare_passes(sides, split)
            generated = _judge_generated(sides, last_layer=max(self._layers))
        comparison = _conclude(sides, embedding, self._parts, head, generated=generated, findings=findings)
        notes = pairing_notes + comparison.notes
        return JudgedRun(
            comparison=replace(comparison, notes=notes, pass_logits=pass_logits),
            sides=replace(sides, weights=weights),
            inputs={
                part.layer: part.captured_input
                for part in self._parts
                if part.layer is not None and part.captured_input is not None
            },
            recomputed=tuple(result for part in self._parts for result in part.recomputed),
        )


def _judge_generated(sides: Sides, *, last_layer: int) -> tuple[GeneratedRow, ...]:
    """Compare what both sides generated; a port that draws its tokens at random is not judged by them."""
    generated = ModelJudge(sides, last_layer=last_layer).judge_generated()
    passes = sides.target.read_passes()
    if passes is None or not draws_tokens(passes):
        return generated
    reason = "the port seems to draw its tokens at random"
    return tuple(
        replace(row, status=SiteStatus.NOT_JUDGED, reason=reason) if row.status is SiteStatus.FAIL else row
        for row in generated
    )


def _conclude(
    sides: Sides,
    embedding: ComparedPart,
    layers: Sequence[ComparedPart],
    head: ComparedPart,
    *,
    generated: tuple[GeneratedRow, ...],
    findings: tuple[ModelFinding, ...],
) -> Comparison:
    """Put the parts together: results, blame, verdict and notes."""
    reference, target = sides.reference, sides.target
    sites = tuple(result for part in (*layers, embedding, head) for result in part.results)
    # What a blame rests on: of a site judged again, the second result.
    grounds = (*sites, *(result for part in layers for result in part.recomputed))
    last = (ComparedPart(blame=blame_findings(findings)), _generated_part(generated, sides.criteria))
    blame = join_alike(_gather_blame([embedding, *layers, head, *last]), grounds)
    if sides.is_classic and _is_chained(target, layers):
        # The classic limits cannot tell a layer's mistake from one before it.
        blame = ()
    weights = judge_weights(sides, sites)
    blame = blame_weights(blame, weights)
    outputs_missing = layers_without_output(sites) if sides.is_classic else ()
    # Sites that differ, perhaps through an input that was not captured.
    num_undecided = sum(part.num_undecided for part in (*layers, head))
    # Layers in which a mistake may have passed.
    unproved = [part.layer for part in layers if part.layer is not None and not part.is_proved]
    is_stopped = any(part.is_stopped for part in (*layers, head))
    is_end_unproved = bool(outputs_missing if sides.is_classic else unproved)
    router_dtypes = find_router_dtypes(reference, target, sites)
    # A port that shows no layer leaves all of them open: one note says so.
    is_closed = is_black_box(target)
    return Comparison(
        reference=address_of(reference.directory),
        target=address_of(target.directory),
        port=_name_port(target),
        criteria=sides.criteria.name,
        verdict=_decide_verdict(
            frozenset(site.status for site in sites),
            blame,
            is_incomplete=is_stopped or num_undecided > 0 or is_end_unproved,
            warns=bool(router_dtypes) or any(finding.is_warning for finding in findings),
        ),
        sites=sites,
        blame=blame,
        blame_groups=group_blame(blame, grounds),
        curve=trace_curve(
            [part.point for part in layers if part.point is not None], sites, target=target, golden=reference
        ),
        notes=gather_notes(
            sides,
            sites,
            blame,
            layers_of_unknown_input=[
                part.layer for part in layers if part.is_input_unknown and not is_closed
            ],
            num_undecided=0 if is_closed else num_undecided,
            unproved=() if is_closed else unproved,
            router_dtypes=router_dtypes,
            outputs_missing=outputs_missing,
        )
        + _cache_notes(layers)
        + note_weights(weights, blame, reference.graph),
        router_dtypes=router_dtypes,
        weights=weights,
        generated=generated,
        findings=join_findings(findings, blame),
        tokens=word_tokens(reference, target),
    )


def _cache_notes(layers: Sequence[ComparedPart]) -> tuple[str, ...]:
    """Say of which layers the cache is not what mm2 knows, and was not judged or is right in another form."""
    by_note: dict[str, list[int]] = {}
    for part in layers:
        if part.layer is not None and part.cache.note:
            by_note.setdefault(part.cache.note, []).append(part.layer)
    return tuple(f"the cache of {word_layers(numbers)}: {note}" for note, numbers in by_note.items())


def _declared_model_sites(target: CaptureSource) -> tuple[ModelSite, ...]:
    description = target.known_description
    return description.run.model_sites if description is not None else target.model_sites()


def _generated_part(generated: tuple[GeneratedRow, ...], criteria: Criteria) -> ComparedPart:
    """Return the generated tokens as a last part, with a blame if noise does not explain them.

    Its errors may be inherited from any part before it.
    """
    failing = [row for row in generated if row.status is SiteStatus.FAIL]
    if not failing or criteria.name == "classic":
        return ComparedPart(is_inherited=True)
    rows = "; ".join(
        f"prompt {row.row}: token {row.num_alike} is {row.target}, the golden's is {row.reference}, {row.reason}"
        for row in failing[:_MOST_ROWS]
    )
    more = f"; and {len(failing) - _MOST_ROWS} more" if len(failing) > _MOST_ROWS else ""
    blame = Blame(layer=None, sites=(GENERATED_TOKENS,), reason=rows + more)
    return ComparedPart(blame=(blame,), is_inherited=True)


def _gather_blame(parts: Sequence[ComparedPart]) -> tuple[Blame, ...]:
    """Return the blame of all parts; behind a blamed part, those that inherit errors are not blamed."""
    blame: list[Blame] = []
    for part in parts:
        if not (part.is_inherited and blame):
            blame.extend(part.blame)
    return tuple(blame)


def _is_chained(target: CaptureSource, layers: Sequence[ComparedPart]) -> bool:
    """Decide whether layers ran on each other's outputs, or may have: an input was not captured."""
    description = target.known_description
    if description is not None:
        return description.run.mode is Mode.CHAINED
    return any(part.is_inherited or part.is_input_unknown for part in layers)


def _name_port(target: CaptureSource) -> str:
    """Return what made a run; an empty text for a recording, which does not say."""
    try:
        return target.description.provenance.target
    except IncomparableError:
        return ""


def _decide_verdict(
    statuses: frozenset[SiteStatus],
    blame: tuple[Blame, ...],
    *,
    is_incomplete: bool,
    warns: bool,
) -> Verdict:
    if blame or SiteStatus.FAIL in statuses:
        return Verdict.FAIL
    if is_incomplete or not any(status.is_compared for status in statuses):
        return Verdict.INCOMPARABLE
    return Verdict.WARN if warns or SiteStatus.WARN in statuses else Verdict.PASS
