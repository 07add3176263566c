"""Resumption: a forward pass that takes up behind layers that are captured already, or that runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def skipping_layers(
    model: PreTrainedModel, num_layers: int, hidden_states: torch.Tensor | None
) -> Iterator[None]:
    """Let the first layers stand aside while the block lasts, so that their weights are not even read.

    Args:
        model: transformers' model.
        num_layers: How many layers not to run.
        hidden_states: [B,S,H], the output of the last of them; None where `num_layers` is 0.
    """
    layers: Any = model.get_submodule("model.layers")
    skipped = list(layers[:num_layers])
    for number in range(num_layers):
        layers[number] = _Passed(hidden_states if number == num_layers - 1 else None)
    try:
        yield
    finally:
        for number, layer in enumerate(skipped):
            layers[number] = layer


@contextmanager
def running_only(model: PreTrainedModel, layers: range, *, with_head: bool) -> Iterator[None]:
    """Let every other layer, and where no head is wanted the final norm, stand aside while the block lasts.

    The model is given the first layer's input as `inputs_embeds`; its base gives the last one's output then.

    Args:
        model: transformers' model.
        layers: The layers to run; may be none.
        with_head: Whether the final norm runs.
    """
    base: Any = model.get_submodule("model")
    replaced = {number: layer for number, layer in enumerate(base.layers) if number not in layers}
    norm = base.norm
    for number in replaced:
        base.layers[number] = _Passed(None)
    if not with_head:
        base.norm = _Passed(None)
    try:
        yield
    finally:
        base.norm = norm
        for number, layer in replaced.items():
            base.layers[number] = layer


class _Passed(torch.nn.Module):
    """Stands for a layer that ran before: gives its output, or what it is given where that is not known."""

    def __init__(self, output: torch.Tensor | None) -> None:
        super().__init__()
        self._output = output

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states if self._output is None else self._output.to(hidden_states)
