"""Experts regrouped from tensors of their own (the checkpoint) to grouped storage (what MoE kernels use).

E' experts asked for, I intermediate, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors, copy_weight
from minimax_tools.checkpoint.names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight


def group_experts(
    tensors: Mapping[str, torch.Tensor],
    experts: range,
    *,
    gate_up_out: torch.Tensor,
    down_out: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Fill grouped storage with `experts` in integer order: w1 rows, then w3 rows, in gate_up; w2 in down.

    Weights go expert by expert from where they are to where they belong: nothing larger than one expert's
    matrix exists beside the storage, which is meant to be kept and filled again for the next layer.

    Args:
        tensors: A layer's tensors under the hub's relative names; `LayerTensors` are read into the storage.
        experts: Numbers of the experts, the first of them going to index 0.
        gate_up_out: [E',2·I,H] in `dtype`.
        down_out: [E',H,I] in `dtype`.
        dtype: What the storage must be; BF16, unless a float32 twin is made on purpose.

    Raises:
        ValueError: The storage has another dtype or shape, or a weight does not fit it.
        CheckpointError: A weight cannot be read.
        KeyError: `tensors` lacks an expert.
    """
    _check_storage(experts, gate_up_out=gate_up_out, down_out=down_out, dtype=dtype)
    intermediate_size = down_out.shape[2]
    for place, expert in enumerate(experts):
        _place(tensors, expert_weight(expert, EXPERT_GATE), gate_up_out[place, :intermediate_size])
        _place(tensors, expert_weight(expert, EXPERT_UP), gate_up_out[place, intermediate_size:])
        _place(tensors, expert_weight(expert, EXPERT_DOWN), down_out[place])


def _place(tensors: Mapping[str, torch.Tensor], name: str, out: torch.Tensor) -> None:
    if isinstance(tensors, LayerTensors):
        tensors.read_into(name, out)
    else:
        copy_weight(name, tensors[name], out)


def _check_storage(
    experts: range, *, gate_up_out: torch.Tensor, down_out: torch.Tensor, dtype: torch.dtype
) -> None:
    for name, out in (("gate_up_out", gate_up_out), ("down_out", down_out)):
        if out.dtype != dtype:
            raise ValueError(f"{name} is {out.dtype}, expected {dtype}: another dtype gives other results")
        if out.dim() != 3 or out.shape[0] != len(experts):
            raise ValueError(f"{name} is {list(out.shape)}, expected 3 dims, {len(experts)} experts first")
    num_experts, hidden_size, intermediate_size = down_out.shape
    fitting = [num_experts, 2 * intermediate_size, hidden_size]
    if list(gate_up_out.shape) != fitting:
        raise ValueError(
            f"gate_up_out is {list(gate_up_out.shape)}, expected {fitting} "
            f"beside a down_out of {list(down_out.shape)}"
        )
