"""Bisection: the search for wrong layers as text and as JSON.

A probe is one run over some layers, in chains: each begins with the golden's input and is judged at its end. Its
`excess` is its error in units of its limit; above 1 it is wrong. Its `visible` noise is the smallest that would be seen
at its end. A *culprit* is a layer that is wrong alone. A *drift* is a wrong chain whose layers, run alone, are right.
"""

from __future__ import annotations

import shlex
from typing import Any

from minimax_tools.errors import format_count
from minimax_tools.metrics.noise_floor import MASSIVE_RATIO
from minimax_tools.model.span import Span
from minimax_tools.results.probes import Bisection, BisectionFinding, Chain, Probe
from minimax_tools.results.results import Blame, Verdict
from reports.canvas import Canvas, Row, columns
from reports.data import to_json
from reports.wording import word_figure

# Share of a layer's output: of 24 mistakes of real ports, planted in right ones, ten changed the output by less.
_COARSE = 0.05
_COLUMNS = columns("probe", "<layers", "<verdict", "error\nof limit", "<at", "sees\nfrom")


def render_bisection(bisection: Bisection) -> str:
    """Draw a bisection as text: result, probes, what they could not see, and what to run next."""
    canvas = Canvas()
    canvas.verdict(bisection.verdict, _headline(bisection))
    canvas.line(_extent(bisection))
    canvas.facts([("golden", bisection.reference), ("port", bisection.target)])
    canvas.gap()
    canvas.table(_COLUMNS, [_row(number, probe) for number, probe in enumerate(bisection.probes, start=1)])
    if bisection.findings:
        canvas.section("Found")
        for finding in bisection.findings:
            canvas.paragraph(f"{_word_span(finding.chain.span)}: {_reason(bisection, finding)}")
    canvas.section("Not seen")
    for sentence in blind_spots(bisection):
        canvas.paragraph(sentence)
    return canvas.text


def bisection_record(bisection: Bisection) -> dict[str, Any]:
    """Return a bisection as JSON: verdict, blame, every probe with its chains, and what they could not see."""
    return {
        "verdict": bisection.verdict.value,
        "headline": _headline(bisection),
        "compared": bisection.compared,
        "of": bisection.of,
        "blame": [
            to_json(
                Blame(layer=finding.chain.span.start, sites=("output",), reason=_reason(bisection, finding))
            )
            for finding in bisection.culprits
        ],
        "drifts": [
            {**_span_record(finding.chain.span), "reason": _reason(bisection, finding)}
            for finding in bisection.drifts
        ],
        "reference": bisection.reference,
        "target": bisection.target,
        "longest_chain": bisection.longest_chain,
        "runs": len(bisection.probes),
        "runs_resumed": bisection.num_resumed,
        "probes": [_probe_record(probe) for probe in bisection.probes],
        "smallest_visible": {
            "in_chains": to_json(bisection.chained_visible),
            "alone": to_json(bisection.single_visible),
            "in_a_sweep": to_json(bisection.sweep_visible),
        },
        "notes": list(blind_spots(bisection)),
    }


def blind_spots(bisection: Bisection) -> tuple[str, ...]:
    """Tell in sentences what the probes could not have seen, and where else to look."""
    sentences = []
    if bisection.chained_visible is not None:
        sentences.append(
            f"At the end of a chain, noise of {_percent(bisection.chained_visible)} or more on every token is seen. "
            f"The share is of a token's channels without the massive ones (above {MASSIVE_RATIO:g} times the median "
            "channel). A smaller error, or one of few tokens, may hide in the noise of the chain's layers. The layers "
            "behind a mistake change the size of its error."
        )
        if bisection.chained_visible > _COARSE:
            sentences.append("Many mistakes are smaller than that: choose a shorter --chain-length.")
    if bisection.single_visible is not None:
        sentences.append(
            f"In the output of a layer alone, noise of {_percent(bisection.single_visible)} or more is seen."
        )
    if bisection.sweep_visible is not None:
        sentences.append(
            f"A sweep of a port that shows its sites sees noise of {_percent(bisection.sweep_visible)} or more of the "
            "output in what the experts add."
        )
    skipped = bisection.of - len(bisection.covered)
    if skipped:
        sentences.append(f"{format_count(skipped, 'layer')} did not run.")
    return tuple(sentences)


