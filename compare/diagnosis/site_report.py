"""Site report: what a diagnosis says of the embedding, the final norm and the logits, and of blame left unexplained."""

from __future__ import annotations

from compare.diagnosis.finding import Diagnosis, Finding, SiteDiagnosis
from compare.diagnosis.mistake import word_mistake
from compare.diagnosis.mistake_text import draw_mistake, word_range
from reports.canvas import Canvas
from reports.wording import word_figure, word_place


def draw_site(canvas: Canvas, site: SiteDiagnosis) -> None:
    """Draw a site that is wrong: the mistake that explains it, or what comes nearest."""
    before = word_figure(site.unexplained)
    if site.named:
        first, *others = site.named
        canvas.line(
            f"{site.site} matches {_word(first)}: leaves ρ {word_figure(first.leaves)} of {before}",
            style="bold",
        )
        draw_mistake(canvas, [first])
        if others:
            words = (f"{_word(one)}, which leaves ρ {word_figure(one.leaves)}" for one in others)
            canvas.paragraph(f"Cannot be told from: {'; '.join(words)}.")
    else:
        canvas.line(f"{site.site}: no known mistake explains it (ρ {before})", style="bold")
        for near in site.nearest:
            canvas.paragraph(f"nearest: {_word(near)} leaves ρ {word_figure(near.leaves)}")
    canvas.paragraph(f"{site.num_hypotheses} hypotheses tried on what the port itself fed it")
    for note in site.notes:
        canvas.item(note)


def draw_right_sites(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw one line for the sites outside the layers that are right, where anything else is told."""
    right = [site for site in diagnosis.sites if site.is_right]
    if not right or not diagnosis.exit_code:
        return
    names = ", ".join(str(site.site) for site in right)
    figures = word_range(site.unexplained for site in right)
    canvas.line(f"{names}: nothing to explain (ρ {figures} on what the port itself fed)")


def draw_unexplained(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw what the comparison blames and no named mistake explains."""
    for blame in diagnosis.unexplained:
        canvas.paragraph(
            f"Blamed and not explained: {word_place(blame.layer, blame.sites)} ({blame.reason})", indent=0
        )


def _word(finding: Finding) -> str:
    return word_mistake(finding.mistake, finding.parameters)
