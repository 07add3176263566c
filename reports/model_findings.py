"""Findings in a whole port's run as text: what came first, then the rest."""

from __future__ import annotations

from collections.abc import Sequence

from minimax_tools.capture.passes import pass_name
from minimax_tools.errors import format_count
from minimax_tools.results.model_findings import ModelFinding
from reports.canvas import Canvas
from reports.wording import word_layer, word_sites

# More would push the verdict off the screen.
_MOST_SHOWN = 6


def draw_findings(canvas: Canvas, findings: Sequence[ModelFinding]) -> None:
    """Draw the findings, the first in the run at the front."""
    if not findings:
        return
    canvas.section("What came first")
    for finding in findings[:_MOST_SHOWN]:
        canvas.paragraph(f"{word_finding(finding)}: {finding.reason}")
        if finding.mistake is not None:
            parameters = ", ".join(f"{name} {value}" for name, value in finding.parameters.items())
            canvas.paragraph(f"matches {finding.mistake}{f' ({parameters})' if parameters else ''}", indent=4)
            canvas.paragraph(finding.what, indent=4)
            canvas.paragraph(f"Look at {finding.look_at}.", indent=4)
    if len(findings) > _MOST_SHOWN:
        canvas.paragraph(f"{format_count(len(findings) - _MOST_SHOWN, 'more finding')}; --json has all.")


def word_finding(finding: ModelFinding) -> str:
    """Return the place of a finding: `decode step 2, layer 3, attn_context`."""
    number = [] if finding.number is None else [pass_name(finding.number)]
    layer = [] if finding.layer is None else [word_layer(finding.layer)]
    return ", ".join([*number, *layer, *word_sites(finding.sites)])