def next_commands(bisection: Bisection) -> tuple[str, ...]:
    """Return the commands that look closer: at each finding, or at all layers if nothing was found."""
    options = shlex.join(bisection.arguments)
    singles = [
        f"mm2-test single-layer --layer {finding.chain.span.start} {options} --sites all"
        for finding in bisection.culprits
    ]
    sweeps = [_sweep(finding.chain.span, options) for finding in bisection.drifts]
    return (*singles, *sweeps) or (_sweep(bisection.span, options),)


def _sweep(span: Span, options: str) -> str:
    return f"mm2-test sweep --layers {span.start}:{span.stop} {options} --sites all"


def _headline(bisection: Bisection) -> str:
    if not bisection.findings:
        # No pass: what is smaller was not seen.
        visible = max(bisection.chained_visible or 0.0, bisection.single_visible or 0.0)
        return f"Nothing above {_percent(visible)} found in {_word_span(bisection.span)}"
    verdict = str(bisection.verdict).upper()
    # A drift little above its limit is no proof.
    first = next((finding for finding in bisection.findings if finding.is_proof), bisection.findings[0])
    num_others = len(bisection.findings) - 1
    more = f" (and {format_count(num_others, 'more place')})" if num_others else ""
    place = "output" if first.is_culprit else "in a chain alone"
    return f"{verdict}: {_word_span(first.chain.span)}, {place}{more}"


def _extent(bisection: Bisection) -> str:
    runs = format_count(len(bisection.probes), "run")
    resumed = f", {bisection.num_resumed} of them before" if bisection.num_resumed else ""
    longest = bisection.longest_chain
    how = f"in chains of at most {format_count(longest, 'layer')}" if longest > 1 else "every layer alone"
    return (
        f"compared {bisection.compared} of {format_count(bisection.of, 'output')} in {runs}{resumed}, {how}"
    )


def _reason(bisection: Bisection, finding: BisectionFinding) -> str:
    chain = finding.chain
    if not finding.is_culprit:
        return (
            f"{chain.reason}; each of the layers, run alone, is right: the error grows from one to the next"
        )
    before = _right_before(bisection, chain.span.start)
    how_far = ", as far as chains see" if before and bisection.longest_chain > 1 else ""
    return "; ".join(part for part in (f"{chain.reason} when it runs alone", f"{before}{how_far}") if part)


def _right_before(bisection: Bisection, layer: int) -> str:
    """Name the layers that are right just before a layer, back to the previous finding or the start."""
    start = max(
        (finding.chain.span.stop for finding in bisection.findings if finding.chain.span.stop <= layer),
        default=bisection.span.start,
    )
    if start >= layer:
        return ""
    span = Span(start, layer)
    return f"{_word_span(span)} {'is' if len(span) == 1 else 'are'} right"


def _row(number: int, probe: Probe) -> Row:
    first_wrong = probe.first_wrong
    shown = first_wrong or probe.worst
    return Row(
        cells=(
            str(number),
            str(probe.span),
            "right" if first_wrong is None else "wrong",
            word_figure(shown.excess),
            _word_span(shown.span),
            _percent(max(chain.visible for chain in probe.chains)),
        ),
        style="" if first_wrong is None else "red",
    )


def _probe_record(probe: Probe) -> dict[str, Any]:
    return {
        **_span_record(probe.span),
        "verdict": str(Verdict.PASS if probe.first_wrong is None else Verdict.FAIL),
        "chains": [_chain_record(chain) for chain in probe.chains],
    }


def _chain_record(chain: Chain) -> dict[str, Any]:
    return {
        **_span_record(chain.span),
        "verdict": str(Verdict.PASS if chain.is_right else Verdict.FAIL),
        "error_of_limit": to_json(chain.excess),
        "smallest_visible": to_json(chain.visible),
        "reason": chain.reason,
    }


def _span_record(span: Span) -> dict[str, int]:
    return {"start_layer": span.start, "end_layer": span.last}


def _word_span(span: Span) -> str:
    return f"layer {span.start}" if len(span) == 1 else f"layers {span.start}-{span.last}"


def _percent(share: float) -> str:
    return f"{word_figure(100 * share)} %"
