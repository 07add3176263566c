"""Points of a model for vLLM Neuron at which its tensor replacement can replace the stream.

The plugin hands a model its replacement tensors by name, and the model takes them by `get_replacement_tensor`. Each
point has two: the values [T,H], and a mask [T,1], which is 0 where nothing is replaced, as on padding. So the graph is
compiled once for all points.
T tokens of the pass, H hidden.
"""

from __future__ import annotations

import torch

# Behind the name of a point's values.
MASK = ".mask"


def point_name(point: int, *, num_layers: int) -> str:
    """Return the name of the values at a point: a layer's number, or the number of layers for the final norm."""
    return "model.norm.input" if point == num_layers else f"model.layers.{point}.input"


def replace_stream(states: torch.Tensor, name: str, *, rank: int | torch.Tensor = 0) -> torch.Tensor:
    """Return the stream [T,H] with the replacement of a point in it; as it is where none is configured.

    Where the ranks divide the tokens of a pass, `rank` says which of them these are.
    """
    found = _find(name, states, rank=rank)
    return states if found is None else torch.where(found[1], found[0], states)


def replace_summands(
    states: torch.Tensor, residual: torch.Tensor | None, name: str, *, rank: int | torch.Tensor = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do the same to a stream that a model passes on as two summands: the values are the first, zeros the second."""
    if residual is None:
        return replace_stream(states, name, rank=rank), None
    found = _find(name, states, rank=rank)
    if found is None:
        return states, residual
    values, mask = found
    return torch.where(mask, values, states), residual.masked_fill(mask, 0.0)


def _find(
    name: str, states: torch.Tensor, *, rank: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return values [T,H] and mask [T,1] of these tokens; None where no replacement is configured."""
    from vllm_neuron.accuracy.tensor_replacement import get_replacement_tensor

    values, mask = get_replacement_tensor(name), get_replacement_tensor(name + MASK)
    if values is None or mask is None:
        return None
    num_tokens, hidden_size = states.shape[-2], states.shape[-1]
    parts = []
    for tensor in (values, mask):
        divided = tensor.unflatten(0, (-1, num_tokens))
        # A pass whose tokens are not divided has one part, for every rank.
        index = torch.as_tensor(rank, device=tensor.device).reshape(1).long() % len(divided)
        parts.append(divided.index_select(0, index)[0])
    return parts[0].to(states.dtype).reshape(num_tokens, hidden_size), parts[1] != 0
