"""Causes: what is to blame in words, the same in the terminal, in Markdown and in the page."""

from __future__ import annotations

from minimax_tools.model.span import word_layers
from minimax_tools.results.results import WEIGHTS, BlameGroup, Comparison
from reports.wording import word_layer, word_sites


def causes_of(comparison: Comparison) -> tuple[BlameGroup, ...]:
    """Return the causes of a comparison; one for each blame if they were not grouped."""
    return comparison.blame_groups or tuple(
        BlameGroup(layers=(blamed.layer,), sites=blamed.sites, worst_layer=blamed.layer, reason=blamed.reason)
        for blamed in comparison.blame
    )


def word_blamed_sites(cause: BlameGroup) -> tuple[str, ...]:
    """Return the sites of a cause: those of one operation joined by `and`, as both are wrong."""
    return (" and ".join(cause.sites),) if cause.operation else word_sites(cause.sites)


def word_cause(cause: BlameGroup) -> str:
    """Return a place to look at, such as `layers 3-59, moe_delta`."""
    return ", ".join([word_layers(cause.layers), *word_blamed_sites(cause)])


def word_reasons(comparison: Comparison, cause: BlameGroup) -> tuple[str, ...]:
    """Return why a cause is to blame, in the worst of its layers; of one operation's sites a sentence each."""
    has_worst = len(cause.layers) > 1 and cause.sites != (WEIGHTS,)
    worst = f"worst in {word_layer(cause.worst_layer)}" if has_worst else ""
    if not cause.operation:
        return (f"{worst}: {cause.reason}" if worst else cause.reason,)
    reasons = (
        f"{blamed.sites[-1]}: {blamed.reason}"
        for blamed in comparison.blame
        if blamed.layer == cause.worst_layer and blamed.operation == cause.operation
    )
    return f"one cause, the {cause.operation}{worst and f'; {worst}'}", *reasons
