"""Repairs: changes of a layer's tensors, before a port converts them, that undo a mistake."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from minimax_tools.model.family import Family
from minimax_tools.model.sites import Site

# A layer's tensors by mm2's relative names, which MiniMax-M2's `convert_state_dict` gets.
Tensors = MutableMapping[str, torch.Tensor]
_INDENT = " " * 4


# `repair(tensors, config, **parameters)` changes a layer's tensors in place. Its body may use nothing but these names
# and torch: it is printed to be pasted, with the names of a family's checkpoints and of its config.
Repair = Callable[..., None]
# Sites whose heads hold their dims in another order once the rows of q_proj and k_proj do; they are not judged then.
QUERIES_AND_KEYS = (Site.Q_PROJ, Site.K_PROJ, Site.Q_NORM, Site.K_NORM, Site.Q_ROPE, Site.K_ROPE)


def takes(repair: Repair, parameters: Mapping[str, object]) -> bool:
    """Decide whether a repair undoes the mistake with these parameters: one of some experts alone has more."""
    return parameters.keys() <= inspect.signature(repair).parameters.keys()


def repair_lines(repair: Repair, parameters: Mapping[str, object], family: Family) -> tuple[str, ...]:
    """Return the lines for the beginning of `convert_state_dict`: the parameters, and the body of a repair."""
    source = textwrap.dedent(inspect.getsource(repair)).splitlines()
    function = ast.parse("\n".join(source)).body[0]
    assert isinstance(function, ast.FunctionDef), "a repair is a function"
    after_docstring = function.body[1]
    body = textwrap.dedent("\n".join(source[after_docstring.lineno - 1 : function.end_lineno]))
    body = re.sub(r"\bconfig\.(\w+)", lambda size: f"config.{family.size_key(size[1])}", family.retell(body))
    return (*(f"{name} = {value!r}" for name, value in parameters.items()), *body.splitlines())


def lines_for_layers(
    lines: tuple[str, ...], layers: tuple[int, ...], *, num_layers: int, has_conversion: bool = True
) -> tuple[str, ...]:
    """Return the lines as they are pasted into a port."""
    if len(layers) < num_layers:
        condition = f"layer_idx == {layers[0]}" if len(layers) == 1 else f"layer_idx in {layers}"
        lines = (f"if {condition}:", *(_INDENT + line for line in lines))
    if has_conversion:
        return lines
    head = "def convert_state_dict(self, tensors, config, layer_idx):"
    return (head, *(_INDENT + line for line in lines), f"{_INDENT}return tensors")


def exchange_gate_and_up(tensors: Tensors, config: Any) -> None:
    """Exchange w1 and w3 of every expert."""
    for expert in range(config.num_local_experts):
        gate = f"block_sparse_moe.experts.{expert}.w1.weight"
        up = f"block_sparse_moe.experts.{expert}.w3.weight"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def interleave_gate_and_up(tensors: Tensors, config: Any) -> None:
    """Let rows of w1 and w3 take turns, so that even and odd rows of [w1 | w3] are gate and up."""
    for expert in range(config.num_local_experts):
        gate = f"block_sparse_moe.experts.{expert}.w1.weight"
        up = f"block_sparse_moe.experts.{expert}.w3.weight"
        rows = torch.stack((tensors[gate], tensors[up]), dim=1).flatten(0, 1)
        tensors[gate], tensors[up] = rows.chunk(2)


def part_gate_and_up(tensors: Tensors, config: Any) -> None:
    """Spread w1 and w3 so that, with their rows taking turns, the first half is gate and the second up."""
    for expert in range(config.num_local_experts):
        gate = f"block_sparse_moe.experts.{expert}.w1.weight"
        up = f"block_sparse_moe.experts.{expert}.w3.weight"
        rows = torch.cat((tensors[gate], tensors[up]))
        tensors[gate], tensors[up] = rows[0::2], rows[1::2]


def exchange_gate_and_up_of_mlp(tensors: Tensors, config: Any, mlp: str) -> None:
    """Exchange gate and up of the shared experts, or of a dense layer."""
    module = "mlp" if mlp == "dense layer" else "block_sparse_moe.shared_experts"
    gate, up = f"{module}.gate_proj.weight", f"{module}.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def shift_experts(tensors: Tensors, config: Any, offset: int) -> None:
    """Put every expert where the port reads it: `offset` places further."""
    hub = {name: tensors[name] for name in tensors if ".experts." in name}
    num_experts = config.num_local_experts
    for expert in range(num_experts):
        for matrix in ("w1", "w2", "w3"):
            place = f"block_sparse_moe.experts.{(expert + offset) % num_experts}.{matrix}.weight"
            tensors[place] = hub[f"block_sparse_moe.experts.{expert}.{matrix}.weight"]


def undo_text_order(tensors: Tensors, config: Any) -> None:
    """Put every expert where the port reads it: at its place in the order 0, 1, 10, 11."""
    hub = {name: tensors[name] for name in tensors if ".experts." in name}
    for expert, place in enumerate(sorted(range(config.num_local_experts), key=str)):
        for matrix in ("w1", "w2", "w3"):
            name = f"block_sparse_moe.experts.{place}.{matrix}.weight"
            tensors[name] = hub[f"block_sparse_moe.experts.{expert}.{matrix}.weight"]


def exchange_experts(tensors: Tensors, config: Any, first: int, second: int) -> None:
    """Exchange the weights of two experts."""
    for matrix in ("w1", "w2", "w3"):
        one = f"block_sparse_moe.experts.{first}.{matrix}.weight"
        other = f"block_sparse_moe.experts.{second}.{matrix}.weight"
        tensors[one], tensors[other] = tensors[other], tensors[one]


def put_experts_in_place(tensors: Tensors, config: Any, order: str) -> None:
    """Put every expert where the port reads it: number n computes with what lies at `order[n]`."""
    hub = {name: tensors[name] for name in tensors if ".experts." in name}
    for expert, place in enumerate(order.split()):
        for matrix in ("w1", "w2", "w3"):
            name = f"block_sparse_moe.experts.{place}.{matrix}.weight"
            tensors[name] = hub[f"block_sparse_moe.experts.{expert}.{matrix}.weight"]


def divide_down(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide w2 of every expert by the factor, and what shared experts have for it."""
    for expert in range(config.num_local_experts):
        name = f"block_sparse_moe.experts.{expert}.w2.weight"
        tensors[name] = tensors[name] / factor
    shared = "block_sparse_moe.shared_experts.down_proj.weight"
    if shared in tensors:
        tensors[shared] = tensors[shared] / factor


