"""Repairs of mistakes that a change of the layer's tensors undoes.

The bodies are printed as lines for a port's `convert_state_dict`: they use `tensors`, `config`, torch and parameters of
the mistake, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from compare.diagnosis.mistake import Tensors, WeightRepair
from minimax_tools.model.sites import Site

# Sites whose heads hold their dims in another order once the rows of q_proj and k_proj do.
_QUERIES_AND_KEYS = (Site.Q_PROJ, Site.K_PROJ, Site.Q_NORM, Site.K_NORM, Site.Q_ROPE, Site.K_ROPE)


def _exchange_gate_and_up(tensors: Tensors, config: Any) -> None:
    """Exchange w1 and w3 of every expert."""
    for expert in range(config.num_local_experts):
        gate = f"block_sparse_moe.experts.{expert}.w1.weight"
        up = f"block_sparse_moe.experts.{expert}.w3.weight"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _interleave_gate_and_up(tensors: Tensors, config: Any) -> None:
    """Let rows of w1 and w3 take turns, so that even and odd rows of [w1 | w3] are gate and up."""
    for expert in range(config.num_local_experts):
        gate = f"block_sparse_moe.experts.{expert}.w1.weight"
        up = f"block_sparse_moe.experts.{expert}.w3.weight"
        rows = torch.stack((tensors[gate], tensors[up]), dim=1).flatten(0, 1)
        tensors[gate], tensors[up] = rows.chunk(2)


def _part_gate_and_up(tensors: Tensors, config: Any) -> None:
    """Spread w1 and w3 so that, with their rows taking turns, the first half is gate and the second up."""
    for expert in range(config.num_local_experts):
        gate = f"block_sparse_moe.experts.{expert}.w1.weight"
        up = f"block_sparse_moe.experts.{expert}.w3.weight"
        rows = torch.cat((tensors[gate], tensors[up]))
        tensors[gate], tensors[up] = rows[0::2], rows[1::2]


def _shift_experts(tensors: Tensors, config: Any, offset: int) -> None:
    """Put every expert where the port reads it: `offset` places further."""
    hub = {name: tensors[name] for name in tensors if ".experts." in name}
    num_experts = config.num_local_experts
    for expert in range(num_experts):
        for matrix in ("w1", "w2", "w3"):
            place = f"block_sparse_moe.experts.{(expert + offset) % num_experts}.{matrix}.weight"
            tensors[place] = hub[f"block_sparse_moe.experts.{expert}.{matrix}.weight"]


def _undo_text_order(tensors: Tensors, config: Any) -> None:
    """Put every expert where the port reads it: at its place in the order 0, 1, 10, 11."""
    hub = {name: tensors[name] for name in tensors if ".experts." in name}
    for expert, place in enumerate(sorted(range(config.num_local_experts), key=str)):
        for matrix in ("w1", "w2", "w3"):
            name = f"block_sparse_moe.experts.{place}.{matrix}.weight"
            tensors[name] = hub[f"block_sparse_moe.experts.{expert}.{matrix}.weight"]


def _exchange_experts(tensors: Tensors, config: Any, first: int, second: int) -> None:
    """Exchange the weights of two experts."""
    for matrix in ("w1", "w2", "w3"):
        one = f"block_sparse_moe.experts.{first}.{matrix}.weight"
        other = f"block_sparse_moe.experts.{second}.{matrix}.weight"
        tensors[one], tensors[other] = tensors[other], tensors[one]


def _put_experts_in_place(tensors: Tensors, config: Any, order: str) -> None:
    """Put every expert where the port reads it: number n computes with what lies at `order[n]`."""
    hub = {name: tensors[name] for name in tensors if ".experts." in name}
    for expert, place in enumerate(order.split()):
        for matrix in ("w1", "w2", "w3"):
            name = f"block_sparse_moe.experts.{place}.{matrix}.weight"
            tensors[name] = hub[f"block_sparse_moe.experts.{expert}.{matrix}.weight"]


def _divide_down(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide w2 of every expert by the factor."""
    for expert in range(config.num_local_experts):
        name = f"block_sparse_moe.experts.{expert}.w2.weight"
        tensors[name] = tensors[name] / factor


