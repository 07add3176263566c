"""A whole port's run as text: what came first, and its next tokens by pass."""

from __future__ import annotations

from collections.abc import Sequence

from minimax_tools.capture.passes import pass_name
from minimax_tools.errors import format_count
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import ChunkedRun, ModelFinding, PassLogits
from reports.canvas import Canvas, Column, Row
from reports.wording import word_figure, word_sites

_PASS_COLUMNS = [
    Column(title="pass", is_text=True),
    *(Column(title=title) for title in ("tokens", "same\nlikeliest", "KL\nmean", "KL\nworst", "worst\nat")),
]
# The findings of one cause.
_Cause = tuple[ModelFinding, ...]
# More would push the verdict off the screen.
_MOST_SHOWN = 6


def draw_findings(canvas: Canvas, findings: Sequence[ModelFinding]) -> None:
    """Draw the findings, the first in the run at the front; layers with the same finding are one entry."""
    if not findings:
        return
    canvas.section("What came first")
    groups = _group(findings)
    for group in groups[:_MOST_SHOWN]:
        cause = group[0]
        first = cause[0]
        if len(cause) == 1:
            canvas.paragraph(f"{_word_group(group)}: {first.reason}")
        else:
            canvas.paragraph(f"{_word_group(group)}: one cause, the {first.operation}")
            for finding in cause:
                canvas.paragraph(f"{finding.sites[-1]}: {finding.reason}", indent=4)
        if first.mistake is not None:
            parameters = ", ".join(f"{name} {value}" for name, value in first.parameters.items())
            canvas.paragraph(f"matches {first.mistake}{f' ({parameters})' if parameters else ''}", indent=4)
            canvas.paragraph(first.what, indent=4)
            canvas.paragraph(f"Look at {first.look_at}.", indent=4)
    if len(groups) > _MOST_SHOWN:
        canvas.paragraph(f"{format_count(len(groups) - _MOST_SHOWN, 'more finding')}; --json has all.")


def word_chunks(chunks: ChunkedRun) -> str:
    """Say what a run in chunks was, or why there was none."""
    if chunks.untested:
        return f"passes of several tokens behind a cache: not tested, {chunks.untested}"
    widths = ", ".join(map(str, chunks.widths))
    return (
        f"compared {chunks.compared} of {format_count(chunks.of, 'site')} again in chunks of {widths} tokens, each "
        "behind what the ones before have cached"
    )


def draw_passes(canvas: Canvas, passes: Sequence[PassLogits]) -> None:
    """Draw the next tokens of a run, or of each pass, against the golden's own: all layers' errors are in them."""
    if not passes:
        return
    first, *others = passes
    if first.number is None and not others:
        row, token = first.worst_token
        canvas.paragraph(
            f"{first.num_agreeing} of {format_count(first.num_tokens, 'likeliest next token')} are the golden's; "
            f"KL divergence from the golden: mean {word_figure(first.kl_mean)} nats, worst "
            f"{word_figure(first.kl_worst)} at row {row}, token {token}. The errors of all layers are in it."
        )
        return
    rows = [
        Row(
            cells=(
                "all" if one.number is None else pass_name(one.number),
                str(one.num_tokens),
                f"{one.num_agreeing}/{one.num_tokens}",
                word_figure(one.kl_mean),
                word_figure(one.kl_worst),
                f"{one.worst_token[0]},{one.worst_token[1]}",
            )
        )
        for one in passes
    ]
    canvas.table(_PASS_COLUMNS, rows)
    canvas.paragraph(
        "KL in nats from the golden itself: the errors of all layers are in it, and noise grows."
    )
    canvas.gap()


def word_first(findings: Sequence[ModelFinding]) -> str:
    """Return the place of the first finding, and the number of others: `decode step 2, layers 3-5, attn_context`."""
    first, *others = _group(findings)
    more = f" (and {format_count(len(others), 'more finding')})" if others else ""
    return f"{_word_group(first)}{more}"


def _group(findings: Sequence[ModelFinding]) -> list[list[_Cause]]:
    """Group causes of one pass and the same sites and name, over layers."""
    groups: dict[object, list[_Cause]] = {}
    for cause in _join_causes(findings):
        first = cause[0]
        sites = tuple(finding.sites for finding in cause)
        place = (first.in_chunks, first.number, sites, first.mistake, first.layer is None)
        groups.setdefault(place, []).append(cause)
    return list(groups.values())


def _join_causes(findings: Sequence[ModelFinding]) -> list[_Cause]:
    """Return the findings of each cause: one, or two that share their pass, layer and operation; the first is named."""
    causes: dict[object, list[ModelFinding]] = {}
    for number, finding in enumerate(findings):
        shared = (finding.in_chunks, finding.number, finding.layer, finding.operation)
        place = shared if finding.operation else number
        causes.setdefault(place, []).append(finding)
    return [tuple(cause) for cause in causes.values()]


def _word_group(group: Sequence[_Cause]) -> str:
    first = group[0][0]
    number = [] if first.number is None else [pass_name(first.number, is_chunk=first.in_chunks)]
    layers = [cause[0].layer for cause in group if cause[0].layer is not None]
    sites = word_sites(first.sites)
    if len(group[0]) > 1:
        sites = (" and ".join(site for finding in group[0] for site in finding.sites),)
    return ", ".join([*number, *([word_layers(layers)] if layers else []), *sites])
