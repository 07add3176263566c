"""PartLoader: loads bottom, trunk and top of a model, also called components or parts, from a checkpoint.

`load` reads one component. It needs memory for the component and for the few tensors that are being read.
`load_out_of_whole` lets transformers load the whole model. The components then take over the memory that it filled.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import WEIGHT_DTYPES, TensorIndex
from minimax_tools.checkpoint.pickled import PickledReader, read_shard_header
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import SAFETENSORS_SUFFIX, faulty_checkpoint, find_index_faults
from minimax_tools.errors import CheckpointError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.progress import LayerProgress, NoProgress, Progress
from minimax_tools.machine.size import format_size
from minimax_tools.split.binding import plan_binding
from minimax_tools.split.causal_model import Implementation, load_whole
from minimax_tools.split.causal_part import ModelPart, build_part
from minimax_tools.split.module_names import ModuleNames, Slot
from minimax_tools.split.parts import Part, Role
from minimax_tools.split.shard_loader import ShardLoader
from minimax_tools.stored_dtype import FLOAT8_E4M3FN

if TYPE_CHECKING:
    from minimax_tools.split.causal_model import CausalConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint's tensors, each with its shard."""

    model: str  # folder or hub id of the checkpoint
    weight_map: Mapping[str, str] = field(repr=False)  # name of the shard by name of the tensor

    @classmethod
    def of(cls, model: str) -> Weights:
        """Read the index of a checkpoint; no shard of a hub model is fetched.

        Raises:
            CheckpointError: There is no such model, or its index is damaged.
        """
        return cls(model=model, weight_map=MappingProxyType(ShardLoader.load_index_json(model)["weight_map"]))

    @property
    def are_pickled(self) -> bool:
        """True if the shards are PyTorch's `.bin` files."""
        return not all(name.endswith(SAFETENSORS_SUFFIX) for name in self.weight_map.values())

    def open(self, names: ModuleNames, slots: Mapping[str, Slot], *, layers: range) -> CheckpointReader:
        """Open the shards that hold the tensors of `slots`, the parameters to fill; fetch those that are not here.

        Raises:
            CheckpointError: A shard is missing, damaged or not what the index says, or cannot be fetched.
        """
        needed = names.select(self.weight_map, slots, layers=layers)
        return self._open_shards({self.weight_map[name] for name in needed})

    def open_first(self) -> CheckpointReader:
        """Open the first shard."""
        return self._open_shards({min(self.weight_map.values())})

    def _open_shards(self, shards: set[str]) -> CheckpointReader:
        total = len(set(self.weight_map.values()))
        logger.info("Shards: %d of %d needed", len(shards), total)
        paths = ShardLoader.download_shards_if_needed(self.model, shards)
        headers = {name: read_shard_header(path) for name, path in paths.items()}
        if not headers:
            raise CheckpointError(f"{self.model} holds no tensor of these layers")
        folder = next(iter(paths.values())).parent
        faults = find_index_faults(self.weight_map, headers)
        if faults:
            raise faulty_checkpoint(folder, faults)
        entries = {entry.name: entry for header in headers.values() for entry in header}
        index = TensorIndex(folder=folder, entries=MappingProxyType(dict(sorted(entries.items()))))
        reader = PickledReader if self.are_pickled else CheckpointReader
        return reader(folder, index=index)


def in_disk_order(index: TensorIndex) -> dict[str, TensorEntry]:
    """Return the entries of an index by name, in the order in which they lie on disk."""
    entries = sorted(index.entries.values(), key=lambda entry: (entry.file, entry.offset, entry.name))
    return {entry.name: entry for entry in entries}


