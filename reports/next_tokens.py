"""Next tokens: what a comparison says of the port's next-token distributions, as text."""

from __future__ import annotations

from minimax_tools.results.results import Comparison, GeneratedRow, LogitsResult, SiteStatus
from reports.canvas import Canvas
from reports.wording import word_figure

_MOST_NAMED = 3


def draw_next_tokens(canvas: Canvas, comparison: Comparison) -> None:
    """The divergence of the logits, the likeliest tokens and what was generated; nothing where there is neither."""
    found = [site.logits for site in comparison.sites if site.logits is not None]
    if not found and not comparison.generated:
        return
    canvas.gap()
    canvas.line("Next tokens", style="bold")
    for logits in found:
        for sentence in _logits_sentences(logits):
            canvas.paragraph(sentence)
    for row in comparison.generated:
        canvas.paragraph(_word_row(row))


def _word_row(row: GeneratedRow) -> str:
    alike = f"prompt {row.row}: {row.num_alike} of {row.num_compared} generated tokens are the golden's"
    if row.reference is None:
        return f"{alike} ({row.reason})" if row.reason else alike
    judged = {SiteStatus.PASS: "explained by noise", SiteStatus.FAIL: "not explained by noise"}
    return (
        f"{alike}; the next is {row.target}, the golden's is {row.reference}: "
        f"{judged.get(row.status, str(row.status))} ({row.reason})"
    )


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
        sentences.append(
            f"row {choice.row}, position {choice.position}: {choice.target} for {choice.reference}, "
            f"{word_figure(choice.margin)} below it, noise reaches {word_figure(choice.reach)}"
        )
    return sentences
