"""Markdown: a comparison as a comment on a pull request.

Text of captures stands in code spans or is escaped: it can neither make a link, nor mention anybody, nor end a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from minimax_tools.errors import format_count
from minimax_tools.printable import printable
from minimax_tools.results.results import Comparison, Verdict
from reports.page.evidence import DiagnosedRun
from reports.views import (
    blame_rows,
    group_uncompared,
    headline,
    measured,
    name_sides,
    view_layers,
    word_extent,
)
from reports.wording import word_figure, word_fraction, word_untested

_SIGNS = {
    Verdict.PASS: "✅",
    Verdict.WARN: "⚠️",
    Verdict.FAIL: "❌",
    Verdict.INCOMPARABLE: "❔",
}
# More would hide the rest of the comment.
_MOST_BLAMED, _MOST_LAYERS, _MOST_MISTAKES = 8, 80, 3
# Characters that mean something anywhere, at the start of a line, and in addresses that become links by themselves.
_SPECIAL = re.compile(r"([\\`*_\[\]|~]|^[#+>-]|^\d+(?=[.)])|:(?=//)|(?<=www)\.)")


def render_markdown(
    comparison: Comparison, *, next_commands: Sequence[str], diagnosis: DiagnosedRun | None = None
) -> str:
    """Return a comparison as Markdown."""
    lines = [f"## {_SIGNS[comparison.verdict]} mm2: {_plain(headline(comparison))}", ""]
    lines += [f"{word_extent(comparison).capitalize()}.", ""]
    untested = word_untested(comparison.untested)
    if untested and comparison.verdict.is_passed:
        lines += [_plain(untested), ""]
    lines += _blame(comparison)
    if diagnosis is not None:
        lines += _diagnosis(diagnosis)
    if next_commands:
        lines += ["**Next**", "", *_fenced(next_commands), ""]
    lines += _layers(comparison)
    lines += _uncompared(comparison)
    lines += ["| side | |", "|---|---|"]
    lines += [f"| {name} | {_code(value)} |" for name, value in name_sides(comparison)]
    return "\n".join(lines) + "\n"


def _blame(comparison: Comparison) -> Iterator[str]:
    rows = list(blame_rows(comparison))
    if not rows:
        return
    yield "**To blame**"
    yield ""
    for row in rows[:_MOST_BLAMED]:
        yield f"- {_plain(row.place)}: {_plain(row.reason)}"
        for sentence in (*row.of_sites, *row.where):
            yield f"  - {_plain(sentence)}"
    if len(rows) > _MOST_BLAMED:
        yield f"- and {format_count(len(rows) - _MOST_BLAMED, 'more place')}"
    yield ""


def _diagnosis(diagnosis: DiagnosedRun) -> Iterator[str]:
    yield f"**Diagnosis**: {_plain(diagnosis.headline)}"
    yield ""
    for place in diagnosis.places:
        yield f"- {_plain(place.place)}: {_plain(place.outcome)}"
        for sentence in place.lies:
            yield f"  - {_plain(sentence)}"
        named = [mistake for mistake in place.mistakes if mistake.is_named]
        for mistake in named[:1]:
            yield f"  - {_plain(mistake.what)} Look at {_plain(mistake.look_at)}."
            for sentence in mistake.proof:
                yield f"  - {_plain(sentence)}"
            for edit in mistake.edits:
                yield ""
                yield from (f"    {line}" for line in _fenced(edit.splitlines(), language="python"))
                yield ""
        for mistake in named[1:_MOST_MISTAKES]:
            where = f" {mistake.layers}" if mistake.layers else ""
            yield f"  - Cannot be told from {_code(mistake.name)}, which leaves ρ {mistake.leaves}{where}."
        for sentence in (*filter(None, (place.method,)), *place.notes):
            yield f"  - {_plain(sentence)}"
    for note in diagnosis.notes:
        yield f"- {_plain(note)}"
    yield ""


def _layers(comparison: Comparison) -> Iterator[str]:
    """Yield a table with the worst site of each layer, folded away."""
    layers = [layer for layer in view_layers(comparison) if layer.layer is not None]
    if not layers:
        return
    yield f"<details><summary>{format_count(len(layers), 'layer')}</summary>"
    yield ""
    yield "| layer | verdict | compared | largest ρ | site | cosine of the output |"
    yield "|---:|---|---:|---:|---|---:|"
    for layer in layers[:_MOST_LAYERS]:
        status, worst = str(layer.status or "none"), layer.worst
        output = next((site for site in layer.sites if site.site == "output"), None)
        cosine = None if output is None else measured(output, "cosine_similarity")
        cells = (
            layer.name,
            f"**{status}**" if status == "fail" else status,
            layer.compared,
            word_figure(worst.noise.whole if worst and worst.noise else None),
            _code(worst.site) if worst else "",
            word_fraction(cosine, decimals=6),
        )
        yield f"| {' | '.join(cells)} |"
    if len(layers) > _MOST_LAYERS:
        yield ""
        yield f"{len(layers) - _MOST_LAYERS} more layers: comparison.csv has all."
    yield ""
    yield "</details>"
    yield ""


def _uncompared(comparison: Comparison) -> Iterator[str]:
    groups = group_uncompared(comparison)
    if not groups and not comparison.notes:
        return
    yield "<details><summary>Not compared, and notes</summary>"
    yield ""
    for group in groups:
        reason = f" ({_plain(group.reason)})" if group.reason else ""
        yield f"- {group.title}{reason}: {_plain('; '.join(group.places))}"
    for note in comparison.notes:
        yield f"- {_plain(note)}"
    yield ""
    yield "</details>"
    yield ""


def _plain(text: str) -> str:
    """Escape text, so that it means nothing in Markdown and HTML and mentions nobody."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
    # A zero-width space keeps a name behind @ from being told.
    return _SPECIAL.sub(_escape, escaped.strip()).replace("@", "@\u200b")


def _escape(found: re.Match[str]) -> str:
    # A number before a dot begins a list: nothing but the dot can be escaped, so the number gets a space of no width.
    return f"{found[0]}\u200b" if found[0].isdigit() else f"\\{found[0]}"


def _code(text: str) -> str:
    """Return text as a code span, which a table may hold."""
    text = printable(text).replace("\n", " ").replace("|", "\\|")
    fence = "`" * (1 + _longest_run(text))
    pad = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(lines: Sequence[str], *, language: str = "bash") -> list[str]:
    fence = "`" * max(3, 1 + max(_longest_run(line) for line in lines))
    return [f"{fence}{language}", *(printable(line).replace("\n", " ") for line in lines), fence]


def _longest_run(text: str) -> int:
    """Return the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
