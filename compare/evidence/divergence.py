"""Next-token distributions of both sides by position, and the likeliest tokens where they differ most.

The port's logits are held against the golden's own: the errors of all layers are in them. T judged tokens, V the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from compare.comparer import JudgedRun
from compare.judging.logits import divergences, foreseen_divergence, logit_noise
from compare.judging.model_judge import ModelJudge
from minimax_tools.printable import printable
from minimax_tools.text.tokenizer import decode_rows, has_tokenizer
from reports.page.evidence import LogitsEvidence, TokenChance, TopTokens

# Places whose likeliest tokens are told, and how many tokens of each.
_MOST_PLACES, _MOST_TOKENS = 6, 5
# Tokens of a chart; more would make the page slow.
_MOST_POINTS = 4096


def collect_logits(run: JudgedRun, *, folder: Path | None) -> LogitsEvidence | None:
    """Collect the next-token distributions; None if a side holds no logits that can be compared.

    `folder` holds the tokenizer that tells the tokens' text; None for numbers alone.
    """
    layers = run.comparison.layers
    if not layers:
        return None
    judge = ModelJudge(run.sides, last_layer=max(layers))
    rows = judge.read_logits()
    if rows is None or rows.num_tokens == 0:
        return None
    divergence = divergences(rows.reference, rows.target)
    noise = logit_noise(rows, usual_error=judge.usual_error)
    foreseen = foreseen_divergence(rows, noise)
    kept = slice(0, _MOST_POINTS)
    worst = divergence.argsort(descending=True, stable=True)[:_MOST_PLACES].tolist()
    text = _Text(folder)
    return LogitsEvidence(
        rows=tuple(rows.places[kept, 0].tolist()),
        positions=tuple(rows.places[kept, 1].tolist()),
        divergence=tuple(divergence[kept].tolist()),
        foreseen=tuple(foreseen[kept].tolist()),
        top=tuple(
            TopTokens(
                row=int(rows.places[token, 0]),
                position=int(rows.places[token, 1]),
                divergence=float(divergence[token]),
                golden=_likeliest(rows.reference[token], text),
                port=_likeliest(rows.target[token], text),
            )
            for token in worst
        ),
    )


class _Text:
    """Text of tokens; empty without a tokenizer."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder if folder is not None and has_tokenizer(folder) else None

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        if self._folder is None:
            return [""] * len(tokens)
        return [printable(text, keep="") for text in decode_rows(self._folder, [[token] for token in tokens])]


def _likeliest(logits: torch.Tensor, text: _Text) -> tuple[TokenChance, ...]:
    """Return the likeliest tokens by logits [V]."""
    best = logits.double().softmax(dim=-1).topk(min(_MOST_TOKENS, len(logits)))
    tokens = best.indices.tolist()
    return tuple(
        TokenChance(token=token, text=words, probability=probability)
        for token, words, probability in zip(tokens, text.of(tokens), best.values.tolist(), strict=True)
    )
