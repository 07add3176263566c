"""Components loaded from a checkpoint: one by itself, or all three out of the whole model.

By itself a component takes its own memory and that of the few tensors on their way; nothing is held twice. Out of
the whole model they take over the memory that transformers filled.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.size import word_size
from minimax_tools.split.binding import Binding, plan_binding
from minimax_tools.split.causal_model import Implementation, load_whole
from minimax_tools.split.causal_part import ModelPart, build_part
from minimax_tools.split.module_names import Slot
from minimax_tools.split.part_folder import LoadedPart
from minimax_tools.split.parts import Part, Role
from minimax_tools.split.shards import Weights, by_place

if TYPE_CHECKING:
    from minimax_tools.split.causal_model import CausalConfig

logger = logging.getLogger(__name__)


def load_part(
    weights: Weights,
    config: CausalConfig,
    part: Part,
    *,
    implementation: Implementation,
    device: torch.device,
    budget: MemoryBudget,
) -> LoadedPart:
    """A component from the shards that it needs, straight into its own memory.

    Raises:
        CheckpointError: Listing every tensor that is missing, has another shape or is left over; or a shard cannot
            be had or read; or the model cannot be split.
        MemoryBudgetError: The component does not fit the budget; nothing was allocated.
    """
    logger.info("Loading component: %s", part)
    model_part = _build(config, part, implementation)
    tensors = _read(weights, model_part, model_part.slots(), part, device=device, budget=budget)
    return LoadedPart(model=model_part.take(tensors, device=device), part=part, implementation=implementation)


def load_parts_of_whole(
    weights: Weights,
    folder: Path,
    config: CausalConfig,
    parts: tuple[Part, ...],
    *,
    implementation: Implementation,
    devices: Mapping[Role, torch.device],
    budget: MemoryBudget,
) -> Iterator[LoadedPart]:
    """The components of a model that transformers loads whole, one after the other.

    They share no memory with each other. What transformers rounds against the checkpoint (a MiniMax-M2's router)
    is read again.

    Args:
        weights: The checkpoint.
        folder: Its folder, every shard in it.
        config: Its config.
        parts: The components.
        implementation: What they compute with.
        devices: Where they go.
        budget: What may be allocated.

    Raises:
        CheckpointError: As for `load_part`.
        MemoryBudgetError: The whole model does not fit the budget.
    """
    built = [_build(config, part, implementation) for part in parts]
    _require_whole(built, budget)
    logger.info("Loading the whole model: %s", folder)
    whole = load_whole(
        folder, config, implementation=implementation, show_progress=logger.isEnabledFor(logging.INFO)
    )
    state = whole.state_dict()
    del whole
    taken: set[int] = set()
    for part, model_part in zip(parts, built, strict=True):
        logger.info("Taking component out of the whole model: %s", part)
        device, slots = devices[part.role], model_part.slots()
        tensors = {
            name: _own(state[name], taken, device=device)
            for name, slot in slots.items()
            if state[name].dtype == slot.dtype
        }
        rounded = {name: slot for name, slot in slots.items() if name not in tensors}
        tensors |= _read(weights, model_part, rounded, part, device=device, budget=budget) if rounded else {}
        for name in slots:
            del state[name]
        model = model_part.take(tensors, device=device)
        del tensors
        yield LoadedPart(model=model, part=part, implementation=implementation)


def _build(config: CausalConfig, part: Part, implementation: Implementation) -> ModelPart:
    return build_part(
        config,
        layers=part.layers,
        with_embedding=part.has_embedding,
        with_head=part.has_head,
        implementation=implementation,
    )


def _read(
    weights: Weights,
    model_part: ModelPart,
    slots: Mapping[str, Slot],
    part: Part,
    *,
    device: torch.device,
    budget: MemoryBudget,
) -> dict[str, torch.Tensor]:
    with weights.open(model_part.names, slots, layers=part.layers) as reader:
        stored = by_place(reader.index)
        binding = plan_binding(slots, stored, model_part.names, layers=part.layers, where=reader.folder)
        held_bytes = binding.size_bytes if device.type == "cpu" else 0
        passing_bytes = max(stored[name].size_bytes for name in binding.sources.values())
        purpose = f"loading {part}"
        logger.info(
            "Loading parameters: %s from %d tensors", word_size(binding.size_bytes), binding.num_tensors
        )
        started_s = time.monotonic()
        with budget.reserve(held_bytes + passing_bytes * (os.cpu_count() or 1), purpose) as reservation:
            tensors = binding.fill(reader, device=device, report=reservation.touched)
        _report_speed(binding, time.monotonic() - started_s)
    return tensors


def _own(tensor: torch.Tensor, taken: set[int], *, device: torch.device) -> torch.Tensor:
    """The tensor on `device`, in memory that no other component has."""
    moved = tensor.to(device)
    address = moved.data_ptr()
    if address in taken and moved.numel():
        return moved.clone()
    taken.add(address)
    return moved


def _require_whole(built: list[ModelPart], budget: MemoryBudget) -> None:
    slots = [slot for model_part in built for slot in model_part.slots().values()]
    # transformers fuses experts beside those it has.
    largest = max(slot.size_bytes for slot in slots)
    budget.require(sum(slot.size_bytes for slot in slots) + largest, "loading the whole model")


def _report_speed(binding: Binding, duration_s: float) -> None:
    rate = word_size(int(binding.size_bytes / max(duration_s, 1e-6)))
    logger.info("Loaded %s in %.1f s (%s/s)", word_size(binding.size_bytes), duration_s, rate)
