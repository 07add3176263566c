"""Schema of a comparison's summary, as --json=summary prints it and --report-path writes it."""

from __future__ import annotations

from minimax_tools.results.results import BlameGroup, SiteStatus, WrongRegion
from schemas.judging import COUNTS, conclusion, mistake
from schemas.parts import Schema, by_name, choice, listed, maybe, merged, number, record, text, whole
from schemas.values import field_comments, schema_of


def comparison_summary() -> Schema:
    """Return the schema of a comparison's conclusion, with coverage, limits, causes and the worst sites."""
    place = {"layer": maybe(whole(), "The layer; null outside the layers."), "site": text()}
    status = choice(*(status.value for status in SiteStatus))
    layers = listed(maybe(whole()), "The layers, ascending; null is the model outside them.")
    coverage = record(
        {
            **COUNTS,
            "layers": listed(whole(), "The layers of the comparison, ascending."),
            "not_compared": listed(
                record({"status": status, "site": text(), "layers": layers}),
                "Sites that were not judged, by status.",
            ),
        },
        "What was compared, and what was not.",
    )
    limit = record(
        {
            **place,
            "status": status,
            "figure": text("Name of the figure."),
            "value": number("The figure."),
            "limit": number("What right ports stay below."),
        }
    )
    told = field_comments(BlameGroup)
    cause = record(
        {
            "layers": layers,
            "sites": listed(text(), "The sites to blame."),
            "operation": text(told["operation"]),
            "severity": choice(
                SiteStatus.FAIL.value, SiteStatus.WARN.value, description="Worst status of the sites."
            ),
            "reason": text(told["reason"]),
            "where": listed(text(), told["where"]),
            "regions": listed(
                schema_of(WrongRegion), "The tokens and channels that `where` names, as numbers."
            ),
        },
        "Sites to blame in some layers.",
    )
    worst = record(
        {
            "layer": maybe(whole(), "The layer; null outside the layers."),
            "site": text(),
            "status": choice(*(status.value for status in SiteStatus)),
            "value": number("The measure."),
        }
    )
    statuses = {status.value: whole() for status in SiteStatus}
    rest = {
        "directory": text("Folder or address of the run, if mm2-test made it."),
        "diagnosis": listed(mistake(), "Named mistakes, of mm2-test model alone."),
        "coverage": coverage,
        "limits": listed(limit, "The sites furthest beyond their limits or nearest to them, worst first."),
        "cause": listed(cause, "What is to blame, layers of the same sites together."),
        "statuses": record(statuses, "Number of sites of each status."),
        "worst": by_name(listed(worst), "By measure, its worst sites, worst first."),
    }
    told_whole = "The conclusion of a comparison, with coverage, limits, causes and the worst sites."
    return merged(told_whole, conclusion(), record(rest, optional=("directory", "diagnosis")))
