"""Computation of golden logits: rows in batches through all layers, then the head, some tokens at a time.

T tokens of a row, C copies, H hidden, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minimax_tools.golden_logits.golden_logits import KINDS, MOST_CANDIDATES, GoldenLogits, following_tokens
from minimax_tools.golden_logits.stream_start import StreamStart
from minimax_tools.golden_logits.token_logits import TokenLogits, join_tokens
from minimax_tools.model.inputs import Inputs, pad_rows
from minimax_tools.reference.rounded_model import RoundedHead, RoundedModel

# Rows of similar length are computed side by side, up to so many tokens with their padding: attention's scores and the
# experts' values of all copies stay below some hundred MB.
_BATCH_TOKENS = 2048
# Logits in memory at a time, of all copies: 0.5 GB in float32.
_MOST_LOGITS = 2**27


def compute_golden_logits(
    model: RoundedModel, rows: Sequence[Sequence[int]], *, start: StreamStart | None = None
) -> list[GoldenLogits]:
    """Compute the golden logits of rows of token ids, in their order; `model` computes the copies of KINDS.

    With `start`, the copies begin with the golden's stream there, not with the embedding.

    Raises:
        CheckpointError: A weight cannot be read.
    """
    groups = _group(rows)
    batches = [
        pad_rows(
            [list(rows[index]) for index in group],
            padding_side="right",
            buckets=(),
            pad_token_id=0,
            source="rows",
        )
        for group in groups
    ]
    outputs = model.run(batches) if start is None else _run_from(model, rows, groups, batches, start)
    head = model.head()
    found: dict[int, GoldenLogits] = {}
    for group, states_cbsh in zip(groups, outputs, strict=True):
        for place, index in enumerate(group):
            input_ids = torch.tensor(rows[index])
            found[index] = _score(head, states_cbsh[:, place, : len(input_ids)], input_ids, row=index)
    return [found[index] for index in range(len(rows))]


def _run_from(
    model: RoundedModel,
    rows: Sequence[Sequence[int]],
    groups: list[list[int]],
    batches: list[Inputs],
    start: StreamStart,
) -> list[torch.Tensor]:
    streams = [
        start.pad([tuple(rows[index]) for index in group], num_columns=batch.sequence_length)
        for group, batch in zip(groups, batches, strict=True)
    ]
    return model.run(batches, streams=streams, first_layer=start.layer)


def _group(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group rows of similar length, by their indices."""
    groups: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        length = len(rows[index])
        if groups and (len(groups[-1]) + 1) * length <= _BATCH_TOKENS:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _score(head: RoundedHead, states_cth: torch.Tensor, input_ids: torch.Tensor, *, row: int) -> GoldenLogits:
    following = following_tokens(input_ids)
    vocab_size = len(head.exact.lm_head)
    num_tokens = max(_MOST_LOGITS // (len(KINDS) * vocab_size), 1)
    candidates: list[torch.Tensor] = []
    copies: list[list[TokenLogits]] = [[] for _ in KINDS]
    for start in range(0, len(input_ids), num_tokens):
        block = slice(start, start + num_tokens)
        logits = head.score(states_cth[:, block], draw=(row << 20) + start)
        likeliest = logits[0].topk(min(MOST_CANDIDATES, vocab_size), dim=-1).indices
        candidates.append(likeliest)
        for copy, values in zip(copies, logits, strict=True):
            copy.append(TokenLogits.of(values, candidates=likeliest, following=following[block]))
    exact, *variants = (join_tokens(copy) for copy in copies)
    return GoldenLogits(
        input_ids=input_ids, candidates=torch.cat(candidates), exact=exact, variants=tuple(variants)
    )
