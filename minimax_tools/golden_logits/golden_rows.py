"""GoldenRows: golden logits of rows of tokens, read from the store or computed, some rows at a time.

T tokens of a row, C copies, H hidden, V the vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_logits import (
    ALTERNATIVE_KINDS,
    ALTERNATIVE_SHARES,
    KINDS,
    MOST_CANDIDATES,
    GoldenLogits,
    Row,
    StreamStart,
    TokenLogits,
    following_tokens,
    join_tokens,
)
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.rounded_model import FLIP_SHARES, RoundedHead, RoundedModel
from minimax_tools.reference.rounding import RoundingKind

# Rows of similar length are computed side by side, up to so many tokens of all copies with their padding: attention's
# scores and the experts' values stay below some hundred MB.
_BATCH_TOKENS = 10240
# Logits in memory at a time, of all copies: 0.5 GB in float32.
_MOST_LOGITS = 2**27
# Values of hidden states in memory at a time, of all copies and prompts: 4 GB in float32. The weights of all layers are
# read once for so many.
_MOST_STATES = 2**30


def compute_golden_logits(
    model: RoundedModel, rows: Sequence[Sequence[int]], *, start: StreamStart | None = None
) -> list[GoldenLogits]:
    """Compute the golden logits of rows of token ids, in their order; `model` computes the copies of KINDS.

    With `start`, the copies begin with the golden's stream there, not with the embedding.
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
    """Compute the alternatives of rows whose golden logits are known; `model` computes ALTERNATIVE_KINDS."""
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
    groups = _group_copies(rows, most_tokens=_BATCH_TOKENS // len(model.kinds))
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
    if start is None:
        outputs = model.run(batches)
    else:
        streams = [
            start.pad([tuple(rows[index]) for index in group], num_columns=batch.sequence_length)
            for group, batch in zip(groups, batches, strict=True)
        ]
        outputs = model.run(batches, streams=streams, first_layer=start.layer)
    for group, states_cbsh in zip(groups, outputs, strict=True):
        for place, index in enumerate(group):
            yield index, states_cbsh[:, place, : len(rows[index])]


def _group_copies(rows: Sequence[Sequence[int]], *, most_tokens: int) -> list[list[int]]:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenRows:
    """The golden logits of one model. Each row is kept in the store when it is computed."""

    store: LogitsStore
    reader: CheckpointReader
    spec: ModelSpec
    # Logits [T,V] of a golden at hand, by the row's token ids: it is a right model too, and an alternative of its rows
    captured: Mapping[Row, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        reader: CheckpointReader,
        spec: ModelSpec,
        golden: CaptureSource | None = None,
        start: StreamStart | None = None,
    ) -> GoldenRows:
        """Open the golden logits that `folder` keeps of a model, those from `start` on (see `LogitsStore`)."""
        store = LogitsStore.open(folder, reader=reader, spec=spec, start=start)
        captured = {} if golden is None else _captured_logits(golden)
        return cls(store=store, reader=reader, spec=spec, captured=captured)

    def make(self, rows: Sequence[Row]) -> int:
        """Compute the golden logits of the rows that the store lacks. Return the number of those that it had."""
        distinct = list(dict.fromkeys(rows))
        missing = [row for row in distinct if not self.store.has(row)]
        for group, model in self._models(missing, KINDS, FLIP_SHARES, label="Golden logits"):
            for golden in compute_golden_logits(model, group, start=self.store.start):
                self.store.write(golden)
        return len(distinct) - len(missing)

    def read(self, row: Sequence[int]) -> GoldenLogits:
        """Read the golden logits of a row that was made."""
        golden = self.store.read(row)
        captured = self.captured.get(golden.row)
        if captured is None:
            return golden
        return golden.with_alternatives(golden.measure(captured, torch.arange(golden.num_tokens)))

    def find_alternatives(self, goldens: Sequence[GoldenLogits]) -> list[GoldenLogits]:
        """Return golden logits with those of right models that flip other experts: stored ones, or computed."""
        found = {golden.row: self.store.read_alternatives(golden) for golden in goldens}
        missing = {golden.row: golden for golden in goldens if found[golden.row] is None}
        for group, model in self._models(
            list(missing), ALTERNATIVE_KINDS, ALTERNATIVE_SHARES, label="Other right models"
        ):
            part = [missing[row] for row in group]
            for golden, computed in zip(
                part, compute_alternatives(model, part, start=self.store.start), strict=True
            ):
                self.store.write_alternatives(golden, computed)
                found[golden.row] = computed
        return [golden.with_alternatives(*(found[golden.row] or ())) for golden in goldens]

    def _models(
        self, rows: Sequence[Row], kinds: tuple[RoundingKind, ...], shares: tuple[float, ...], *, label: str
    ) -> Iterator[tuple[list[Row], RoundedModel]]:
        """Yield groups of rows whose hidden states fit into memory, each with the model that computes their copies."""
        groups = list(_group(rows, most_tokens=_MOST_STATES // (len(kinds) * self.spec.hidden_size)))
        num_layers = self.spec.num_hidden_layers - (0 if self.store.start is None else self.store.start.layer)
        for number, group in enumerate(groups, start=1):
            numbered = label + (f" {number}/{len(groups)}" if len(groups) > 1 else "")
            with LayerProgress(num_layers, label=numbered) as progress:
                yield (
                    group,
                    RoundedModel(
                        spec=self.spec,
                        reader=self.reader,
                        kinds=kinds,
                        flip_shares=shares,
                        progress=progress,
                    ),
                )


def _captured_logits(golden: CaptureSource) -> dict[Row, torch.Tensor]:
    """Return a golden's own logits [T,V] by the token ids of its rows; empty if it stored none."""
    if ModelSite.LOGITS not in golden.model_sites():
        return {}
    inputs, logits = golden.read_inputs(), golden.read(None, ModelSite.LOGITS)
    is_real = inputs.attention_mask.bool()
    return {
        tuple(row): values[real]
        for row, values, real in zip(inputs.real_rows(), logits, is_real, strict=True)
    }


def _group(rows: Sequence[Row], *, most_tokens: int) -> Iterator[list[Row]]:
    group: list[Row] = []
    num_tokens = 0
    for row in rows:
        if group and num_tokens + len(row) > most_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(row)
        num_tokens += len(row)
    if group:
        yield group
