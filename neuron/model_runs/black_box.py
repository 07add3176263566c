"""Black box: a whole port that shows none of its layers, judged by its next tokens alone.

Its logits carry the noise of all layers, which no golden holds. So right models that round are computed through all
layers (`golden_logits`): their distance from the exact model is the noise of a right port, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from compare.prompts.noise_level import NoiseLevel
from compare.prompts.prompt_judge import PortLogits, PromptJudge
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.model_findings import ModelFinding
from minimax_tools.results.prompt_results import PhaseShare, PromptResult
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus, Verdict
from minimax_tools.text.answered_prompts import AnsweredPrompt
from neuron.prompt_runs.golden_maker import make_golden_logits

_LOGITS = str(ModelSite.LOGITS)


def judge_black_box(
    comparison: Comparison, capture: Capture, *, reader: CheckpointReader, spec: ModelSpec, folder: Path
) -> Comparison:
    """Judge the logits of a run whose comparison could not; `folder` keeps golden logits from run to run.

    Raises:
        CheckpointError: A weight cannot be read.
        CaptureError: The run is damaged, or golden logits cannot be written.
    """
    prompts = _read_prompts(capture)
    store = LogitsStore.open(folder, reader=reader, spec=spec)
    make_golden_logits(store, [prompt.row for prompt in prompts], reader=reader, spec=spec)
    goldens = [store.read(prompt.row) for prompt in prompts]
    judge = PromptJudge(level=NoiseLevel.of(goldens))
    results = []
    for row, (prompt, golden) in enumerate(zip(prompts, goldens, strict=True)):
        tokens, logits = _read_logits(capture, row)
        port = PortLogits(tokens=tokens, logits=golden.measure(logits, tokens))
        results.append(judge.judge(row, prompt, golden, port))
    return _conclude(comparison, results, together=judge.judge_together(results))


def _read_prompts(capture: Capture) -> list[AnsweredPrompt]:
    """Return the run's rows as prompts, their decoded tokens as answers."""
    num_decoded = capture.description.run.num_decoded
    return [
        AnsweredPrompt(
            name=f"row {number}",
            prompt_ids=tuple(row[: len(row) - num_decoded]),
            answer_ids=tuple(row[len(row) - num_decoded :]),
            prompt="",
        )
        for number, row in enumerate(capture.read_inputs().real_rows())
    ]


def _read_logits(capture: Capture, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a row that the run holds logits of, int64 [t], and these logits, [t,V]."""
    is_real = capture.read_inputs().attention_mask[row].bool()
    held = capture.held_tokens(ModelSite.LOGITS)
    is_held = torch.ones_like(is_real) if held is None else held[row]
    logits = capture.read_model(ModelSite.LOGITS)[row]
    return is_held[is_real].nonzero().flatten(), logits[is_real & is_held]


def _conclude(
    comparison: Comparison, results: Sequence[PromptResult], *, together: Sequence[PhaseShare]
) -> Comparison:
    """Put the judgement of the logits into the comparison: of each row, and of all rows together."""
    finding = _find_fault(results, together)
    status = SiteStatus.PASS if finding is None else SiteStatus.FAIL
    findings = tuple(
        sorted(
            (*comparison.findings, *(() if finding is None else (finding,))), key=lambda found: found.order
        )
    )
    return replace(
        comparison,
        verdict=_verdict(findings),
        sites=tuple(
            _with_status(site, status, reason="" if finding is None else finding.reason)
            for site in comparison.sites
        ),
        findings=findings,
        notes=(
            "the port shows no layer: its logits alone were judged, by the noise of right models through all layers; "
            "a faint mistake passes",
            *comparison.notes,
        ),
    )


def _find_fault(results: Sequence[PromptResult], together: Sequence[PhaseShare]) -> ModelFinding | None:
    """Return the first row that differs beyond noise, or the first phase of all rows; None if none does."""
    beyond = [result for result in results if result.is_beyond]
    phases = [share for share in together if share.is_beyond]
    if beyond:
        first = min(beyond, key=_first_pass)
        number, reason = _first_pass(first), _word(first)
    elif phases:
        number = 0 if phases[0].phase == "prefill" else 1
        reason = (
            f"{100 * phases[0].share:.0f} % of the tokens of the {phases[0].phase} are farther from the exact model "
            f"than right models that round, limit {100 * phases[0].limit:.0f} %"
        )
    else:
        return None
    return ModelFinding(
        number=number,
        layer=None,
        sites=(_LOGITS,),
        reason=reason,
        look_at="its layers: show them by `sites`, or run one as a target of mm2-test sweep",
    )


def _verdict(findings: Sequence[ModelFinding]) -> Verdict:
    if any(not finding.is_warning for finding in findings):
        return Verdict.FAIL
    return Verdict.WARN if findings else Verdict.PASS


def _with_status(site: SiteResult, status: SiteStatus, *, reason: str) -> SiteResult:
    if site.site != _LOGITS or site.layer is not None:
        return site
    return replace(site, status=status, reason=reason)


def _first_pass(result: PromptResult) -> int:
    """Return the first pass that differs beyond noise."""
    if result.first is not None:
        return result.step_of(result.first)
    return 0 if result.prefill.is_beyond else 1


def _word(result: PromptResult) -> str:
    phase = result.prefill if result.prefill.is_beyond else result.phases[-1]
    if phase.first_choice is not None:
        choice = phase.first_choice
        return (
            f"row {result.number}, token {choice.token}: the likeliest next token is {choice.port}, the golden's is "
            f"{choice.golden}, beyond the noise of right models through all layers"
        )
    token = phase.tokens[phase.worst]
    return (
        f"row {result.number}, token {token}: the next tokens diverge by {phase.worst_excess:.3g}× what right models "
        "do through all layers"
    )
