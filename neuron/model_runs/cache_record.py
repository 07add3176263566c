"""CacheRecord: the keys and values in a port's cache, followed from pass to pass.

A port may keep a token at its column (earlier passes' columns first, padding included, as transformers does) or at its
position (as NxDI does). The steps show which: they write one entry of each row. Steps may write a fixed number of
entries behind that (`shift`): behind the padding of a bucket, or by mistake.
B prompts, K kv heads, P entries of the cache, S columns of the golden's batch, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice

import torch

from minimax_tools.capture.passes import CacheChange, CachePair
from minimax_tools.text_enum import TextEnum
from neuron.model_runs.passes import Pass

KINDS = ("keys", "values")
# Changed tokens that a record names.
_MOST_PLACES = 4


class CacheForm(TextEnum):
    """The entry of the cache at which a port keeps a token."""

    COLUMNS = "by column"
    POSITIONS = "by position"


class CacheRecord:
    """The cache of a run: a snapshot after each pass. `num_columns` is S."""

    def __init__(self, *, num_columns: int) -> None:
        self._num_columns = num_columns
        self._passes: list[Pass] = []
        # By pass and layer, keys and values [B,K,P,D].
        self._snapshots: list[Sequence[CachePair]] = []

    def add(self, model_pass: Pass, snapshot: Sequence[CachePair]) -> None:
        """Keep the cache as it is after a pass; entries that no token of the run can lie at are dropped."""
        most = model_pass.attention_mask.shape[1] + int(model_pass.position_ids.max()) + 2
        self._passes.append(model_pass)
        self._snapshots.append(
            [(_plain(pair[0][:, :, :most]), _plain(pair[1][:, :, :most])) for pair in snapshot]
        )

    @property
    def form(self) -> CacheForm:
        """The entries at which the port keeps its tokens, as far as the steps show it."""
        return self._place[0]

    @property
    def shift(self) -> int:
        """Number of entries by which steps write behind their tokens' own; 0 unless all rows and steps agree on it."""
        return self._place[1]

    @cached_property
    def _place(self) -> tuple[CacheForm, int]:
        votes = dict.fromkeys(CacheForm, 0)
        for number in range(1, len(self._passes)):
            for form in CacheForm:
                votes[form] += self._num_written(number, form)
        # What grows by one entry a step, and what no step tells apart, lies by column.
        if votes[CacheForm.POSITIONS] > votes[CacheForm.COLUMNS]:
            return CacheForm.POSITIONS, 0
        if votes[CacheForm.COLUMNS]:
            return CacheForm.COLUMNS, 0
        shifts = {form: shift for form in CacheForm if (shift := self._common_shift(form)) is not None}
        if not shifts:
            return CacheForm.COLUMNS, 0
        form = min(shifts, key=lambda form: abs(shifts[form]))
        return form, shifts[form]

    def _common_shift(self, form: CacheForm) -> int | None:
        """Return the shift that all rows and steps agree on, the smallest of several; None if there is none."""
        common: set[int] | None = None
        for number in range(1, len(self._passes)):
            before, after = self._snapshots[number - 1][0][0], self._snapshots[number][0][0]
            rows, _, entries = _places(self._passes[number], self._past_columns(number), form)
            for row, entry in zip(rows.tolist(), entries.tolist(), strict=True):
                shifts = {written - entry for written in _written_entries(before[row], after[row])}
                common = shifts if common is None else common & shifts
        return min(common, key=abs) if common else None

    def layer(self, layer: int) -> CachePair:
        """Return a layer's keys and values as each token's own pass wrote them, [B,K,S,D]; others are zero."""
        form = self.form
        keys, values = (
            torch.zeros(
                (first.shape[0], first.shape[1], self._num_columns, first.shape[3]), dtype=first.dtype
            )
            for first in self._snapshots[0][layer]
        )
        for number, model_pass in enumerate(self._passes):
            rows, columns, entries = _places(model_pass, self._past_columns(number), form)
            entries = entries + (self.shift if number else 0)
            for assembled, cached in zip((keys, values), self._snapshots[number][layer], strict=True):
                is_held = (entries >= 0) & (entries < cached.shape[2])
                row, column, entry = rows[is_held], columns[is_held], entries[is_held]
                assembled[row, :, column] = cached[row, :, entry]
        return keys, values

    def changes(self) -> tuple[CacheChange, ...]:
        """Find the entries of earlier tokens that a later pass changed."""
        found, form = [], self.form
        for number in range(1, len(self._passes)):
            earlier = [
                _places(self._passes[before], self._past_columns(before), form) for before in range(number)
            ]
            rows, columns, entries = (torch.cat(parts) for parts in zip(*earlier, strict=True))
            # Those of the prefill are not shifted.
            entries[len(earlier[0][0]) :] += self.shift
            for layer in range(len(self._snapshots[0])):
                for kind, before, after in zip(
                    KINDS, self._snapshots[number - 1][layer], self._snapshots[number][layer], strict=True
                ):
                    tokens, heads = _find_changed(before, after, rows, entries)
                    if len(tokens):
                        places = zip(rows[tokens].tolist(), columns[tokens].tolist(), strict=True)
                        found.append(
                            CacheChange(
                                layer=layer,
                                number=number,
                                kind=kind,
                                heads=tuple(heads.tolist()),
                                places=tuple(islice(places, _MOST_PLACES)),
                                num_tokens=len(tokens),
                            )
                        )
        return tuple(found)

    def _past_columns(self, number: int) -> int:
        return sum(earlier.columns.shape[1] for earlier in self._passes[:number])

    def _num_written(self, number: int, form: CacheForm) -> int:
        """Count the rows of the first layer in which a step wrote the entry of its token."""
        before, after = self._snapshots[number - 1][0][0], self._snapshots[number][0][0]
        rows, _, entries = _places(self._passes[number], self._past_columns(number), form)
        written = 0
        for row, entry in zip(rows.tolist(), entries.tolist(), strict=True):
            if entry < after.shape[2]:
                is_new = entry >= before.shape[2]
                written += is_new or not _is_same(before[row, :, entry], after[row, :, entry])
        return written


