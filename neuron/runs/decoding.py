"""Decoding: rows of a layer computed one at a time, from the keys and values of those before them.

A port is judged by it as by a whole pass: row t of the golden's one pass is what decode row t must give.
B batch, S rows of the batch, L rows of a cache, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from minimax_tools.sites import Site
from neuron.builtin.layer import KeyValues
from neuron.runs.layer_input import LayerInput
from neuron.runs.layer_run import LayerRun
from neuron.runs.layer_times import LayerTimes


class Cache:
    """Keys and values of a batch's rows, in memory of one length for every step: no graph depends on the step.

    Args:
        key_values: Of the first rows, [B,K,rows,D] on the CPU.
        num_rows: How many rows it can hold, L.
    """

    def __init__(self, key_values: KeyValues, *, num_rows: int) -> None:
        self._num_held = key_values[0].shape[2]
        self._keys, self._values = (_widened(tensor, num_rows) for tensor in key_values)

    @property
    def num_held(self) -> int:
        """How many rows it holds."""
        return self._num_held

    def append(self, key_values: KeyValues) -> None:
        """Take up the keys and values of one more row, [B,K,1,D]."""
        for held, new in zip((self._keys, self._values), key_values, strict=True):
            held[:, :, self._num_held : self._num_held + 1] = new
        self._num_held += 1

    def input_of(
        self, hidden_states: torch.Tensor, *, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> LayerInput:
        """The pass of the row that follows those held.

        Args:
            hidden_states: [B,1,H].
            attention_mask: [B,held+1], of the rows held and of this one.
            position_ids: [B,1].
        """
        batch_size, num_unused = hidden_states.shape[0], self._keys.shape[2] - self._num_held
        held, own = attention_mask[:, : self._num_held], attention_mask[:, self._num_held :]
        unused = attention_mask.new_zeros(batch_size, num_unused)
        return LayerInput(
            hidden_states=hidden_states,
            attention_mask=torch.cat((held, unused, own), dim=1),
            position_ids=position_ids,
            past=(self._keys, self._values),
        )


def run_decoding(
    run: Callable[[LayerInput], LayerRun],
    whole: LayerInput,
    *,
    num_rows: int,
    given: KeyValues | None = None,
) -> LayerRun:
    """Run all rows but the last `num_rows` in one pass, and each of those in one of its own.

    Args:
        run: Runs the layer, and gives the keys and values of the rows that it is fed.
        whole: All rows.
        num_rows: How many are decoded; fewer than there are.
        given: Keys and values [B,K,S,D] to decode from, such as the golden's; None for the layer's own.
    """
    start, stop = whole.num_rows - num_rows, whole.num_rows
    first = run(whole.first(start))
    assert first.key_values is not None, "a run that decodes gives keys and values"
    key_values = first.key_values if given is None else tuple(tensor[:, :, :start] for tensor in given)
    cache = Cache((key_values[0], key_values[1]), num_rows=stop - 1)
    runs = [first]
    for row in range(start, stop):
        step = run(
            cache.input_of(
                whole.hidden_states[:, row : row + 1],
                attention_mask=whole.attention_mask[:, : row + 1],
                position_ids=whole.position_ids[:, row : row + 1],
            )
        )
        runs.append(step)
        if row < stop - 1:
            assert step.key_values is not None, "a run that decodes gives keys and values"
            cache.append(step.key_values if given is None else _row(given, row))
    return _joined(runs)


def _joined(runs: list[LayerRun]) -> LayerRun:
    """One run of all rows; a site that one pass did not show is shown by none."""
    tensors = {
        site: torch.cat([run.tensors[site] for run in runs], dim=2 if site.has_heads_dim else 1)
        for site in runs[0].tensors
        if all(site in run.tensors for run in runs)
    }
    lost = tuple(site for site in runs[0].tensors if site not in tensors)
    return replace(
        runs[0],
        output=torch.cat([run.output for run in runs], dim=1),
        tensors=tensors,
        not_exposed=tuple(sorted((*runs[0].not_exposed, *lost), key=_order)),
        key_values=None,
        times=sum((run.times for run in runs), LayerTimes()),
    )


def _order(site: Site) -> int:
    return site.order


def _row(key_values: KeyValues, row: int) -> KeyValues:
    keys, values = (tensor[:, :, row : row + 1] for tensor in key_values)
    return keys, values


def _widened(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    batch_size, num_heads, num_held, head_dim = tensor.shape
    wide = tensor.new_zeros(batch_size, num_heads, num_rows, head_dim)
    wide[:, :, :num_held] = tensor
    return wide
