"""GoldenRows: golden logits of rows of tokens, read from the store or computed, some rows at a time.

V the vocabulary, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_logits import (
    ALTERNATIVE_KINDS,
    ALTERNATIVE_SHARES,
    KINDS,
    GoldenLogits,
    Row,
)
from minimax_tools.golden_logits.logits_run import compute_alternatives, compute_golden_logits
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.plausible_flips import FLIP_SHARES
from minimax_tools.reference.rounded_model import RoundedModel
from minimax_tools.reference.rounding import RoundingKind

# Values of hidden states in memory at a time, of all copies and prompts: 4 GB in float32. The weights of all layers are
# read once for so many.
_MOST_STATES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenRows:
    """The golden logits of one model. Each row is kept in the store when it is computed."""

    store: LogitsStore
    reader: CheckpointReader
    spec: ModelSpec
    # Logits [T,V] of a golden at hand, by the row's token ids: it is a right model too, and an alternative of its rows
    captured: Mapping[Row, torch.Tensor] = field(default_factory=dict)

    def make(self, rows: Sequence[Row]) -> int:
        """Compute the golden logits of the rows that the store lacks. Return the number of those that it had.

        Raises:
            CheckpointError: A weight cannot be read.
            CaptureError: The logits cannot be written.
        """
        distinct = list(dict.fromkeys(rows))
        missing = [row for row in distinct if not self.store.has(row)]
        for group, model in self._models(missing, KINDS, FLIP_SHARES, label="Golden logits"):
            for golden in compute_golden_logits(model, group, start=self.store.start):
                self.store.write(golden)
        return len(distinct) - len(missing)

    def read(self, row: Sequence[int]) -> GoldenLogits:
        """Read the golden logits of a row that was made.

        Raises:
            CaptureError: They are not stored, or damaged.
        """
        golden = self.store.read(row)
        captured = self.captured.get(golden.row)
        if captured is None:
            return golden
        return golden.with_alternatives(golden.measure(captured, torch.arange(golden.num_tokens)))

    def find_alternatives(self, goldens: Sequence[GoldenLogits]) -> list[GoldenLogits]:
        """Return golden logits with those of right models that flip other experts, computed where the store lacks them.

        Raises:
            CheckpointError: A weight cannot be read.
            CaptureError: The logits cannot be written.
        """
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


def captured_logits(golden: CaptureSource) -> dict[Row, torch.Tensor]:
    """Return a golden's own logits [T,V] by the token ids of its rows; empty if it stored none.

    Raises:
        CaptureError: The golden cannot be read.
    """
    if ModelSite.LOGITS not in golden.model_sites():
        return {}
    inputs, logits = golden.read_inputs(), golden.read_model(ModelSite.LOGITS)
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
