"""Generation on a device: each next token goes through all layers, one of which is in memory at a time.

It begins with the capture of the whole model. The logits give the first token. For the second, each layer's input
gives its keys and values again, while the layer's weights are in memory.
B batch, S rows of the prompts, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs, num_positions_left
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text.tokenizer import read_end_tokens
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
    inputs, spec, num_tokens = request.inputs, request.spec, request.max_new_tokens
    end_tokens = read_end_tokens(request.folder)
    num_cached = inputs.sequence_length + num_tokens - 1

    def run(
        layer: int, layer_input: LayerInput, sites: tuple[Site, ...] = ()
    ) -> tuple[torch.Tensor, KeyValues]:
        next_layer = layer + 1 if layer + 1 < spec.num_hidden_layers else None
        result = run_layer(
            LayerRequest(
                layer=layer, layer_input=layer_input, sites=sites, keeps_past=True, next_layer=next_layer
            )
        )
        assert result.key_values is not None, "they were asked for"
        return result.output, result.key_values

    tokens = [_first_tokens(capture, inputs)]
    caches: list[Cache] = []
    if num_tokens > 1:
        # Keys and values, of at most float32.
        values = spec.num_hidden_layers * inputs.batch_size * num_cached * 2 * spec.key_value_width
        request.budget.require(4 * values, "keys and values of all layers")
    attention_mask = inputs.attention_mask
    positions = inputs.next_positions.clamp(max=spec.max_position_embeddings - 1)
    while len(tokens) < num_tokens and not all(
        end_tokens.intersection(row) for row in torch.cat(tokens, dim=1).tolist()
    ):
        attention_mask = torch.cat((attention_mask, torch.ones_like(positions)), dim=1)
        states = embed(tokens[-1])
        for layer in range(spec.num_hidden_layers):
            if len(caches) == layer:
                whole = LayerInput.of(capture.read(layer, Site.INPUT), inputs)
                # With the sites of the captured run, it has the graphs of that run.
                _, key_values = run(layer, whole, request.run.sites)
                caches.append(Cache(key_values, num_rows=num_cached))
            cache = caches[layer]
            row = cache.input_of(states, attention_mask=attention_mask, position_ids=positions)
            states, key_values = run(layer, row)
            cache.append(key_values)
        # Rows that have ended run on beside the others, at a position that the model has.
        positions = (positions + 1).clamp(max=spec.max_position_embeddings - 1)
        tokens.append(_likeliest(read_logits(states)[:, -1]))
    num_left = [
        num_positions_left(positions[-1], spec.max_position_embeddings)
        for positions in inputs.row_positions()
    ]
    return [
        _until_end(row[:left], end_tokens)
        for row, left in zip(torch.cat(tokens, dim=1), num_left, strict=True)
    ]


def _first_tokens(capture: Capture, inputs: Inputs) -> torch.Tensor:
    """Choose the tokens [B,1] by the logits of each row's last real token."""
    logits = capture.read_model(ModelSite.LOGITS)
    places = torch.arange(inputs.sequence_length) * inputs.attention_mask
    last = places.argmax(dim=1)
    return _likeliest(logits[torch.arange(len(last)), last])


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B,1] with the largest of logits [B,vocab]."""
    if logits.isnan().any():
        raise TargetError(
            "no token can be chosen: logits are NaN",
            next_step="Find the layer that makes them: mm2-test sweep --golden DIR.",
        )
    return logits.argmax(dim=-1, keepdim=True)


def _until_end(row: torch.Tensor, ended: frozenset[int]) -> list[int]:
    """Cut a row after the first token that ends the text."""
    tokens: list[int] = row.tolist()
    ends = [index for index, token in enumerate(tokens) if token in ended]
    return tokens[: ends[0] + 1] if ends else tokens
