"""Search by replaced streams as text and as JSON."""

from __future__ import annotations

from typing import Any

from minimax_tools.errors import format_count
from minimax_tools.results.probes import ReplacedRun, StreamSearch, name_part, name_point, part_layer
from minimax_tools.results.results import Verdict
from reports.canvas import Canvas, Row, columns
from reports.data import to_json
from reports.wording import word_figure

_COLUMNS = columns("run", "<stream replaced at", "<logits", "error\nof limit")


def render_stream_search(search: StreamSearch) -> str:
    """Draw a search as text: result, runs, the wrong part, and what was not seen."""
    canvas = Canvas()
    canvas.verdict(search.verdict, _headline(search))
    canvas.line(
        f"judged {search.num_judged} of {format_count(search.num_parts, 'part')} of the model by the logits of "
        f"{format_count(len(search.runs), 'run')}"
    )
    canvas.facts([("golden", search.reference), ("port", search.target or "run by hand")])
    if search.runs:
        canvas.gap()
        canvas.table(
            _COLUMNS,
            [
                _row(number, run, num_layers=search.num_layers)
                for number, run in enumerate(search.runs, start=1)
            ],
        )
    if search.finding is not None:
        canvas.section("Found")
        canvas.paragraph(_reason(search))
    if search.is_finished:
        canvas.section("Not seen")
        for sentence in blind_spots(search):
            canvas.paragraph(sentence)
    return canvas.text


def stream_search_record(search: StreamSearch) -> dict[str, Any]:
    """Return a search as JSON: verdict, blame, runs, what was not seen, and the point of the run needed next."""
    layers = [part_layer(point, num_layers=search.num_layers) for point in search.suspects]
    blame = [
        {
            "layer": layer,
            "sites": [] if layer is None else ["output"],
            "part": name_part(point, num_layers=search.num_layers),
            "reason": _reason(search),
        }
        for layer, point in zip(layers, search.suspects, strict=True)
    ]
    return {
        "verdict": search.verdict.value,
        "headline": _headline(search),
        "compared": search.num_judged,
        "of": search.num_parts,
        "blame": blame,
        "reference": search.reference,
        "target": search.target,
        "runs": [
            {
                "point": run.point,
                "verdict": str(Verdict.PASS if run.is_right else Verdict.FAIL),
                "error_of_limit": to_json(run.excess),
                "reason": run.reason,
            }
            for run in search.runs
        ],
        "is_finished": search.is_finished,
        "waits_for": None if search.is_finished else {"point": search.waits_for},
        "notes": list(blind_spots(search)) if search.is_finished else [],
    }


def blind_spots(search: StreamSearch) -> tuple[str, ...]:
    """Tell in sentences what the runs could not have seen."""
    faint = (
        "A mistake that moves the logits less than rounding does, in all layers behind the point of replacement, is "
        "not seen: --exhaustive replaces the stream at every layer, from the last on."
    )
    if search.finding is None:
        return (faint,)
    if search.finding.point == search.num_layers and not search.target:
        # A port that mm2 runs was seen to take the stream.
        faint = (
            f"A port that does not replace its stream looks the same: see that the lines are in it. {faint}"
        )
    before = "Layers before it were" if search.finding.point else "What lies before it was"
    return (f"{before} not judged: mend this part, and search again.", faint)


def _headline(search: StreamSearch) -> str:
    verdict = str(search.verdict).upper()
    if not search.is_finished:
        where = name_point(search.waits_for, num_layers=search.num_layers)
        return f"{verdict}: the run with the stream replaced at {where} is missing"
    if search.finding is None:
        # No pass: what rounding hides in the logits was not seen.
        largest = word_figure(max(run.excess for run in search.runs))
        return f"Nothing above the noise of the logits found: the largest error is {largest} of its limit"
    return f"{verdict}: {_name_suspects(search)}"


def _name_suspects(search: StreamSearch) -> str:
    return " or ".join(name_part(point, num_layers=search.num_layers) for point in search.suspects)


def _reason(search: StreamSearch) -> str:
    finding, num_layers = search.finding, search.num_layers
    assert finding is not None, "only a finding has a reason"
    what, last = _name_suspects(search), search.suspects[-1]
    if finding.point is None:
        wrong = "without the golden's stream the logits are wrong"
    else:
        wrong = f"with the golden's stream at {name_point(finding.point, num_layers=num_layers)} the logits are wrong"
    if last == num_layers:
        return f"{what}: {wrong}: {finding.reason}"
    behind = name_point(0 if last is None else last + 1, num_layers=num_layers)
    right = "right" if len(search.suspects) == 1 else "clearly right"
    return f"{what}: {wrong}, at {behind} they are {right}: {finding.reason}"


def _row(number: int, run: ReplacedRun, *, num_layers: int) -> Row:
    return Row(
        cells=(
            str(number),
            name_point(run.point, num_layers=num_layers),
            "right" if run.is_right else "wrong",
            word_figure(run.excess),
        ),
        style="" if run.is_right else "red",
    )
