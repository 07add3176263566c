"""The choice between loading a golden model whole and streaming it, and why."""

from __future__ import annotations

import logging

import torch

from gpu_reference.footprint import Footprint
from gpu_reference.placement import Placement
from gpu_reference.streaming import Streaming
from minimax_tools.errors import UsageError
from minimax_tools.memory import MemoryBudget, available_bytes
from minimax_tools.size import word_size

logger = logging.getLogger(__name__)

STREAM_MODES = ("auto", "on", "off")

# Of the free memory, what is planned with: the rest is for what no shape tells.
_SHARE = 0.9


def choose_streaming(
    mode: str,
    footprint: Footprint,
    placement: Placement,
    *,
    prefetch: bool | None,
    packed: bool,
    budget: MemoryBudget,
    absent_shards: tuple[str, ...] = (),
) -> Streaming | None:
    """How to stream, or None to load the model whole; the reason is logged.

    Args:
        mode: `on`, `off`, or `auto` to stream what does not fit.
        footprint: What the golden takes.
        placement: Where the user wants it.
        prefetch: Whether to read ahead; None for where two layers fit.
        packed: Whether experts stay FP8.
        budget: What may be taken.
        absent_shards: Shards of layers that do not run and that are not here.

    Raises:
        UsageError: Options contradict each other.
    """
    _refuse_contradictions(mode, placement, packed=packed)
    if is_whole(mode, placement):
        return None
    is_needed = (
        mode == "on" or packed or _is_part(absent_shards) or _is_too_large(footprint, placement, budget)
    )
    if not is_needed:
        return None
    device = _device(placement)
    if prefetch is None:
        prefetch = _has_room_for_two(footprint, device, packed=packed, budget=budget)
    return Streaming(device=device, prefetch=prefetch, packed=packed)


def is_whole(mode: str, placement: Placement) -> bool:
    """Whether the model is loaded whole whatever its size: it was asked for, or placed module by module."""
    return mode == "off" or (mode == "auto" and _is_placed_by_hand(placement))


def _refuse_contradictions(mode: str, placement: Placement, *, packed: bool) -> None:
    if mode == "on" and _is_placed_by_hand(placement):
        raise UsageError(
            "--stream on runs every layer on one device",
            found="a --device-map of modules, or an --offload-folder",
            next_step="Leave them out, or give --stream off.",
        )
    if packed and mode == "off":
        raise UsageError(
            "--packed-experts is a way of streaming", found="--stream off", next_step="Use --stream on."
        )


def _is_part(absent_shards: tuple[str, ...]) -> bool:
    if not absent_shards:
        return False
    logger.info("Streaming a layer at a time: %d shards of other layers are not here.", len(absent_shards))
    return True


def _is_too_large(footprint: Footprint, placement: Placement, budget: MemoryBudget) -> bool:
    needed, capacity = footprint.loading_bytes + footprint.activation_bytes, _capacity(placement, budget)
    if needed <= capacity:
        return False
    logger.info(
        "Streaming a layer at a time: the whole model takes %s, %s are free (--stream off loads it all the same).",
        word_size(needed),
        word_size(capacity),
    )
    return True


def _is_placed_by_hand(placement: Placement) -> bool:
    is_map = isinstance(placement.device_map, dict) and set(placement.device_map) != {""}
    return is_map or placement.offload_folder is not None


def _capacity(placement: Placement, budget: MemoryBudget) -> int:
    """Bytes that a model loaded whole may take, on all devices that the placement allows."""
    if placement.max_memory is not None:
        return sum(placement.max_memory.values())
    where = placement.device_map[""] if isinstance(placement.device_map, dict) else None
    host = _free_on_host(budget)
    if where == "cpu" or not torch.cuda.is_available():
        return host
    if where is not None:
        return _free_on_gpu(torch.device(where))
    return host + sum(_free_on_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


def _has_room_for_two(
    footprint: Footprint, device: torch.device, *, packed: bool, budget: MemoryBudget
) -> bool:
    layer = footprint.packed_layer_bytes if packed else footprint.layer_bytes
    needed = 2 * layer + footprint.activation_bytes
    free = _free_on_gpu(device) if device.type == "cuda" else _free_on_host(budget)
    if needed <= free:
        return True
    logger.info(
        "No layer is read ahead: two take %s with their activations, %s are free.",
        word_size(needed),
        word_size(free),
    )
    return False


def _device(placement: Placement) -> torch.device:
    if isinstance(placement.device_map, dict):
        where = placement.device_map[""]
        return torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _free_on_host(budget: MemoryBudget) -> int:
    free = int(available_bytes() * _SHARE)
    return free if budget.left_bytes is None else min(free, budget.left_bytes)


def _free_on_gpu(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _SHARE)
