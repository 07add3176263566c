"""Black box: a whole port that shows none of its layers, judged by its next tokens alone.

Its logits carry the noise of all layers, which no golden holds. So right models that round are computed through all
layers (`golden_logits`): their distance from the exact model is the noise of a right port, token by token. The golden's
own logits are those of one right model more. In float32 noise does not grow from layer to layer: there one limit holds
for each token.

T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from compare.comparer import JudgedRun
from compare.model_runs.chunks import add_findings, join_verdicts
from compare.model_runs.passes import split_passes
from compare.prompts.logits_verdict import LogitsVerdict, judge_logits
from compare.prompts.prompt_judge import PortLogits
from compare.sides.sides import Batch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_rows import GoldenRows, captured_logits
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.prompt_results import word_flipped
from minimax_tools.results.results import Comparison, ModelFinding, SiteResult, SiteStatus, Verdict
from minimax_tools.text.answered_prompts import split_rows

_LOGITS = str(ModelSite.LOGITS)
_NOTE = "the port shows no layer: its logits alone were judged, by {}; a faint mistake passes"
_MODELS = "the noise of right models through all layers"
# Share of the tokens that may be off in float32: two experts may be nearer to each other than float32 noise.
_MOST_FLIPPED = 0.1


def judge_black_box(
    comparison: Comparison,
    golden: CaptureSource,
    capture: CaptureSource,
    *,
    reader: CheckpointReader,
    spec: ModelSpec,
    folder: Path,
) -> Comparison:
    """Judge the logits of a run whose comparison could not; `folder` keeps golden logits from run to run.

    Raises:
        CheckpointError: A weight cannot be read.
        CaptureError: The golden or the run is damaged, or golden logits cannot be written.
    """
    rows = capture.read_inputs().real_rows()
    prompts = split_rows(rows, num_decoded=capture.description.run.num_decoded)
    store = LogitsStore.open(folder, reader=reader, spec=spec)
    source = GoldenRows(store=store, reader=reader, spec=spec, captured=captured_logits(golden))
    source.make([prompt.row for prompt in prompts])
    ports = []
    for row, prompt in enumerate(prompts):
        tokens, logits = _read_logits(capture, row)
        ports.append(PortLogits(tokens=tokens, logits=source.read(prompt.row).measure(logits, tokens)))
    return _conclude(comparison, judge_logits(prompts, ports, source, through="all layers"))


def judge_in_float32(judged: JudgedRun) -> Comparison:
    """Judge the logits of a float32 run whose comparison could not, against the golden's own.

    Raises:
        CaptureError: A side is damaged.
    """
    sides, split = judged.sides, split_passes(judged.sides)
    assert split is not None, "a whole port has passes"
    # What float32 costs each layer, and the head.
    limit = sides.criteria.noise.float32 * (1 + len(judged.comparison.layers))
    by = f"a limit of {limit:.2g} of their norm, as float32 has it"
    golden, port = (side.read_model(ModelSite.LOGITS).double() for side in (sides.reference, sides.target))
    held = sides.target.held_tokens(ModelSite.LOGITS)
    errors = (port - golden).norm(dim=-1) / golden.norm(dim=-1)  # [B,S]
    is_held = torch.ones_like(split.numbers, dtype=torch.bool) if held is None else held
    is_wrong = is_held & ~(errors <= limit)

    def share_wrong(batch: Batch) -> float:
        num_held = int(batch.tokens(is_held).sum())
        return int(batch.tokens(is_wrong).sum()) / num_held if num_held else 0.0

    # A step has a token of each prompt, so steps are judged together.
    phases = [split.prefill, *([] if split.decoded is None else [split.decoded] * len(split.steps))]
    for number, (phase, batch) in enumerate(zip(phases, (split.prefill, *split.steps), strict=True)):
        if share_wrong(phase) > _MOST_FLIPPED and share_wrong(batch) > _MOST_FLIPPED:
            reason = (
                f"{100 * share_wrong(batch):.0f} % of its tokens have logits that are off by more than {limit:.2g} of "
                f"their norm, up to {float(batch.tokens(errors).max()):.3g}"
            )
            verdict = LogitsVerdict(excess=float(errors.max()) / limit, first_pass=number, reason=reason)
            return _conclude(judged.comparison, verdict, by=by)
    return _conclude(judged.comparison, LogitsVerdict(excess=0.0, first_pass=None, reason=""), by=by)


def _read_logits(capture: CaptureSource, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a row that the run holds logits of, int64 [t], and these logits, [t,V]."""
    is_real = capture.read_inputs().attention_mask[row].bool()
    held = capture.held_tokens(ModelSite.LOGITS)
    is_held = torch.ones_like(is_real) if held is None else held[row]
    logits = capture.read_model(ModelSite.LOGITS)[row]
    return is_held[is_real].nonzero().flatten(), logits[is_real & is_held]


def _conclude(comparison: Comparison, verdict: LogitsVerdict, *, by: str = _MODELS) -> Comparison:
    """Put the judgement of the logits into the comparison; `by` says what judged them."""
    is_told = any(_LOGITS in finding.sites and not finding.in_chunks for finding in comparison.findings)
    status = SiteStatus.PASS
    if verdict.first_pass is not None:
        status = SiteStatus.FAIL
        found = () if is_told else (_describe(verdict.first_pass, verdict.reason),)
        comparison = add_findings(comparison, found)
    flipped = word_flipped(verdict.num_flipped)
    return replace(
        comparison,
        verdict=join_verdicts(Verdict.PASS, comparison.findings),
        sites=tuple(_with_verdict(site, status, verdict) for site in comparison.sites),
        notes=(_NOTE.format(by), *((flipped,) if flipped else ()), *comparison.notes),
    )


def _describe(number: int, reason: str) -> ModelFinding:
    return ModelFinding(
        number=number,
        layer=None,
        sites=(_LOGITS,),
        reason=reason,
        look_at="its layers: show them by `sites`, run one by mm2-test sweep, or, if the port is compiled "
        "whole, replace its stream by mm2-test replacement",
    )


def _with_verdict(site: SiteResult, status: SiteStatus, verdict: LogitsVerdict) -> SiteResult:
    """Return the logits' result with the verdict, and with the noise of all layers in place of the head's alone."""
    if site.site != _LOGITS or site.layer is not None:
        return site
    logits = site.logits
    if logits is not None and verdict.noise is not None:
        mean, percentile = verdict.noise
        logits = replace(
            logits,
            kl_mean_foreseen=mean,
            kl_p95_foreseen=percentile,
            num_explained=max(logits.num_disagreeing - verdict.num_choices, 0),
            worst_choices=(),
        )
    return replace(site, status=status, reason=verdict.reason, logits=logits)
