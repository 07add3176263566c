"""Table of all mistakes, and of what was found of them, in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from faults.cases import Case
from faults.rivals import RULES

# Two rules are stricter or looser variants of other ones: the table has no column for them.
_RIVALS = tuple(rule for rule in RULES if rule not in ("msprobe_both", "vllm_neuron_dense"))


def render_table(cases: Sequence[Case]) -> str:
    """Render a row for each mistake: cases, effect, findings of mm2 and of other tools' rules in shares such as 3/4."""
    rows = defaultdict(list)
    for case in cases:
        if case.is_mistake:
            parameters = ", ".join(f"{name} {_short(value)}" for name, value in case.parameters.items())
            rows[(case.mistake, parameters)].append(case)
    head = ["mistake", "cases", "effect over floor", "found", "site", "black box", "named", *_RIVALS]
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_row(name, parameters, of_row) for (name, parameters), of_row in rows.items()]
    return "\n".join(lines)


def _row(name: str, parameters: str, cases: Sequence[Case]) -> str:
    """Render the row of one mistake with these parameters."""
    effects = sorted(case.effect for case in cases)
    above = [case for case in cases if case.is_above_floor]
    cells = [
        f"`{name}` {parameters}".strip(),
        str(len(cases)),
        f"{effects[0]:.2g} to {effects[-1]:.2g}",
        _share([case.is_detected for case in cases]),
        _share([case.is_site_named for case in above]),
        _share([case.black_box_detected for case in cases]),
        _share([case.is_named for case in cases if case.named is not None]),
        *(_share([bool(case.rivals[rule]) for case in cases]) for rule in _RIVALS),
    ]
    return _line(cells)


def _share(hits: Sequence[bool]) -> str:
    return f"{sum(hits)}/{len(hits)}" if hits else "–"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
