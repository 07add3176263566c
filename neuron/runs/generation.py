"""Decoding and generation on a device, from keys and values of earlier columns, one layer in memory at a time.

A column holds one token of each prompt: those at one index of S. Decoded column t must equal column t of the golden's
single pass, so a port is judged as in a whole pass. Generation begins with the finished capture of the whole model:

| token | made of |
|---|---|
| first | the captured logits |
| second | the first token; while each layer is in memory, its captured input gives the prompts' keys and values again |
| later | the token before, and the cached keys and values |

B batch, S columns of the batch, L columns of a cache, K kv heads, D head_dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs, num_tokens_left
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text.tokenizer import read_end_tokens, until_end
from neuron.builtin.layer import KeyValues
from neuron.runs.device_request import DeviceRequest
from neuron.runs.layer_run import LayerInput, LayerRequest, LayerRun, LayerTimes


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


def generate_greedily(
    request: DeviceRequest,
    capture: Capture,
    *,
    embed: Callable[[torch.Tensor], torch.Tensor],
    run_layer: Callable[[LayerRequest], LayerRun],
    read_logits: Callable[[torch.Tensor], torch.Tensor],
) -> list[list[int]]:
    """Return the most likely tokens after each row, up to a token that ends the text or the model's last position.

    Args:
        request: The run of the whole model.
        capture: The finished capture of that run.
        embed: Computes hidden states [B,1,H] from tokens [B,1].
        run_layer: Runs a layer.
        read_logits: Computes logits [B,1,vocab] from the last layer's output [B,1,H].
    """
    inputs, num_tokens = request.inputs, request.max_new_tokens
    last_position = request.spec.max_position_embeddings - 1
    end_tokens = read_end_tokens(request.folder)
    tokens = [_first_tokens(capture, inputs)]
    layers = _CachedLayers(request, capture, run_layer)
    attention_mask = inputs.attention_mask
    positions = inputs.next_positions.clamp(max=last_position)
    while len(tokens) < num_tokens and not _have_all_ended(torch.cat(tokens, dim=1), end_tokens):
        attention_mask = torch.cat((attention_mask, torch.ones_like(positions)), dim=1)
        states = layers.run(embed(tokens[-1]), attention_mask=attention_mask, position_ids=positions)
        # Rows that have ended run on beside the others, at a position that the model has.
        positions = (positions + 1).clamp(max=last_position)
        tokens.append(_likeliest(read_logits(states)[:, -1]))
    num_left = [
        num_tokens_left(row_positions[-1], request.spec.max_position_embeddings)
        for row_positions in inputs.row_positions()
    ]
    return [
        until_end(row[:left], end_tokens)
        for row, left in zip(torch.cat(tokens, dim=1).tolist(), num_left, strict=True)
    ]


class _CachedLayers:
    """The model's layers, with the keys and values so far; a column holds one token of each prompt (see `decoding`)."""

    def __init__(
        self, request: DeviceRequest, capture: Capture, run_layer: Callable[[LayerRequest], LayerRun]
    ) -> None:
        self._request, self._capture, self._run_layer = request, capture, run_layer
        # One for each layer that the first generated token has reached.
        self._caches: list[Cache] = []
        # The last token is never fed back.
        self._num_columns = request.inputs.sequence_length + request.max_new_tokens - 1
        if request.max_new_tokens > 1:
            # Keys and values, of at most float32.
            num_layer_values = (
                2 * request.inputs.batch_size * self._num_columns * request.spec.key_value_width
            )
            num_bytes = 4 * request.spec.num_hidden_layers * num_layer_values
            request.budget.require(num_bytes, "keys and values of all layers")

    def run(
        self, states: torch.Tensor, *, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Run one column through all layers: from hidden states [B,1,H] to the last layer's output [B,1,H]."""
        for layer in range(self._request.spec.num_hidden_layers):
            if layer == len(self._caches):
                # The first generated token: the layer's weights are in memory now, so the prompts run before it.
                prompts = LayerInput.of(self._capture.read(layer, Site.INPUT), self._request.inputs)
                # With the sites and calls of the captured run, the layer runs that run's graphs.
                _, key_values = self._run(
                    layer,
                    prompts,
                    sites=self._request.run.sites_of(layer),
                    calls=self._request.inputs.plan_calls(),
                )
                self._caches.append(Cache(key_values, num_columns=self._num_columns))
            cache = self._caches[layer]
            column = cache.input_of(states, attention_mask=attention_mask, position_ids=position_ids)
            states, key_values = self._run(layer, column)
            cache.append(key_values)
        return states

    def _run(
        self,
        layer: int,
        layer_input: LayerInput,
        *,
        sites: tuple[Site, ...] = (),
        calls: tuple[tuple[int, ...], ...] = (),
    ) -> tuple[torch.Tensor, KeyValues]:
        """Run a layer; return its output, and the keys and values of its input's tokens."""
        next_layer = layer + 1 if layer + 1 < self._request.spec.num_hidden_layers else None
        run = self._run_layer(
            LayerRequest(
                layer=layer,
                layer_input=layer_input,
                sites=sites,
                keeps_past=True,
                next_layer=next_layer,
                calls=calls,
            )
        )
        assert run.key_values is not None, "they were asked for"
        return run.output, run.key_values


def _first_tokens(capture: Capture, inputs: Inputs) -> torch.Tensor:
    """Choose the tokens [B,1] by the logits of each row's last real token."""
    logits = capture.read(None, ModelSite.LOGITS)
    # Padding counts as index 0, so the largest index is that of the last real token.
    real_indices = torch.arange(inputs.sequence_length) * inputs.attention_mask
    last = real_indices.argmax(dim=1)
    return _likeliest(logits[torch.arange(len(last)), last])


def _have_all_ended(tokens: torch.Tensor, end_tokens: frozenset[int]) -> bool:
    return all(end_tokens.intersection(row) for row in tokens.tolist())


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    if logits.isnan().any():
        raise TargetError(
            "no token can be chosen: logits are NaN",
            next_step="Find the layer that makes them: mm2-test sweep --golden DIR.",
        )
    return logits.argmax(dim=-1, keepdim=True)