def _places(
    model_pass: Pass, past_columns: int, form: CacheForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row, golden column and cache entry of a pass's real tokens, int64 each."""
    rows, columns = (model_pass.columns >= 0).nonzero(as_tuple=True)
    entries = past_columns + columns if form is CacheForm.COLUMNS else model_pass.position_ids[rows, columns]
    return rows, model_pass.columns[rows, columns], entries


def _find_changed(
    before: torch.Tensor, after: torch.Tensor, rows: torch.Tensor, entries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare entries of two snapshots [B,K,P,D]; return the indices of those that differ, and of their kv heads."""
    is_held = (entries >= 0) & (entries < min(before.shape[2], after.shape[2]))
    entries = entries.clamp(min=0, max=min(before.shape[2], after.shape[2]) - 1)
    old, new = before[rows, :, entries], after[rows, :, entries]
    # [tokens, kv heads]
    differs = ((old != new) & ~(old.isnan() & new.isnan())).any(-1) & is_held[:, None]
    return differs.any(1).nonzero().flatten(), differs.any(0).nonzero().flatten()


def _written_entries(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """List the entries of a row [K,P,D] that a step added or changed."""
    num_before = min(before.shape[1], after.shape[1])
    old, new = before[:, :num_before], after[:, :num_before]
    differs = ((old != new) & ~(old.isnan() & new.isnan())).any(-1).any(0)
    return [*differs.nonzero().flatten().tolist(), *range(num_before, after.shape[1])]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return FP8 values in BF16, which holds them exactly; other dtypes as they are."""
    return tensor.bfloat16() if tensor.dtype.itemsize == 1 else tensor.clone()
