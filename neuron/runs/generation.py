"""Generation on a device: every next token goes through all layers, one of them in memory at a time.

What a capture of the whole model holds is where it begins: logits for the first token, and each layer's input, which
gives its keys and values while its weights are there for the second.
B batch, S rows of the prompts, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs, num_positions_left
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from neuron.runs.decoding import Cache
from neuron.runs.layer_input import LayerInput
from neuron.runs.layer_run import LayerRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The parts of a model on a device, called one after the other.

    Args:
        embed: Tokens [B,1] to hidden states [B,1,H].
        run_layer: Runs a layer, and gives the keys and values of its rows; the last argument is the layer after it.
        read_logits: The last layer's output [B,1,H] to logits [B,1,vocab].
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    run_layer: Callable[[int, LayerInput, int | None], LayerRun]
    read_logits: Callable[[torch.Tensor], torch.Tensor]


def generate_greedily(
    model: Model,
    capture: Capture,
    inputs: Inputs,
    *,
    num_tokens: int,
    end_tokens: frozenset[int],
    spec: ModelSpec,
    budget: MemoryBudget,
) -> list[list[int]]:
    """The most likely tokens after each row, until one of them ends its text or the model has no further position.

    Args:
        model: Computes.
        capture: The whole model's run of `inputs`, stored.
        inputs: The prompts.
        num_tokens: How many tokens, at most.
        end_tokens: What ends a text.
        spec: The model's quantities.
        budget: Keys and values of all layers are held against it.

    Raises:
        MemoryBudgetError: They do not fit.
        TargetError: The port takes or gives no past, or its logits are NaN.
    """
    tokens = [_first_tokens(capture, inputs)]
    caches: list[Cache] = []
    budget.require(
        _cache_bytes(spec, inputs, num_tokens) if num_tokens > 1 else 0, "keys and values of all layers"
    )
    attention_mask = inputs.attention_mask
    positions = inputs.next_positions.clamp(max=spec.max_position_embeddings - 1)
    while len(tokens) < num_tokens and not all(
        _has_ended(row, end_tokens) for row in torch.cat(tokens, dim=1)
    ):
        attention_mask = torch.cat((attention_mask, torch.ones_like(positions)), dim=1)
        states = model.embed(tokens[-1])
        for layer in range(spec.num_hidden_layers):
            then = layer + 1 if layer + 1 < spec.num_hidden_layers else None
            if len(caches) == layer:
                whole = LayerInput.of(capture.read(layer, Site.INPUT), inputs)
                key_values = model.run_layer(layer, whole, then).key_values
                assert key_values is not None, "they were asked for"
                caches.append(Cache(key_values, num_rows=inputs.sequence_length + num_tokens - 1))
            given = caches[layer].input_of(states, attention_mask=attention_mask, position_ids=positions)
            result = model.run_layer(layer, given, then)
            assert result.key_values is not None, "they were asked for"
            caches[layer].append(result.key_values)
            states = result.output
        # Rows that have ended run on beside the others, at a position that the model has.
        positions = (positions + 1).clamp(max=spec.max_position_embeddings - 1)
        tokens.append(_likeliest(model.read_logits(states)[:, -1]))
    return [
        _until_end(row[:left], end_tokens)
        for row, left in zip(torch.cat(tokens, dim=1), _positions_left(inputs, spec), strict=True)
    ]


def _positions_left(inputs: Inputs, spec: ModelSpec) -> list[int]:
    """Return how many tokens can follow each row."""
    return [
        num_positions_left(positions[-1], spec.max_position_embeddings)
        for positions in inputs.row_positions()
    ]


def _first_tokens(capture: Capture, inputs: Inputs) -> torch.Tensor:
    """What the logits of each row's last real token say, [B,1]."""
    logits = capture.read_model(ModelSite.LOGITS)
    places = torch.arange(inputs.sequence_length) * inputs.attention_mask
    last = places.argmax(dim=1)
    return _likeliest(logits[torch.arange(len(last)), last])


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The token with the largest logit, [B,1] of [B,vocab]."""
    if logits.isnan().any():
        raise TargetError(
            "no token can be chosen: logits are NaN",
            next_step="Find the layer that makes them: mm2-test sweep --golden DIR.",
        )
    return logits.argmax(dim=-1, keepdim=True)


def _has_ended(row: torch.Tensor, ended: frozenset[int]) -> bool:
    return not ended.isdisjoint(row.tolist())


def _until_end(row: torch.Tensor, ended: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends the text, that one included."""
    tokens: list[int] = row.tolist()
    ends = [index for index, token in enumerate(tokens) if token in ended]
    return tokens[: ends[0] + 1] if ends else tokens


def _cache_bytes(spec: ModelSpec, inputs: Inputs, num_tokens: int) -> int:
    num_rows = inputs.batch_size * (inputs.sequence_length + num_tokens - 1)
    # Two of them, of at most float32.
    return spec.num_hidden_layers * num_rows * 2 * spec.key_value_width * 4
