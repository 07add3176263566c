"""Chunks and repetitions: a whole port's run in passes of several tokens behind a cache, and of its prompts once more.

What the steps' run shows is not said again of the chunks. T tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

import torch

from compare.limits.limits import computes_in_float32
from compare.model_runs.findings import join_verdicts, named_finding
from compare.model_runs.passes import PassSplit, is_black_box
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import ModelPasses, Repeated, Repetition
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite
from minimax_tools.results.results import ChunkedRun, Comparison, ModelFinding

REPEATED = "repeated_run"
# Largest difference of two runs of one prompt, relative to the logits: that of right ports is noise of their own size.
_NOISE_FACTOR = 4.0
LEAST_DIFFERENCE, _LEAST_IN_FLOAT32 = 0.1, 1e-3
# A few tokens may choose other experts in another pass: fewer than these are judged with those of other passes.
_FEWEST_TOKENS = 4


# What the further runs of a port have shown where its logits depend on what they must not, by the mistake.
_SEEN = {
    "cache_stale": "the same prompts in the same rows of the batch gave other logits the second time",
    "kept_by_shape": "in other rows of the batch the same prompts gave other logits, and the same ones in a shape that "
    "was new",
    "depends_on_neighbours": "a prompt gave other logits where the other rows of the batch held other tokens",
    "depends_on_row": "in other rows of the batch the same prompts gave other logits, whatever tokens lay beside them; "
    "in the same rows they gave the same ones",
}
_SEEN_BY_STEP = (
    "of the steps, which have one shape, the first agrees with the port's own prefill and later ones do not"
)


def judge_repetitions(sides: Sides) -> tuple[ModelFinding, ...]:
    """Judge a run's repetitions of its prompts: the first that differs, and what it depends on."""
    passes = sides.target.read_passes()
    if passes is None or not passes.repetitions:
        return ()
    limit = _limit(sides)

    def find_wrong(kind: Repeated) -> list[Repetition]:
        of_kind = (item for item in passes.repetitions if item.kind is kind)
        return [item for item in of_kind if not item.is_finite or item.difference > limit]

    wrong = find_wrong(Repeated.OTHER_ROWS)
    if wrong:
        cause = _find_cause(passes, {kind: find_wrong(kind) for kind in Repeated})
        return (_describe(wrong, cause, limit=limit),)
    steps = [item for item in passes.repetitions if item.kind is Repeated.WHOLE]
    return _judge_steps(steps, limit=limit) if is_black_box(sides.target) else ()


def judge_own_logits(run: Sides, chunks: Sides, split: PassSplit) -> tuple[ModelFinding, ...]:
    """Judge the logits of a port in chunks by those that it has of the same tokens in prefill and steps.

    Both have the noise of one right port. `split` divides the tokens of the chunks.
    """
    sides = (run.target, chunks.target)
    if any(ModelSite.LOGITS not in side.model_sites() for side in sides):
        return ()
    before, again = (side.read(None, ModelSite.LOGITS).double() for side in sides)
    if before.shape != again.shape:
        return ()
    is_held = torch.ones_like(split.numbers, dtype=torch.bool)
    for side in sides:
        held = side.held_tokens(ModelSite.LOGITS)
        is_held &= is_held if held is None else held
    differences = (again - before).norm(dim=-1) / before.norm(dim=-1)  # [B,S]
    limit = _limit(run)
    together = _median(split.decoded, differences, is_held) if split.decoded else 0.0
    for number, batch in enumerate((split.prefill, *split.steps)):
        num_tokens = int(batch.tokens(is_held).sum())
        found = _median(batch, differences, is_held)
        if found > limit and (num_tokens >= _FEWEST_TOKENS or (number and together > limit)):
            return (
                ModelFinding(
                    number=number,
                    layer=None,
                    sites=(str(ModelSite.LOGITS),),
                    reason=f"the logits of its {num_tokens} tokens differ by {found:.3g} of their norm from the port's "
                    f"own of a prefill or steps, limit {limit:.3g}",
                    look_at="the mask and positions of a pass of several tokens behind a cache, and what it writes",
                ),
            )
    return ()


def _judge_steps(steps: Sequence[Repetition], *, limit: float) -> tuple[ModelFinding, ...]:
    """Judge the steps by the port's own prefill of the same tokens; a few tokens may choose other experts."""
    if not steps or median_low(item.difference for item in steps) <= limit:
        return ()
    first = next(item for item in steps if item.difference > limit)
    return (
        ModelFinding(
            number=first.number,
            layer=None,
            sites=(str(ModelSite.LOGITS),),
            reason=f"the steps have other logits than the port's own prefill of the same tokens: {_word(first)}, limit "
            f"{limit:.3g}",
            look_at="how the cache is written and read, and the mask and position of a step",
        ),
    )


def _find_cause(passes: ModelPasses, wrong: dict[Repeated, list[Repetition]]) -> tuple[str, str] | None:
    """Return the mistake that the further runs speak for, and what they have shown; None if they say nothing."""
    made = {item.kind for item in passes.repetitions}
    first = wrong[Repeated.OTHER_ROWS][0].number
    late = {item.number for item in wrong[Repeated.WHOLE]}
    if wrong[Repeated.SAME_ROWS]:
        cause = "cache_stale"
    elif Repeated.OTHER_SHAPE in made and all(item.number != first for item in wrong[Repeated.OTHER_SHAPE]):
        cause = "kept_by_shape"
    elif first and late and min(late) > 1:
        # Steps that are told from each other by nothing but their number.
        return "kept_by_shape", _SEEN_BY_STEP
    elif wrong[Repeated.OTHER_NEIGHBOURS]:
        cause = "depends_on_neighbours"
    elif {Repeated.OTHER_SHAPE, Repeated.OTHER_NEIGHBOURS} <= made:
        cause = "depends_on_row"
    else:
        return None
    return cause, _SEEN[cause]


