"""Wording: a proof as sentences, and the lines that `convert_state_dict` needs."""

from __future__ import annotations

from collections.abc import Iterator

from compare.diagnosis.proof.proof import Proof, ProofOutcome, ProofWay, SiteProof
from reports.canvas import Canvas
from reports.wording import word_figure

_IN_WEIGHTS = (ProofWay.WEIGHTS, ProofWay.WEIGHTS_AND_STAGE)


def render_proof(proof: Proof, *, layer: int, undone: str) -> str:
    """Render the proof of one layer as text; `undone` words the mistakes."""
    canvas = Canvas(width=None, is_terminal=None)
    canvas.line(f"Layer {layer} without {undone}: {proof.outcome}", style="bold")
    for sentence in word_proof(proof):
        canvas.paragraph(sentence)
    if proof.is_proved:
        draw_lines(canvas, proof.lines, has_conversion=proof.has_conversion)
    return canvas.text


def word_proof(proof: Proof) -> Iterator[str]:
    """Yield sentences on a proof."""
    if proof.outcome is ProofOutcome.NOT_PROVABLE:
        yield f"Not provable here: {proof.reason}. {proof.next_step}".rstrip()
        return
    is_proved = "Proved" if proof.is_proved else "Not proved"
    if proof.way is None:
        yield f"{is_proved}: {proof.reason}{_word_stage(proof)}."
        return
    where = {
        ProofWay.WEIGHTS: "with the weights changed before the port converts them",
        ProofWay.STAGE: f"with the right values at {_word_replaced(proof)}",
        ProofWay.WEIGHTS_AND_STAGE: f"with the weights changed, and the right values at {_word_replaced(proof)}",
        ProofWay.RECOMPUTED: "computed from the values that the dump shows",
    }[proof.way]
    figures = _word_figures(proof)
    if proof.is_proved:
        yield f"{is_proved}: {where}, the port's layer is right{figures}{_word_stage(proof)}."
        return
    yield f"{is_proved}: {where}, {proof.reason}{figures}."
    if proof.remaining:
        first = proof.remaining[0]
        parameters = ", ".join(f"{name} {value}" for name, value in first.parameters.items())
        yield f"What is left matches {first.mistake}{f' ({parameters})' if parameters else ''}."


def draw_lines(canvas: Canvas, lines: tuple[str, ...], *, has_conversion: bool) -> None:
    """Draw the lines to paste, never broken; nothing if there are none."""
    if not lines:
        return
    place = "at the beginning of convert_state_dict" if has_conversion else "in the port's class"
    canvas.paragraph(f"Lines that undo it, {place}:")
    for line in lines:
        canvas.line(f"      {line}")


def _word_replaced(proof: Proof) -> str:
    return ", ".join(site.site for site in proof.sites if site.is_replaced)


def _word_figures(proof: Proof) -> str:
    """Word ρ before and after, at the worst site and at the output, of those that hold the port's own values."""
    own = {site.site: site for site in proof.sites if not site.is_replaced}
    chosen = [proof.worst, own.get("output")]
    words = [
        _word_site(site) for site in dict.fromkeys(chosen) if site is not None and site.before is not None
    ]
    return f" ({'; '.join(words)})" if words else ""


def _word_site(site: SiteProof) -> str:
    return f"{site.site} ρ {word_figure(site.before)} → {word_figure(site.after)}"


def _word_stage(proof: Proof) -> str:
    if proof.stage is None:
        return ""
    leaves, before = word_figure(proof.stage.leaves), word_figure(proof.stage.unexplained)
    return f"; the mistake leaves ρ {leaves} of {before} of what the stage gave"
