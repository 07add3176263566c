"""A ranking of prompts as text and as JSON, and what came of following the worst to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minimax_tools.errors import format_count
from minimax_tools.json_codec import decode
from minimax_tools.results.prompt_results import (
    Followed,
    PhaseResult,
    PromptRanking,
    PromptResult,
    word_flipped,
)
from minimax_tools.results.results import ModelFinding, Verdict
from reports.canvas import Canvas, Row, columns
from reports.data import to_json
from reports.terminal import draw_findings
from reports.views import word_first
from reports.wording import word_figure, word_untested

# More would push the verdict off the screen.
_MOST_LISTED = 20  # prompts in the table
_MOST_DETAILED = 3  # prompts with a section of their own
_MOST_TOKENS = 8  # tokens in a prompt's table
# Characters of a text that are shown.
_EXCERPT = 60
_COLUMNS = columns(
    "<prompt", "<differs from", "error\nof noise", "KL\nprefill", "noise", "KL\ndecode", "noise", "<recorded"
)
_TOKEN_COLUMNS = columns("token", "<pass", "KL", "noise", "error\nof noise", "<")


def render_prompts(
    ranking: PromptRanking,
    *,
    target: str,
) -> str:
    """Draw a ranking as text: the verdict, all prompts, then the worst in detail."""
    canvas = Canvas()
    num_differing = len(ranking.differing)
    style = "bold green" if ranking.verdict is Verdict.PASS else "bold red"
    total = format_count(len(ranking.results), "prompt")
    differ = "differs" if num_differing == 1 else "differ"
    canvas.line(
        f"{ranking.verdict.value.upper()}: {num_differing or 'none'} of {total} {differ} beyond noise",
        style=style,
    )
    for share in ranking.shares:
        if share.is_beyond:
            canvas.line(
                f"{share.phase} of all prompts: {100 * share.share:.0f} % of {share.num_tokens} tokens are farther "
                f"than right models that round, limit {100 * share.limit:.0f} %",
                style=style,
            )
    canvas.line(_extent(ranking))
    flipped = word_flipped(sum(result.num_flipped for result in ranking.results))
    if flipped:
        canvas.line(flipped)
    canvas.facts(
        [
            ("golden", f"{ranking.golden_logits} ({ranking.num_known} kept from earlier runs)"),
            ("port", target),
        ]
    )
    canvas.gap()
    canvas.table(_COLUMNS, [_row(result) for result in ranking.results[:_MOST_LISTED]])
    if len(ranking.results) > _MOST_LISTED:
        canvas.line(f"  and {len(ranking.results) - _MOST_LISTED} more: see --json")
    for place, result in enumerate(ranking.differing[:_MOST_DETAILED]):
        _draw_prompt(canvas, result, ranking)
        if place == 0 and ranking.is_of_batch:
            canvas.paragraph(
                "Alone in its batch it is right. Look at what prompts of a batch share: the mask of the padding, the "
                "row or column whose logits are returned, rows of the cache."
            )
    for note in ranking.notes:
        canvas.item(note)
    untested = word_untested(ranking.untested)
    if ranking.verdict.is_passed and untested:
        canvas.gap()
        canvas.line(untested)
    return canvas.text


def render_followed(followed: Followed) -> str:
    """Draw what came of following the worst prompt as text."""
    canvas = Canvas()
    if followed.exit_code is None:
        canvas.section("Go on to the layer")
        canvas.paragraph("This machine lacks the extra golden. On one that has it, run:")
    else:
        canvas.section("From the worst prompt to the layer")
    for command in followed.commands:
        canvas.line(f"  {command}")
    if followed.exit_code == 0:
        canvas.paragraph(
            "mm2-test model finds no mistake on this prompt in a process of its own. What ran before it may matter: a "
            "cache that keeps something of earlier prompts, or a batch of another size."
        )
    if followed.errors:
        canvas.paragraph(f"It could not judge: {followed.errors}")
    if followed.record is not None:
        _draw_outcome(canvas, followed.record)
        canvas.line(f"  All of it: {followed.report_file}")
    return canvas.text


def prompts_record(ranking: PromptRanking, *, target: str, followed: Followed | None) -> dict[str, Any]:
    """Return a ranking as JSON: verdict, and every prompt with its figures token by token."""
    num_tokens = sum(len(phase.tokens) for result in ranking.results for phase in result.phases)
    return {
        "verdict": ranking.verdict.value,
        "compared": num_tokens,
        "of": num_tokens,
        "blame": [],
        "target": target,
        "golden_logits": ranking.golden_logits,
        "num_known": ranking.num_known,
        "num_prompts": len(ranking.results),
        "num_differing": len(ranking.differing),
        "together": [to_json(share) | {"is_beyond": share.is_beyond} for share in ranking.shares],
        "worst_is_right_alone": ranking.is_of_batch,
        "notes": list(ranking.notes),
        "untested": to_json(ranking.untested),
        "prompts": [_prompt_record(result) for result in ranking.results],
        "followed": None
        if followed is None
        else {
            "commands": list(followed.commands),
            "exit_code": followed.exit_code,
            "report": followed.record,
        },
    }


def _draw_outcome(canvas: Canvas, record: Mapping[str, Any]) -> None:
    """Draw the verdict of `mm2-test model`, and what came first in that run."""
    canvas.gap()
    findings = decode(tuple[ModelFinding, ...], record.get("findings", []))
    verdict = str(record.get("verdict", "incomparable")).upper()
    canvas.line(
        verdict + (f": {word_first(findings)}" if findings else ""), style="bold red" if findings else ""
    )
    draw_findings(canvas, findings)


def _prompt_record(result: PromptResult) -> dict[str, Any]:
    record: dict[str, Any] = to_json(result)
    record |= {
        "is_beyond": result.is_beyond,
        "excess": to_json(result.excess),
        "begins": _word_beginning(result),
        "first_token": result.first,
        "first_step": None if result.first is None else result.step_of(result.first),
    }
    return record


def _extent(ranking: PromptRanking) -> str:
    prefilled = sum(len(result.prefill.tokens) for result in ranking.results)
    decoded = sum(len(result.decode.tokens) for result in ranking.results if result.decode is not None)
    cut = sum(result.num_cut for result in ranking.results)
    text = f"compared next-token distributions after {prefilled} prefilled and {decoded} decoded tokens"
    return text + (f"; {cut} tokens of answers left out" if cut else "")


def _row(result: PromptResult) -> Row:
    decode = result.decode
    return Row(
        cells=(
            result.name,
            _word_beginning(result) if result.is_beyond else "-",
            word_figure(result.excess),
            word_figure(result.prefill.mean_divergence),
            word_figure(result.prefill.mean_noise),
            "" if decode is None else word_figure(decode.mean_divergence),
            "" if decode is None else word_figure(decode.mean_noise),
            {True: "right", False: "wrong", None: ""}[result.is_right],
        ),
        style="red" if result.is_beyond else "",
    )


def _word_beginning(result: PromptResult) -> str:
    """Return the pass and token at which a prompt begins to differ."""
    if not result.is_beyond:
        return ""
    if result.first is None:
        phase = "prefill" if result.prefill.is_beyond else "decode"
        return f"{phase}, many tokens a little"
    return _word_token(result, result.first)


def _word_token(result: PromptResult, token: int) -> str:
    step = result.step_of(token)
    return f"decode step {step}" if step else f"prefill, token {token}"


def _draw_prompt(canvas: Canvas, result: PromptResult, ranking: PromptRanking) -> None:
    canvas.section(f"{result.name}: {_headline(result)}")
    facts = []
    if result.prompt:
        facts.append(("prompt", f"{_excerpt(result.prompt, from_end=True)}"))
    if result.answer:
        rightness = {True: " (right)", False: " (wrong)", None: ""}[result.is_right]
        facts.append(("answer", _excerpt(result.answer) + rightness))
    if result.target:
        facts.append(("target", _excerpt(result.target)))
    if result.golden_log_likelihood is not None and result.answer:
        likelihood = f"golden {word_figure(result.golden_log_likelihood)}, port "
        likelihood += word_figure(result.port_log_likelihood)
        if result.recorded_log_likelihood is not None:
            likelihood += f", recorded {word_figure(result.recorded_log_likelihood)}"
        facts.append(("log-likelihood of the decoded answer", likelihood))
    canvas.facts(facts)
    for phase in result.phases:
        choice = phase.first_choice
        if choice is not None:
            margin = (
                "its logits hold NaN" if choice.margin is None else f"{word_figure(choice.margin)} below it"
            )
            canvas.paragraph(
                f"First differing choice, {_word_token(result, choice.token)}: the golden goes on with "
                f"{_word_id(choice.golden, ranking)}, the port with {_word_id(choice.port, ranking)}, {margin} where "
                f"noise reaches {word_figure(choice.reach)}."
            )
            break
    canvas.table(_TOKEN_COLUMNS, _token_rows(result))


def _headline(result: PromptResult) -> str:
    if not result.prefill.is_beyond:
        assert result.decode is not None, "a prompt that differs does so in a phase"
        first = result.decode.first
        since = "in decoding" if first is None else f"from decode step {result.step_of(first)} on"
        return f"the prefill is right, it differs {since}"
    if result.decode is None or result.decode.is_beyond:
        return "it differs in the prefill already"
    return "it differs in the prefill, and not in decoding"


def _token_rows(result: PromptResult) -> list[Row]:
    """Return rows for the first tokens that differ, and for the worst one."""
    rows: list[tuple[int, Row]] = []
    for phase in result.phases:
        named = sorted({*phase.beyond[: _MOST_TOKENS // 2], phase.tokens[phase.worst], phase.tokens[-1]})
        rows += [(token, _token_row(result, phase, token)) for token in named]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _token_row(result: PromptResult, phase: PhaseResult, token: int) -> Row:
    place = phase.tokens.index(token)
    is_beyond = token in phase.beyond
    return Row(
        cells=(
            str(token),
            _word_token(result, token).partition(",")[0],
            word_figure(phase.divergences[place]),
            word_figure(phase.noises[place]),
            word_figure(phase.excesses[place]),
            "beyond noise" if is_beyond else "",
        ),
        style="red" if is_beyond else "",
    )


def _word_id(token: int, ranking: PromptRanking) -> str:
    if token < 0:
        return "none"
    text = ranking.words.get(token)
    return f"token {token}" if text is None else f"{text!r} ({token})"


def _excerpt(text: str, *, from_end: bool = False) -> str:
    line = " ".join(text.split())
    if len(line) <= _EXCERPT:
        return line
    return f"…{line[-_EXCERPT:]}" if from_end else f"{line[:_EXCERPT]}…"
