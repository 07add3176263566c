"""Forward passes that skip some layers, because they are captured already or run in another process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def skipping_layers(
    model: PreTrainedModel, num_layers: int, hidden_states: torch.Tensor | None
) -> Iterator[None]:
    """Skip the first `num_layers` layers during the block; if the model is streamed, their weights are not read.

    `hidden_states` [B,S,H] is the output of the last skipped layer; None if `num_layers` is 0.
    """
    stand_ins = {number: _StandIn(None) for number in range(num_layers)}
    if num_layers:
        stand_ins[num_layers - 1] = _StandIn(hidden_states)
    with _replaced_layers(model, stand_ins):
        yield


@contextmanager
def running_only(model: PreTrainedModel, layers: range, *, with_head: bool) -> Iterator[None]:
    """Run only `layers` during the block, and the final norm only if `with_head`.

    A run that begins after layer 0 takes `inputs_embeds`. Without a head, the base model gives the last layer's output.
    """
    base: Any = model.get_submodule("model")
    norm = base.norm
    skipped = [number for number in range(len(base.layers)) if number not in layers]
    if not with_head:
        base.norm = _StandIn(None)
    try:
        with _replaced_layers(model, {number: _StandIn(None) for number in skipped}):
            yield
    finally:
        base.norm = norm


@contextmanager
def _replaced_layers(model: PreTrainedModel, stand_ins: Mapping[int, torch.nn.Module]) -> Iterator[None]:
    layers: Any = model.get_submodule("model.layers")
    replaced = {number: layers[number] for number in stand_ins}
    for number, stand_in in stand_ins.items():
        layers[number] = stand_in
    try:
        yield
    finally:
        for number, layer in replaced.items():
            layers[number] = layer


class _StandIn(torch.nn.Module):
    """A module in place of a skipped one: returns `output`, the skipped module's; with None, what it was given."""

    def __init__(self, output: torch.Tensor | None) -> None:
        super().__init__()
        self._output = output

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states if self._output is None else self._output.to(hidden_states)
