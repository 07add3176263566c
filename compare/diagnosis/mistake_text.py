"""Mistake text: a named mistake in sentences, of one layer, several, or a site outside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from compare.diagnosis.finding import Finding
from reports.canvas import Canvas
from reports.wording import word_figure


def draw_mistake(canvas: Canvas, named: Sequence[Finding]) -> None:
    """Draw what the port does, where to look, and how well that explains what was found of it."""
    first = named[0]
    canvas.paragraph(first.what)
    canvas.paragraph(f"Look at {first.look_at}.")
    explains = word_range((100 * finding.explains for finding in named), word=lambda value: f"{value:.4g}")
    amplitudes = word_range((finding.amplitude for finding in named), word=lambda value: f"{value:.3f}")
    certainty = word_range(finding.z for finding in named)
    canvas.paragraph(
        f"Explains {explains} % of the error; amplitude {amplitudes}, {certainty} times its uncertainty."
    )
    if first.sources:
        canvas.paragraph(f"Seen in {', '.join(first.sources)}.")


def word_range(values: Iterable[float], *, word: Callable[[float], str] = word_figure) -> str:
    """The least and the largest of them, such as `0.98 … 1.02`; one where they read alike."""
    ordered = sorted(values)
    least, largest = word(ordered[0]), word(ordered[-1])
    return least if least == largest else f"{least} … {largest}"
