"""Computation of golden logits: rows in batches through all layers, then the head, some tokens at a time.

T tokens of a row, C copies, H hidden, V the vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from minimax_tools.golden_logits.golden_logits import (
    MOST_CANDIDATES,
    GoldenLogits,
    StreamStart,
    TokenLogits,
    following_tokens,
    join_tokens,
)
from minimax_tools.model.inputs import Inputs, pad_rows
from minimax_tools.reference.rounded_model import RoundedHead, RoundedModel

# Rows of similar length are computed side by side, up to so many tokens of all copies with their padding: attention's
# scores and the experts' values stay below some hundred MB.
_BATCH_TOKENS = 10240
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
    head = model.head()
    found: dict[int, GoldenLogits] = {}
    for index, states_cth in _run(model, rows, start):
        input_ids = torch.tensor(rows[index])
        candidates, (exact, *variants) = _score(head, states_cth, input_ids, row=index)
        found[index] = GoldenLogits(
            input_ids=input_ids, candidates=candidates, exact=exact, variants=tuple(variants)
        )
    return [found[index] for index in range(len(rows))]


def compute_alternatives(
    model: RoundedModel, goldens: Sequence[GoldenLogits], *, start: StreamStart | None = None
) -> list[tuple[TokenLogits, ...]]:
    """Compute the alternatives of rows whose golden logits are known; `model` computes ALTERNATIVE_KINDS.

    Raises:
        CheckpointError: A weight cannot be read.
    """
    head = model.head()
    found: dict[int, tuple[TokenLogits, ...]] = {}
    for index, states_cth in _run(model, [golden.row for golden in goldens], start):
        golden = goldens[index]
        _, copies = _score(head, states_cth, golden.input_ids, row=index, candidates=golden.candidates)
        found[index] = tuple(copies[-len(model.flip_shares) :])
    return [found[index] for index in range(len(goldens))]


def _run(
    model: RoundedModel, rows: Sequence[Sequence[int]], start: StreamStart | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each row's index and the last layer's output of its copies, [C,T,H]."""
    groups = _group(rows, most_tokens=_BATCH_TOKENS // len(model.kinds))
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
    for group, states_cbsh in zip(groups, outputs, strict=True):
        for place, index in enumerate(group):
            yield index, states_cbsh[:, place, : len(rows[index])]


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


def _group(rows: Sequence[Sequence[int]], *, most_tokens: int) -> list[list[int]]:
    """Group rows of similar length, by their indices."""
    groups: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
        length = len(rows[index])
        if groups and (len(groups[-1]) + 1) * length <= most_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _score(
    head: RoundedHead,
    states_cth: torch.Tensor,
    input_ids: torch.Tensor,
    *,
    row: int,
    candidates: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[TokenLogits]]:
    """Return the candidates [T,K], those given or else the first copy's likeliest tokens, and each copy's logits."""
    following = following_tokens(input_ids)
    vocab_size = len(head.exact.lm_head)
    num_tokens = max(_MOST_LOGITS // (len(head.kinds) * vocab_size), 1)
    chosen: list[torch.Tensor] = []
    copies: list[list[TokenLogits]] = [[] for _ in head.kinds]
    for start in range(0, len(input_ids), num_tokens):
        block = slice(start, start + num_tokens)
        logits = head.score(states_cth[:, block], draw=(row << 20) + start)
        if candidates is None:
            likeliest = logits[0].topk(min(MOST_CANDIDATES, vocab_size), dim=-1).indices
        else:
            likeliest = candidates[block]
        chosen.append(likeliest)
        for copy, values in zip(copies, logits, strict=True):
            copy.append(TokenLogits.of(values, candidates=likeliest, following=following[block]))
    return torch.cat(chosen), [join_tokens(copy) for copy in copies]
