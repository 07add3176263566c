"""Next tokens: what a comparison says of the port's next-token distributions, as text."""

from __future__ import annotations

from minimax_tools.results import Comparison, LogitsResult
from reports.canvas import Canvas
from reports.wording import word_figure

_MOST_NAMED = 3


def draw_next_tokens(canvas: Canvas, comparison: Comparison) -> None:
    """The divergence of the logits and the likeliest tokens; nothing where there are no logits."""
    found = [site.logits for site in comparison.sites if site.logits is not None]
    if not found:
        return
    canvas.gap()
    canvas.line("Next tokens", style="bold")
    for logits in found:
        for sentence in _logits_sentences(logits):
            canvas.paragraph(sentence)


def _logits_sentences(logits: LogitsResult) -> list[str]:
    foreseen = ""
    if logits.kl_mean_foreseen is not None:
        foreseen = f"; noise comes to {word_figure(logits.kl_mean_foreseen)} and {word_figure(logits.kl_p95_foreseen)}"
    row, position = logits.worst_token
    overlaps = ", ".join(f"{100 * share:.1f} % of the top {k}" for k, share in logits.overlaps.items())
    sentences = [
        f"KL divergence in nats: mean {word_figure(logits.kl_mean)}, 95th percentile {word_figure(logits.kl_p95)}"
        f"{foreseen}; worst {word_figure(logits.kl_worst)} at row {row}, position {position}",
        f"of the golden's likeliest tokens the port has {overlaps}",
    ]
    if logits.num_disagreeing:
        sentences.append(
            f"{logits.num_disagreeing} of {logits.num_tokens} places have another likeliest token, "
            f"{logits.num_explained} of them within the noise"
        )
    for choice in logits.worst_choices[:_MOST_NAMED]:
        reach = "" if choice.reach is None else f", noise reaches {word_figure(choice.reach)}"
        sentences.append(
            f"row {choice.row}, position {choice.position}: {choice.target} for {choice.reference}, "
            f"{word_figure(choice.margin)} below it{reach}"
        )
    return sentences
