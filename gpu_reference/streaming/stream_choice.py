"""The choice between loading a golden model whole and streaming it, and why."""

from __future__ import annotations

import logging

import torch

from gpu_reference.model.footprint import Footprint
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import MemoryBudget, available_bytes
from minimax_tools.machine.size import word_size
from minimax_tools.partition.plan import Slice
from minimax_tools.ranks.rank_place import RankPlace

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
        UsageError: Options contradict each other, or `--max-memory` allows no layer.
    """
    _refuse_contradictions(mode, placement, prefetch=prefetch, packed=packed)
    if is_whole(mode, placement):
        return None
    is_needed = (
        mode == "on"
        or _is_packed(packed)
        or _is_part(absent_shards)
        or _is_too_large(footprint, placement, budget)
    )
    if not is_needed:
        return None
    device = _device(placement)
    if prefetch is None:
        prefetch = _has_room_for_two(footprint, placement, device, packed=packed, budget=budget)
    streaming = Streaming(device=device, prefetch=prefetch, packed=packed)
    _refuse_too_low_limit(footprint, placement, streaming)
    return streaming


def choose_part_streaming(
    mode: str,
    footprint: Footprint,
    placement: Placement,
    part: Slice,
    *,
    place: RankPlace,
    prefetch: bool | None,
    packed: bool,
    budget: MemoryBudget,
) -> Streaming:
    """How a rank runs its slice: held whole where it fits, so that it is read while the ranks before compute.

    Args:
        mode: `on` to stream the slice a layer at a time, `off` to hold it, `auto` to hold it where it fits.
        footprint: What the golden takes.
        placement: Where the user wants it; with several GPUs here each rank has the one of its number.
        part: The slice.
        place: The rank's.
        prefetch: Whether to read ahead where it is not held; None for where two layers fit.
        packed: Whether experts stay FP8.
        budget: What may be taken.

    Raises:
        UsageError: Options contradict each other.
    """
    if _is_placed_by_hand(placement):
        raise UsageError(
            "a slice runs on one device",
            found="a --device-map of modules, or an --offload-folder",
            next_step="Leave them out: the plan says who holds what.",
        )
    _refuse_contradictions(mode if mode != "auto" else "on", placement, prefetch=prefetch, packed=False)
    devices = [device for device in _devices(placement) if device.type == "cuda"] or _devices(placement)
    device = devices[place.local_rank % len(devices)]
    # Ranks of one machine share its memory.
    num_sharing = place.num_local if device.type == "cpu" else -(-place.num_local // len(devices))
    free = _free(placement, device, budget) // num_sharing
    logits = footprint.logits_bytes if part.stage.has_head else 0
    needed = footprint.held_bytes(part.stage, packed=packed) + footprint.activation_bytes + logits
    holds = mode == "off" or (mode == "auto" and needed <= free)
    if mode == "auto" and not holds:
        logger.info(
            "Streaming a layer at a time: the slice of node %s takes %s, %s are free. Ranks wait for each other then.",
            part.node.name,
            word_size(needed),
            word_size(free),
        )
    if prefetch is None:
        two = footprint.streamed_bytes(prefetch=True, packed=packed) + footprint.activation_bytes
        prefetch = holds or two <= free
    return Streaming(
        device=device, prefetch=prefetch and not holds, packed=packed, part=part, holds_part=holds
    )


def is_whole(mode: str, placement: Placement) -> bool:
    """Whether the model is loaded whole whatever its size: it was asked for, or placed module by module."""
    return mode == "off" or (mode == "auto" and _is_placed_by_hand(placement))


def _refuse_contradictions(mode: str, placement: Placement, *, prefetch: bool | None, packed: bool) -> None:
    if (mode == "on" or packed) and _is_placed_by_hand(placement):
        raise UsageError(
            f"{'--stream on' if mode == 'on' else '--packed-experts'} runs every layer on one device",
            found="a --device-map of modules, or an --offload-folder",
            next_step="Leave them out, or give --stream off.",
        )
    if packed and mode == "off":
        raise UsageError(
            "--packed-experts is a way of streaming", found="--stream off", next_step="Use --stream on."
        )
    if prefetch is not None and mode == "off":
        raise UsageError(
            f"--{'' if prefetch else 'no-'}prefetch has no effect on a model that is loaded whole",
            found="--stream off",
            next_step="Leave it out, or use --stream on.",
        )


def _refuse_too_low_limit(footprint: Footprint, placement: Placement, streaming: Streaming) -> None:
    limit = _limit(placement, streaming.device)
    needed = footprint.streamed_bytes(prefetch=streaming.prefetch, packed=streaming.packed)
    if limit is not None and needed > limit:
        raise UsageError(
            "--max-memory does not allow the layers that are in memory at once",
            expected=f"at least {word_size(needed)}",
            found=word_size(limit),
            next_step="Raise it; --no-prefetch keeps one layer in memory, --packed-experts half of one.",
        )


def _is_packed(packed: bool) -> bool:
    if packed:
        logger.info("Streaming a layer at a time: that is how experts stay packed.")
    return packed


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
    if placement.offload_folder is not None:
        return True
    return isinstance(placement.device_map, dict) and (
        set(placement.device_map) != {""} or placement.device_map[""] == "disk"
    )


def _capacity(placement: Placement, budget: MemoryBudget) -> int:
    """Bytes that a model loaded whole may take, on all devices that the placement allows."""
    return sum(_free(placement, device, budget) for device in _devices(placement))


def _has_room_for_two(
    footprint: Footprint, placement: Placement, device: torch.device, *, packed: bool, budget: MemoryBudget
) -> bool:
    needed = footprint.streamed_bytes(prefetch=True, packed=packed) + footprint.activation_bytes
    free = _free(placement, device, budget)
    if needed <= free:
        return True
    logger.info(
        "No layer is read ahead: two take %s with their activations, %s are free.",
        word_size(needed),
        word_size(free),
    )
    return False


def _device(placement: Placement) -> torch.device:
    """Where layers are streamed to: one device has them all, a GPU where one is allowed."""
    return _devices(placement)[0]


def _devices(placement: Placement) -> list[torch.device]:
    """The devices that the placement allows, GPUs first."""
    if isinstance(placement.device_map, dict):
        where = str(placement.device_map[""])
        return [torch.device("cuda", int(where)) if where.isdigit() else torch.device(where)]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    host = torch.device("cpu")
    if placement.max_memory is None:
        return [*gpus, host]
    return [device for device in (*gpus, host) if _limit(placement, device)] or [host]


def _free(placement: Placement, device: torch.device, budget: MemoryBudget) -> int:
    """Bytes that may be taken on a device: what is free there, or allowed, whichever is less."""
    free = _free_on_host(budget) if device.type == "cpu" else _free_on_gpu(device)
    limit = _limit(placement, device)
    return free if limit is None else min(free, limit)


def _limit(placement: Placement, device: torch.device) -> int | None:
    """What `--max-memory` allows for weights on a device; None where nothing was said."""
    if placement.max_memory is None:
        return None
    return placement.max_memory.get("cpu" if device.type == "cpu" else device.index or 0, 0)


def _free_on_host(budget: MemoryBudget) -> int:
    free = available_bytes() if budget.left_bytes is None else min(available_bytes(), budget.left_bytes)
    return int(free * _SHARE)


def _free_on_gpu(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _SHARE)