def _describe(wrong: Sequence[Repetition], cause: tuple[str, str] | None, *, limit: float) -> ModelFinding:
    first, differs = wrong[0], f"{_word(wrong[0])}, limit {limit:.3g}"
    if cause is not None:
        mistake, seen = cause
        return named_finding(mistake, number=first.number, site=REPEATED, reason=f"{seen}: {differs}")
    return ModelFinding(
        number=first.number,
        layer=None,
        sites=(REPEATED,),
        reason="the same prompts, run once more in other rows of the batch, gave other logits: " + differs,
        look_at="what a prompt shares with earlier prompts, and with the others of its batch",
    )


def _word(repetition: Repetition) -> str:
    if not repetition.is_finite:
        return f"NaN or Inf for prompt {repetition.row}"
    return f"those of prompt {repetition.row} differ by {repetition.difference:.3g} of their norm"


def _limit(sides: Sides) -> float:
    least = _LEAST_IN_FLOAT32 if computes_in_float32(sides.reference) else LEAST_DIFFERENCE
    return max(least, _NOISE_FACTOR * _logits_error(sides))


def _median(batch: Batch, differences: torch.Tensor, is_held: torch.Tensor) -> float:
    """Return the lower median of the tokens that are held; 0 without any."""
    of_batch = batch.tokens(differences)[batch.tokens(is_held)].nan_to_num(nan=torch.inf)
    return float(of_batch.median()) if len(of_batch) else 0.0


def _logits_error(sides: Sides) -> float:
    """Return the median token's relative error of the logits against the golden's; 0 if a side lacks them."""
    if any(ModelSite.LOGITS not in side.model_sites() for side in (sides.reference, sides.target)):
        return 0.0
    golden, port = (
        sides.batch.rows(side.read(None, ModelSite.LOGITS), ModelSite.LOGITS)
        for side in (sides.reference, sides.target)
    )
    held = sides.target.held_tokens(ModelSite.LOGITS)
    if golden.shape != port.shape or not bool(port.isfinite().all()):
        return 0.0
    if held is not None:
        is_held = sides.batch.tokens(held)
        golden, port = golden[is_held], port[is_held]
    errors = (port.double() - golden.double()).norm(dim=-1) / golden.double().norm(dim=-1)
    return float(errors.median())


def open_chunks(target: CaptureSource, *, has_weights: bool) -> CaptureSource | ChunkedRun | None:
    """Open a run's chunks, or say why they are not judged; None if the run is no whole port's.

    Raises:
        CaptureError: Their capture is damaged.
    """
    chunks = target.read_chunks()
    if target.read_passes() is None or chunks is None:
        return None
    passes, run, beside = chunks.read_passes(), target.description, chunks.description
    if passes is None or not chunks.is_complete:
        return ChunkedRun(untested="their run did not come to its end")
    if passes.untested:
        return ChunkedRun(untested=passes.untested)
    if (run.inputs_digest, run.provenance.target_digest) != (
        beside.inputs_digest,
        beside.provenance.target_digest,
    ):
        return ChunkedRun(untested="the run beside which they lie is another one")
    return (
        chunks
        if has_weights
        else ChunkedRun(untested="they are judged with the checkpoint alone: --model DIR")
    )


def join_chunks(run: Comparison, chunks: Comparison, capture: CaptureSource) -> Comparison:
    """Join the judgement of the chunks to that of the run beside which they lie; `capture` is theirs."""
    passes = capture.read_passes()
    assert passes is not None, "chunks are passes"
    findings = tuple(
        replace(finding, in_chunks=True) for finding in chunks.findings if not _is_shown(finding, run)
    )
    places = {(finding.layer, site) for finding in findings for site in finding.sites}
    blame = tuple(
        replace(blamed, in_chunks=True, reason=f"in chunks, {blamed.reason}")
        for blamed in chunks.blame
        if places & {(blamed.layer, site) for site in blamed.sites}
    )
    groups = tuple(
        replace(group, reason=f"in chunks, {group.reason}")
        for group in chunks.blame_groups
        if places & {(layer, site) for layer in group.layers for site in group.sites}
    )
    widths = tuple(max(sizes) for sizes in passes.chunks)
    return replace(
        run,
        verdict=join_verdicts(run.verdict, findings),
        findings=(*run.findings, *findings),
        blame=(*run.blame, *blame),
        blame_groups=(*run.blame_groups, *groups),
        chunks=ChunkedRun(widths=widths, compared=chunks.compared, of=chunks.of),
    )


def _is_shown(finding: ModelFinding, run: Comparison) -> bool:
    """Decide whether the run shows what is wrong in chunks: a wrong layer, or a wrong site outside the layers."""
    return any(
        REPEATED in shown.sites
        or (
            shown.layer == finding.layer
            and (finding.layer is not None or set(shown.sites) & set(finding.sites))
        )
        for shown in run.findings
    )
