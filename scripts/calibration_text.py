"""The calibration file: limits as YAML that says how it was made and how to read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compare.limits.limit import Limit

_HEADING = """\
# What ports that are right stay below: mm2's limits, and a file that --criteria reads.
#
# Copy what you want to change: what a file does not name stays as it is here. A limit is a number, or a rule
#     usual × exp(z × (spread + token_spread / √tokens)),
# z being what a normal value exceeds in level ÷ (figures that the comparison judges) of the cases: the more is judged,
# and of the fewer tokens, the wider. The worst token's and the worst channel's share is divided by their number too.
# Limits of `all` hold for sites that have none of their own.
"""


def limits_text(
    tables: Mapping[str, Mapping[str, Mapping[str, Limit]]],
    *,
    scalars: Mapping[str, float],
    backends: tuple[str, ...],
    measured: Mapping[str, Any],
) -> str:
    """The file.

    Args:
        tables: By name, site and figure.
        scalars: The other limits.
        backends: Where they were measured.
        measured: How: the script, versions, the machine.
    """
    lines = [_HEADING, "measured:"]
    lines += [f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in measured.items()]
    lines += ["", f"backends: [{', '.join(backends)}]"]
    lines += [f"{name}: {value:g}" for name, value in scalars.items()]
    for name, table in tables.items():
        lines += ["", f"{name}:"]
        for site, figures in table.items():
            if figures:
                lines.append(f"  {site}:")
                lines += [f"    {figure}: {_limit_text(limit)}" for figure, limit in figures.items()]
    return "\n".join(lines) + "\n"


def _limit_text(limit: Limit) -> str:
    if limit.spread == limit.token_spread == 0.0:
        return f"{limit.usual:g}"
    return f"{{usual: {limit.usual:g}, spread: {limit.spread:g}, token_spread: {limit.token_spread:g}}}"