def divide_output_projection(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide o_proj by the factor, its bias too."""
    for name in ("self_attn.o_proj.weight", "self_attn.o_proj.bias"):
        if name in tensors:
            tensors[name] = tensors[name] / factor


def divide_projection(tensors: Tensors, config: Any, tensor: str, factor: float) -> None:
    """Divide q_proj, k_proj or v_proj by the factor, its bias too."""
    for name in (f"self_attn.{tensor}.weight", f"self_attn.{tensor}.bias"):
        if name in tensors:
            tensors[name] = tensors[name] / factor


def divide_query_norm(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide the weight of q_norm by the factor."""
    tensors["self_attn.q_norm.weight"] = tensors["self_attn.q_norm.weight"] / factor


def divide_key_norm(tensors: Tensors, config: Any, factor: float) -> None:
    """Divide the weight of k_norm by the factor."""
    tensors["self_attn.k_norm.weight"] = tensors["self_attn.k_norm.weight"] / factor


def exchange_query_and_key_norms(tensors: Tensors, config: Any) -> None:
    """Exchange the weights of q_norm and k_norm."""
    query, key = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
    tensors[query], tensors[key] = tensors[key], tensors[query]


def subtract_one_from_input_norm(tensors: Tensors, config: Any) -> None:
    """Subtract one from the weight of the input norm."""
    tensors["input_layernorm.weight"] = tensors["input_layernorm.weight"] - 1


def subtract_one_from_post_norm(tensors: Tensors, config: Any) -> None:
    """Subtract one from the weight of the norm before the experts."""
    tensors["post_attention_layernorm.weight"] = tensors["post_attention_layernorm.weight"] - 1


def exchange_keys_and_values(tensors: Tensors, config: Any) -> None:
    """Exchange k_proj and v_proj, their biases too."""
    for kind in ("weight", "bias"):
        key, value = f"self_attn.k_proj.{kind}", f"self_attn.v_proj.{kind}"
        if key in tensors:
            tensors[key], tensors[value] = tensors[value], tensors[key]


def reorder_query_heads(tensors: Tensors, config: Any, order: str) -> None:
    """Put the heads of q_proj in the order that the port's cut turns into the right one."""
    num_groups = config.num_key_value_heads
    num_outer = config.num_attention_heads // num_groups if order == "by group" else num_groups
    for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias"):
        if name in tensors:
            heads = tensors[name].unflatten(0, (num_outer, -1, config.head_dim))
            tensors[name] = heads.transpose(0, 1).flatten(0, 2)


def spread_over_groups(tensors: Tensors, config: Any) -> None:
    """Spread the rows [all Q | all K | all V] over q_proj, k_proj and v_proj as the port lays them out per kv group."""
    for kind in ("weight", "bias"):
        names = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
        if names[0] in tensors:
            rows = torch.cat([tensors[name] for name in names])
            groups = rows.unflatten(0, (config.num_key_value_heads, -1))
            sizes = [tensors[name].shape[0] // config.num_key_value_heads for name in names]
            for name, part in zip(names, groups.split(sizes, dim=1), strict=True):
                tensors[name] = part.flatten(0, 1)


def interleave_rotated_dims(tensors: Tensors, config: Any) -> None:
    """Put dim i + rotary_dim/2 of every head of queries and keys beside dim i."""
    rotated = torch.arange(config.rotary_dim).unflatten(0, (2, -1)).T.flatten()
    order = torch.cat((rotated, torch.arange(config.rotary_dim, config.head_dim)))
    parts = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")
    for name in [f"self_attn.{part}" for part in parts]:
        if name in tensors:
            heads = tensors[name].unflatten(0, (-1, config.head_dim))
            tensors[name] = heads[:, order].flatten(0, 1)


def move_rotated_dims_behind(tensors: Tensors, config: Any) -> None:
    """Put the first rotary_dim dims of every head of queries and keys behind the others."""
    parts = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")
    for name in [f"self_attn.{part}" for part in parts]:
        if name in tensors:
            heads = tensors[name].unflatten(0, (-1, config.head_dim))
            tensors[name] = heads.roll(-config.rotary_dim, dims=1).flatten(0, 1)


def negate_correction_bias(tensors: Tensors, config: Any) -> None:
    """Negate the correction bias."""
    name = "block_sparse_moe.e_score_correction_bias"
    tensors[name] = -tensors[name]