def _divide_output_projection(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide o_proj by the factor."""
    tensors["self_attn.o_proj.weight"] = tensors["self_attn.o_proj.weight"] / factor


def _divide_projection(tensors: Tensors, config: Any, tensor: str, factor: float) -> None:
    """Divide q_proj, k_proj or v_proj by the factor."""
    name = f"self_attn.{tensor}.weight"
    tensors[name] = tensors[name] / factor


def _divide_query_norm(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide the weight of q_norm by the factor."""
    tensors["self_attn.q_norm.weight"] = tensors["self_attn.q_norm.weight"] / factor


def _divide_key_norm(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide the weight of k_norm by the factor."""
    tensors["self_attn.k_norm.weight"] = tensors["self_attn.k_norm.weight"] / factor


def _subtract_one_from_input_norm(tensors: Tensors, config: Any) -> None:
    """Subtract one from the weight of the input norm."""
    tensors["input_layernorm.weight"] = tensors["input_layernorm.weight"] - 1


def _subtract_one_from_post_norm(tensors: Tensors, config: Any) -> None:
    """Subtract one from the weight of the norm before the experts."""
    tensors["post_attention_layernorm.weight"] = tensors["post_attention_layernorm.weight"] - 1


def _exchange_keys_and_values(tensors: Tensors, config: Any) -> None:
    """Exchange k_proj and v_proj."""
    key, value = "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    tensors[key], tensors[value] = tensors[value], tensors[key]


def _reorder_query_heads(tensors: Tensors, config: Any, order: str) -> None:
    """Put the heads of q_proj in the order that the port's cut turns into the right one."""
    num_groups = config.num_key_value_heads
    num_outer = config.num_attention_heads // num_groups if order == "by group" else num_groups
    heads = tensors["self_attn.q_proj.weight"].unflatten(0, (num_outer, -1, config.head_dim))
    tensors["self_attn.q_proj.weight"] = heads.transpose(0, 1).flatten(0, 2)


def _spread_over_groups(tensors: Tensors, config: Any) -> None:
    """Spread the rows [all Q | all K | all V] over q_proj, k_proj and v_proj as the port lays them out per kv group."""
    names = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    groups = torch.cat([tensors[name] for name in names]).unflatten(0, (config.num_key_value_heads, -1))
    sizes = [tensors[name].shape[0] // config.num_key_value_heads for name in names]
    for name, rows in zip(names, groups.split(sizes, dim=1), strict=True):
        tensors[name] = rows.flatten(0, 1)


def _interleave_rotated_dims(tensors: Tensors, config: Any) -> None:
    """Put dim i + rotary_dim/2 of every head of queries and keys beside dim i."""
    rotated = torch.arange(config.rotary_dim).unflatten(0, (2, -1)).T.flatten()
    order = torch.cat((rotated, torch.arange(config.rotary_dim, config.head_dim)))
    for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
        heads = tensors[f"self_attn.{name}.weight"].unflatten(0, (-1, config.head_dim))
        tensors[f"self_attn.{name}.weight"] = heads[:, order].flatten(0, 1)


def _move_rotated_dims_behind(tensors: Tensors, config: Any) -> None:
    """Put the first rotary_dim dims of every head of queries and keys behind the others."""
    for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
        heads = tensors[f"self_attn.{name}.weight"].unflatten(0, (-1, config.head_dim))
        tensors[f"self_attn.{name}.weight"] = heads.roll(-config.rotary_dim, dims=1).flatten(0, 1)


def _negate_correction_bias(tensors: Tensors, config: Any) -> None:
    """Negate the correction bias."""
    name = "block_sparse_moe.e_score_correction_bias"
    tensors[name] = -tensors[name]


GATE_AND_UP_EXCHANGED = WeightRepair(edit=_exchange_gate_and_up)
GATE_AND_UP_INTERLEAVED = WeightRepair(edit=_interleave_gate_and_up)
GATE_AND_UP_PARTED = WeightRepair(edit=_part_gate_and_up)
EXPERTS_SHIFTED = WeightRepair(edit=_shift_experts)
EXPERTS_IN_NUMBER_ORDER = WeightRepair(edit=_undo_text_order)
EXPERTS_IN_PLACE = WeightRepair(edit=_put_experts_in_place)
TWO_EXPERTS_EXCHANGED = WeightRepair(edit=_exchange_experts)
DOWN_DIVIDED = WeightRepair(edit=_divide_down)
OUTPUT_PROJECTION_DIVIDED = WeightRepair(edit=_divide_output_projection)
PROJECTION_DIVIDED = WeightRepair(edit=_divide_projection)
QUERY_NORM_DIVIDED = WeightRepair(edit=_divide_query_norm)
KEY_NORM_DIVIDED = WeightRepair(edit=_divide_key_norm)
INPUT_NORM_MINUS_ONE = WeightRepair(edit=_subtract_one_from_input_norm)
POST_NORM_MINUS_ONE = WeightRepair(edit=_subtract_one_from_post_norm)
KEYS_AND_VALUES_EXCHANGED = WeightRepair(edit=_exchange_keys_and_values)
QUERY_HEADS_REORDERED = WeightRepair(edit=_reorder_query_heads)
ROWS_SPREAD_OVER_GROUPS = WeightRepair(edit=_spread_over_groups)
ROTATED_DIMS_INTERLEAVED = WeightRepair(edit=_interleave_rotated_dims, reorders=_QUERIES_AND_KEYS)
ROTATED_DIMS_BEHIND = WeightRepair(edit=_move_rotated_dims_behind, reorders=_QUERIES_AND_KEYS)
CORRECTION_BIAS_NEGATED = WeightRepair(edit=_negate_correction_bias)