def first_dtype(reader: CheckpointReader) -> torch.dtype:
    """Return the dtype of the first weight that is not FP8.

    Raises:
        CheckpointError: The checkpoint has no such weight.
    """
    for entry in in_disk_order(reader.index).values():
        if entry.dtype in WEIGHT_DTYPES and entry.dtype != FLOAT8_E4M3FN:
            return entry.dtype.as_torch()
    raise CheckpointError(f"the dtype of {reader.folder} is unknown", next_step="Give dtype.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoader:
    """A loader of a checkpoint's components. A `ModelPart` is transformers' model with one component's tensors."""

    weights: Weights
    config: CausalConfig
    implementation: Implementation
    budget: MemoryBudget  # limit on the memory to allocate

    def load(self, part: Part, *, device: torch.device) -> ModelPart:
        """Load a component from the shards that it needs, straight into its own memory.

        Raises:
            CheckpointError: A shard cannot be fetched or read, or the model cannot be split. Or tensors are missing,
                have another shape or are left over: the message lists them all.
            MemoryBudgetError: The component does not fit the budget; nothing was allocated.
        """
        logger.info("Loading component: %s", part)
        model_part = build_part(self.config, part, self.implementation)
        return model_part.take(self._read(model_part, model_part.slots(), device=device), device=device)

    def load_out_of_whole(
        self, folder: Path, parts: tuple[Part, ...], *, devices: Mapping[Role, torch.device]
    ) -> Iterator[ModelPart]:
        """Load the whole model from `folder` with transformers, and yield its components one after the other.

        Components share no memory. Tensors that transformers rounds (the router of a MiniMax-M2) are read again.

        Raises:
            CheckpointError: A shard cannot be read, the model cannot be split, or tensors do not fit it.
            MemoryBudgetError: The whole model does not fit the budget.
        """
        built = [build_part(self.config, part, self.implementation) for part in parts]
        self._require_whole(built)
        logger.info("Loading the whole model: %s", folder)
        is_verbose = logger.isEnabledFor(logging.INFO)
        whole = load_whole(folder, self.config, implementation=self.implementation, show_progress=is_verbose)
        state = whole.state_dict()
        # From here on `state` alone holds the tensors, so that each is freed once no component needs it.
        del whole
        taken: set[int] = set()
        for model_part in built:
            logger.info("Taking component out of the whole model: %s", model_part.part)
            device, slots = devices[model_part.part.role], model_part.slots()
            tensors = {
                name: _unshared(state[name], taken, device=device)
                for name, slot in slots.items()
                if state[name].dtype == slot.dtype.as_torch()
            }
            # transformers loaded these in another dtype than the slot's, so it rounded them.
            rounded = {name: slot for name, slot in slots.items() if name not in tensors}
            if rounded:
                tensors |= self._read(model_part, rounded, device=device)
            for name in slots:
                del state[name]
            yield model_part.take(tensors, device=device)

    def _require_whole(self, built: list[ModelPart]) -> None:
        slots = [slot for model_part in built for slot in model_part.slots().values()]
        # transformers holds a layer's experts twice while it fuses them.
        largest = max(slot.size_bytes for slot in slots)
        self.budget.require(sum(slot.size_bytes for slot in slots) + largest, "loading the whole model")

    def _read(
        self, model_part: ModelPart, slots: Mapping[str, Slot], *, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Read the tensors of `slots`, some or all slots of the component, within the memory budget."""
        part, names = model_part.part, model_part.names
        with self.weights.open(names, slots, layers=part.layers) as reader:
            stored = in_disk_order(reader.index)
            binding = plan_binding(slots, stored, names, layers=part.layers, where=reader.folder)
            held_bytes = binding.size_bytes if device.type == "cpu" else 0
            # Each reading thread holds at most one stored tensor besides.
            largest_bytes = max(stored[name].size_bytes for name in binding.sources.values())
            passing_bytes = largest_bytes * (os.cpu_count() or 1)
            size = format_size(binding.size_bytes)
            logger.info("Loading parameters: %s from %d tensors", size, binding.num_tensors)
            started_s = time.monotonic()
            with (
                self.budget.reserve(held_bytes + passing_bytes, f"loading {part}") as reservation,
                _open_bar(binding.num_tensors, label=str(part.role)) as bar,
            ):
                numbers = itertools.count(1)

                def report(num_bytes: int) -> None:
                    # Filled bytes count as used memory, so they leave the reservation.
                    reservation.touched(num_bytes)
                    bar.advance(next(numbers), num_bytes=num_bytes)

                tensors = binding.fill(reader, device=device, report=report)
        duration_s = time.monotonic() - started_s
        rate = format_size(int(binding.size_bytes / max(duration_s, 1e-6)))
        logger.info("Loaded %s in %.1f s (%s/s)", size, duration_s, rate)
        return tensors


def _open_bar(num_tensors: int, *, label: str) -> AbstractContextManager[Progress]:
    """Open a bar over a component's tensors, which shows in a terminal if the factory is verbose.

    A log gets no line for each of thousands of tensors.
    """
    if not sys.stderr.isatty():
        return nullcontext(NoProgress())
    return LayerProgress(num_tensors, label=label, unit="tensor")


def _unshared(tensor: torch.Tensor, taken: set[int], *, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`, in memory whose address is not yet in `taken`; tied tensors share theirs."""
    moved = tensor.to(device)
    address = moved.data_ptr()
    if address in taken and moved.numel():
        return moved.clone()
    taken.add(address)
    return moved
