"""Decoding: rows of a layer computed one at a time, from the keys and values of the rows before them.

Decoded row t must equal row t of the golden's single pass, so a port is judged as in a whole pass.
B batch, S rows of the batch, L rows of a cache, K kv heads, D head_dim.
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
    """Keys and values of a batch's rows, of one length L for every step, so that no graph depends on the step.

    Args:
        key_values: Keys and values of the first rows, [B,K,rows,D] both, on the CPU.
        num_rows: Capacity in rows, L.
    """

    def __init__(self, key_values: KeyValues, *, num_rows: int) -> None:
        self._num_held = key_values[0].shape[2]
        self._keys, self._values = (_widened(tensor, num_rows) for tensor in key_values)

    def append(self, key_values: KeyValues) -> None:
        """Append the keys and values of one row, [B,K,1,D] both."""
        for held, new in zip((self._keys, self._values), key_values, strict=True):
            held[:, :, self._num_held : self._num_held + 1] = new
        self._num_held += 1

    def input_of(
        self, hidden_states: torch.Tensor, *, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> LayerInput:
        """Build the input of one pass over the row after those held.

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
    rows: range,
    sites: tuple[Site, ...],
    past: KeyValues | None = None,
) -> LayerRun:
    """Run all rows before `rows` in one pass, and each of `rows` in a pass of its own.

    The keys and values that the port returns are recorded as `k_rope` and `v_proj`, whatever it exposes there: decoding
    depends on them, so they are judged.

    Args:
        run: Runs the layer, and returns the keys and values of its rows too.
        whole: All rows.
        rows: The rows to decode; the rows after them are padding, and stay zero.
        sites: The sites to record.
        past: Keys and values [B,K,S,D] to decode from, such as the golden's; None for the layer's own.
    """
    first = run(whole.first(rows.start))
    cache = Cache(_key_values(first, past, range(rows.start)), num_rows=rows.stop - 1)
    runs = [first]
    for row in rows:
        step = run(
            cache.input_of(
                whole.hidden_states[:, row : row + 1],
                attention_mask=whole.attention_mask[:, : row + 1],
                position_ids=whole.position_ids[:, row : row + 1],
            )
        )
        runs.append(step)
        if row < rows.stop - 1:
            cache.append(_key_values(step, past, range(row, row + 1)))
    return _joined([_with_cache(one, sites) for one in runs], num_padding=whole.num_rows - rows.stop)


def _with_cache(run: LayerRun, sites: tuple[Site, ...]) -> LayerRun:
    """Put the keys and values that a run returned at the sites where the golden has them."""
    keys, values = _key_values(run)
    returned = {Site.K_ROPE: keys, Site.V_PROJ: values.transpose(1, 2).flatten(2)}
    tensors = {**run.tensors, **{site: tensor for site, tensor in returned.items() if site in sites}}
    return replace(
        run,
        tensors={site: tensors[site] for site in sorted(tensors, key=_order)},
        not_exposed=tuple(site for site in run.not_exposed if site not in tensors),
    )


def _joined(runs: list[LayerRun], *, num_padding: int) -> LayerRun:
    """Join the passes to one run of all rows; a site that one pass lacks is left out."""
    tensors = {
        site: _padded([run.tensors[site] for run in runs], 2 if site.has_heads_dim else 1, num_padding)
        for site in runs[0].tensors
        if all(site in run.tensors for run in runs)
    }
    lost = tuple(site for site in runs[0].tensors if site not in tensors)
    return replace(
        runs[0],
        output=_padded([run.output for run in runs], 1, num_padding),
        tensors=tensors,
        not_exposed=tuple(sorted((*runs[0].not_exposed, *lost), key=_order)),
        key_values=None,
        times=sum((run.times for run in runs), LayerTimes()),
    )


def _padded(pieces: list[torch.Tensor], dim: int, num_padding: int) -> torch.Tensor:
    """Concatenate the pieces along `dim`, and append zeros."""
    shape = list(pieces[0].shape)
    shape[dim] = num_padding
    return torch.cat((*pieces, pieces[0].new_zeros(shape)), dim=dim)


def _key_values(run: LayerRun, past: KeyValues | None = None, rows: range = range(0)) -> KeyValues:
    """Return the given past of these rows, or, without one, what the run returned."""
    if past is None:
        assert run.key_values is not None, "a run that decodes returns keys and values"
        return run.key_values
    keys, values = (tensor[:, :, rows.start : rows.stop] for tensor in past)
    return keys, values


def _order(site: Site) -> int:
    return site.order


def _widened(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    batch_size, num_heads, num_held, head_dim = tensor.shape
    wide = tensor.new_zeros(batch_size, num_heads, num_rows, head_dim)
    wide[:, :, :num_held] = tensor
    return wide
