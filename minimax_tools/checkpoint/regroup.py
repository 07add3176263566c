"""Experts regrouped from tensors of their own (the checkpoint) to grouped storage (what MoE kernels use).

Storage that holds each matrix transposed, [E',H,2·I] and [E',I,H], is filled through its view `.mT`.
E' experts asked for, I intermediate, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors, copy_weight
from minimax_tools.model.weight_names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight


def group_gate_up(
    tensors: Mapping[str, torch.Tensor],
    experts: range,
    out: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Fill `out` with the gate (w1) rows and then the up (w3) rows of `experts`, in integer order.

    Weights go matrix by matrix from where they are to where they belong: nothing larger than one expert's
    matrix exists beside the storage, which is meant to be kept and filled again for the next layer.

    Args:
        tensors: A layer's tensors under the hub's relative names; `LayerTensors` are read into the storage.
        experts: Numbers of the experts, the first of them going to index 0.
        out: [E',2·I,H] in `dtype`.
        dtype: What the storage must be; BF16, unless a float32 run is made on purpose.

    Raises:
        ValueError: The storage has another dtype or shape, or a weight does not fit it.
        CheckpointError: A weight cannot be read.
        KeyError: `tensors` lacks an expert.
    """
    _fill(tensors, gate_up_places(experts, out, dtype=dtype))


def group_down(
    tensors: Mapping[str, torch.Tensor],
    experts: range,
    out: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Fill `out` [E',H,I] with the down (w2) matrices of `experts`; see `group_gate_up`."""
    _fill(tensors, down_places(experts, out, dtype=dtype))


def gate_up_places(experts: range, out: torch.Tensor, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Where in `out` [E',2·I,H] the gate (w1) and up (w3) matrices of `experts` go: views [I,H] by relative name.

    Raises:
        ValueError: The storage is not `dtype`, or has another shape.
    """
    _check_storage(experts, out, dtype=dtype)
    if out.shape[1] % 2:
        raise ValueError(f"gate_up storage is {list(out.shape)}, expected gate and up rows of one height")
    intermediate_size = out.shape[1] // 2
    places = {}
    for index, expert in enumerate(experts):
        places[expert_weight(expert, EXPERT_GATE)] = out[index, :intermediate_size]
        places[expert_weight(expert, EXPERT_UP)] = out[index, intermediate_size:]
    return places


def down_places(experts: range, out: torch.Tensor, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Where in `out` [E',H,I] the down (w2) matrices of `experts` go; see `gate_up_places`."""
    _check_storage(experts, out, dtype=dtype)
    return {expert_weight(expert, EXPERT_DOWN): out[index] for index, expert in enumerate(experts)}


def _fill(tensors: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor]) -> None:
    for name, place in places.items():
        if isinstance(tensors, LayerTensors):
            tensors.read_into(name, place)
        else:
            copy_weight(name, tensors[name], place)


def _check_storage(experts: range, out: torch.Tensor, *, dtype: torch.dtype) -> None:
    if out.dtype != dtype:
        raise ValueError(f"the storage is {out.dtype}, expected {dtype}: another dtype gives other results")
    if out.dim() != 3 or out.shape[0] != len(experts):
        raise ValueError(f"the storage is {list(out.shape)}, expected 3 dims, {len(experts)} experts first")
