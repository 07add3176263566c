"""Generation on a device: each next token goes through all layers, with one layer in memory at a time.

Generation begins with the finished capture of the whole model:

| token | made of |
|---|---|
| first | the captured logits |
| second | the first token; while each layer is in memory, its captured input gives the prompts' keys and values again |
| later | the token before, and the cached keys and values |

B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs, num_tokens_left
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text.tokenizer import read_end_tokens, until_end
from neuron.builtin.layer import KeyValues
from neuron.runs.decoding import Cache
from neuron.runs.device_request import DeviceRequest
from neuron.runs.layer_run import LayerInput, LayerRequest, LayerRun


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

    Raises:
        MemoryBudgetError: The keys and values of all layers do not fit.
        TargetError: The port takes or gives no past, or its logits are NaN.
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
                    sites=self._request.run.sites,
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
    logits = capture.read_model(ModelSite.LOGITS)
    # Padding counts as index 0, so the largest index is that of the last real token.
    real_indices = torch.arange(inputs.sequence_length) * inputs.attention_mask
    last = real_indices.argmax(dim=1)
    return _likeliest(logits[torch.arange(len(last)), last])


def _have_all_ended(tokens: torch.Tensor, end_tokens: frozenset[int]) -> bool:
    """Decide whether every row of tokens [B,generated] holds a token that ends the text."""
    return all(end_tokens.intersection(row) for row in tokens.tolist())


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B,1] with the largest of logits [B,vocab]."""
    if logits.isnan().any():
        raise TargetError(
            "no token can be chosen: logits are NaN",
            next_step="Find the layer that makes them: mm2-test sweep --golden DIR.",
        )
    return logits.argmax(dim=-1, keepdim=True)
