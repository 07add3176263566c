"""The choice between loading a golden model whole and streaming it, and the reason, which is logged."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from gpu_reference.model.footprint import Footprint
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.streaming import Streaming
from gpu_reference.streaming.streaming_request import StreamingRequest
from minimax_tools.errors import UsageError, format_count
from minimax_tools.machine.memory import MemoryBudget, available_bytes
from minimax_tools.machine.size import format_size
from minimax_tools.partition.plan import Slice
from minimax_tools.ranks.rank_group import RankPlace

logger = logging.getLogger(__name__)

# Share of the free memory to plan with. The rest is a reserve for memory that does not follow from shapes.
_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRoom:
    """The memory that a golden needs, and the memory that it may take."""

    footprint: Footprint
    placement: Placement
    budget: MemoryBudget

    @property
    def devices(self) -> list[torch.device]:
        """The devices that the placement allows, GPUs first; the first one runs streamed layers."""
        if isinstance(self.placement.device_map, dict):
            # Only a map of the whole model to one device comes here: other maps are not streamed.
            name = str(self.placement.device_map[""])
            return [torch.device("cuda", int(name)) if name.isdigit() else torch.device(name)]
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        host = torch.device("cpu")
        if self.placement.max_memory is None:
            return [*gpus, host]
        return [device for device in (*gpus, host) if self.limit_bytes(device)] or [host]

    def limit_bytes(self, device: torch.device) -> int | None:
        """Return the bytes that --max-memory allows for weights on a device; None without --max-memory."""
        if self.placement.max_memory is None:
            return None
        # A device that --max-memory does not name may hold nothing. `cuda` without an index is GPU 0.
        return self.placement.max_memory.get("cpu" if device.type == "cpu" else device.index or 0, 0)

    def free_bytes(self, device: torch.device) -> int:
        """Return the bytes that may be taken on a device: the free bytes, or the allowed ones if they are fewer."""
        if device.type == "cpu":
            free, left = available_bytes(), self.budget.left_bytes
            free = free if left is None else min(free, left)
        else:
            free, _ = torch.cuda.mem_get_info(device)
        limit = self.limit_bytes(device)
        return int(free * _SHARE) if limit is None else min(int(free * _SHARE), limit)

    def two_layers_bytes(self, *, packed: bool) -> int:
        """Return the bytes of two layers in memory, with the activations of one."""
        return self.footprint.streamed_bytes(prefetch=True, packed=packed) + self.footprint.activation_bytes


def choose_streaming(
    asked: StreamingRequest, room: MemoryRoom, *, absent_shards: tuple[str, ...] = ()
) -> Streaming | None:
    """Choose how to stream, or None to load the model whole. `absent_shards` are missing; their layers do not run.

    Raises:
        UsageError: Options contradict each other, or `--max-memory` allows no layer.
    """
    asked.refuse_contradictions(room.placement)
    if is_whole(asked.stream, room.placement) or not _is_needed(asked, room, absent_shards):
        return None
    device, packed = room.devices[0], asked.packed_experts
    prefetch = _has_room_for_two(room, device, packed=packed) if asked.prefetch is None else asked.prefetch
    limit = room.limit_bytes(device)
    needed = room.footprint.streamed_bytes(prefetch=prefetch, packed=packed)
    if limit is not None and needed > limit:
        raise UsageError(
            "--max-memory does not allow the layers that are in memory at once",
            expected=f"at least {format_size(needed)}",
            found=format_size(limit),
            next_step="Raise it; --no-prefetch keeps one layer in memory, --packed-experts half of one.",
        )
    return Streaming(device=device, prefetch=prefetch, packed=packed)


def choose_part_streaming(
    asked: StreamingRequest, room: MemoryRoom, part: Slice, *, place: RankPlace
) -> Streaming:
    """Choose how a rank runs its slice: held whole if it fits, so that it is read while earlier ranks compute.

    Args:
        asked: Options of streaming that the user gave; `off` holds the slice, `on` streams it.
        room: Needed and free memory. Rank i of this machine takes its GPU number i, modulo the number of GPUs.
        part: Slice that the rank runs.
        place: Number of the rank, and number of ranks on this machine.

    Raises:
        UsageError: Options contradict each other.
    """
    if room.placement.is_by_hand:
        raise UsageError(
            "a slice runs on one device",
            found="a --device-map of modules, or an --offload-folder",
            next_step="Leave them out: the plan says who holds what.",
        )
    asked.refuse_idle_prefetch()
    packed, footprint = asked.packed_experts, room.footprint
    devices = [device for device in room.devices if device.type == "cuda"] or room.devices
    device = devices[place.local_rank % len(devices)]
    # Ranks of one machine share its memory, and those of one GPU the GPU's.
    num_sharing = place.num_local if device.type == "cpu" else math.ceil(place.num_local / len(devices))
    free = room.free_bytes(device) // num_sharing
    logits = footprint.logits_bytes if part.stage.has_head else 0
    needed = footprint.held_bytes(part.stage, packed=packed) + footprint.activation_bytes + logits
    holds = asked.stream == "off" or (asked.stream == "auto" and needed <= free)
    if asked.stream == "auto" and not holds:
        logger.info(
            "Streaming a layer at a time: the slice of node %s takes %s, %s are free. Ranks wait for each other then.",
            part.node.name,
            format_size(needed),
            format_size(free),
        )
    fits_two = room.two_layers_bytes(packed=packed) <= free
    prefetch = fits_two if asked.prefetch is None else asked.prefetch
    # A held slice is read before it runs: nothing is left to prefetch.
    return Streaming(
        device=device, prefetch=prefetch and not holds, packed=packed, part=part, holds_part=holds
    )


def is_whole(stream: str, placement: Placement) -> bool:
    """Decide whether the model is loaded whole whatever its size, because the user asked for that or placed it."""
    return stream == "off" or (stream == "auto" and placement.is_by_hand)


def _is_needed(asked: StreamingRequest, room: MemoryRoom, absent_shards: tuple[str, ...]) -> bool:
    """Decide whether the model must be streamed, and log the reason if the user did not ask for it."""
    if asked.stream == "on":
        return True
    if asked.packed_experts:
        logger.info("Streaming a layer at a time: --packed-experts needs it.")
        return True
    if absent_shards:
        logger.info(
            "Streaming a layer at a time: not here are %s of other layers.",
            format_count(len(absent_shards), "shard"),
        )
        return True
    needed = room.footprint.loading_bytes + room.footprint.activation_bytes
    capacity = sum(room.free_bytes(device) for device in room.devices)
    if needed <= capacity:
        return False
    logger.info(
        "Streaming a layer at a time: the whole model takes %s, %s are free (--stream off loads it all the same).",
        format_size(needed),
        format_size(capacity),
    )
    return True


def _has_room_for_two(room: MemoryRoom, device: torch.device, *, packed: bool) -> bool:
    needed, free = room.two_layers_bytes(packed=packed), room.free_bytes(device)
    if needed > free:
        logger.info(
            "No layer is read ahead: two take %s with their activations, %s are free.",
            format_size(needed),
            format_size(free),
        )
    return needed <= free
