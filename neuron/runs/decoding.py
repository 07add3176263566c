"""Decoding: columns of a batch computed one at a time, from the keys and values of the columns before them.

A column holds one token of each prompt: those at one index of S. Decoded column t must equal column t of the golden's
single pass, so a port is judged as in a whole pass.
B batch, S columns of the batch, L columns of a cache, K kv heads, D head_dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from minimax_tools.model.sites import Site
from neuron.builtin.layer import KeyValues
from neuron.runs.layer_run import LayerInput, LayerRun
from neuron.runs.layer_times import LayerTimes


class Cache:
    """Keys and values of a batch's columns. The tensors have L columns at every step, so no graph depends on the step.

    Args:
        key_values: Keys and values of the first columns, [B,K,columns,D] each, on the CPU.
        num_columns: Capacity in columns, L.
    """

    def __init__(self, key_values: KeyValues, *, num_columns: int) -> None:
        # Columns filled so far, of the L.
        self._num_held = key_values[0].shape[2]
        self._keys, self._values = (_widened(tensor, num_columns) for tensor in key_values)

    def append(self, key_values: KeyValues) -> None:
        """Append the keys and values of one column, [B,K,1,D] each."""
        for cached, new in zip((self._keys, self._values), key_values, strict=True):
            cached[:, :, self._num_held : self._num_held + 1] = new
        self._num_held += 1

    def input_of(
        self, hidden_states: torch.Tensor, *, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> LayerInput:
        """Build the input of one pass over the next column: its states [B,1,H] and positions [B,1], and the cache.

        `attention_mask` [B,held+1] of 0/1 has the columns held and the next one. The input's mask [B,L+1] also hides
        the cache's unused columns, which lie between these.
        """
        batch_size, num_unused = hidden_states.shape[0], self._keys.shape[2] - self._num_held
        held_mask, next_mask = attention_mask[:, : self._num_held], attention_mask[:, self._num_held :]
        unused_mask = attention_mask.new_zeros(batch_size, num_unused)
        return LayerInput(
            hidden_states=hidden_states,
            attention_mask=torch.cat((held_mask, unused_mask, next_mask), dim=1),
            position_ids=position_ids,
            past=(self._keys, self._values),
        )


def run_decoding(
    run_pass: Callable[[LayerInput], LayerRun],
    layer_input: LayerInput,
    *,
    columns: range,
    sites: tuple[Site, ...],
    past: KeyValues | None = None,
) -> LayerRun:
    """Run the columns before `columns` in one pass, and each column of `columns` in a pass of its own.

    The keys and values that the port returns are recorded as `k_rope` and `v_proj`, whatever the port exposes there:
    decoding depends on them, so they are judged.

    Args:
        run_pass: Runs the layer on some columns, and returns their keys and values too.
        layer_input: The layer's input for all columns.
        columns: The columns to decode; the columns after them are padding, and stay zero.
        sites: The sites to record.
        past: Keys and values [B,K,S,D] of all columns to decode from, such as the golden's; None to decode from those
            that the port returns.
    """
    prefill = run_pass(layer_input.first(columns.start))
    passes = [prefill]
    # The last column is never read from the cache.
    cache = Cache(_choose_key_values(prefill, past, range(columns.start)), num_columns=columns.stop - 1)
    for column in columns:
        decoded = run_pass(
            cache.input_of(
                layer_input.hidden_states[:, column : column + 1],
                attention_mask=layer_input.attention_mask[:, : column + 1],
                position_ids=layer_input.position_ids[:, column : column + 1],
            )
        )
        passes.append(decoded)
        if column < columns.stop - 1:
            cache.append(_choose_key_values(decoded, past, range(column, column + 1)))
    passes = [_record_key_values(run, sites) for run in passes]
    return _join(passes, num_padding=layer_input.hidden_states.shape[1] - columns.stop)


def _choose_key_values(run: LayerRun, past: KeyValues | None, columns: range) -> KeyValues:
    """Return the keys and values of `columns` from `past`; without a past, those that `run`, of these, returned."""
    if past is None:
        return _returned_key_values(run)
    keys, values = (tensor[:, :, columns.start : columns.stop] for tensor in past)
    return keys, values


def _returned_key_values(run: LayerRun) -> KeyValues:
    assert run.key_values is not None, "a run that decodes returns keys and values"
    return run.key_values


def _record_key_values(run: LayerRun, sites: tuple[Site, ...]) -> LayerRun:
    """Put the keys and values that a run returned at the sites where the golden has them."""
    keys, values = _returned_key_values(run)
    returned = {Site.K_ROPE: keys, Site.V_PROJ: values.transpose(1, 2).flatten(2)}
    tensors = {**run.tensors, **{site: tensor for site, tensor in returned.items() if site in sites}}
    return replace(
        run,
        tensors={site: tensors[site] for site in sorted(tensors, key=_order)},
        not_exposed=tuple(site for site in run.not_exposed if site not in tensors),
    )


def _join(passes: list[LayerRun], *, num_padding: int) -> LayerRun:
    """Join the passes into one run of all columns; a site that one pass lacks is left out."""
    first = passes[0]
    tensors = {}
    for site in first.tensors:
        if all(site in run.tensors for run in passes):
            # Columns are dim 2 of [B,heads,S,D], dim 1 of [B,S,…].
            dim = 2 if site.has_heads_dim else 1
            tensors[site] = _concatenate([run.tensors[site] for run in passes], dim, num_padding)
    left_out = tuple(site for site in first.tensors if site not in tensors)
    return replace(
        first,
        output=_concatenate([run.output for run in passes], 1, num_padding),
        tensors=tensors,
        not_exposed=tuple(sorted((*first.not_exposed, *left_out), key=_order)),
        key_values=None,
        times=sum((run.times for run in passes), LayerTimes()),
    )


def _concatenate(tensors: list[torch.Tensor], dim: int, num_padding: int) -> torch.Tensor:
    """Concatenate tensors along `dim`, and append `num_padding` columns of zeros."""
    shape = list(tensors[0].shape)
    shape[dim] = num_padding
    return torch.cat((*tensors, tensors[0].new_zeros(shape)), dim=dim)


def _order(site: Site) -> int:
    return site.order


def _widened(tensor: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return a copy of [B,K,held,D] with `num_columns` columns, those after the held ones zero."""
    batch_size, num_heads, num_held, head_dim = tensor.shape
    wide = tensor.new_zeros(batch_size, num_heads, num_columns, head_dim)
    wide[:, :, :num_held] = tensor
    return wide
