"""Binding: which stored tensor fills which parameter of a module, planned before any data is read.

A slot is a parameter or persistent buffer to fill. A place is a whole slot, or one expert's rows in a slot that holds
all experts of a layer (see `module_names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import WEIGHT_DTYPES
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.machine.compiled import CorePool
from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.weight_names import SCALE_SUFFIX, scale_name
from minimax_tools.split.module_names import SCALE_ENDING, ModuleNames, ParameterPlace, Slot
from minimax_tools.stored_dtype import FLOAT8_E4M3FN

# Tensors of a checkpoint by full name, as headers describe them.
StoredTensors = Mapping[str, TensorSize | TensorEntry]


class TensorSource(Protocol):
    """A source of stored tensors, such as a reader of a checkpoint."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, which has the stored shape and dtype."""

    def read_weight_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, which has the stored shape and any float dtype; FP8 is dequantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A plan of reading."""

    slots: Mapping[str, Slot] = field(repr=False)  # slots to fill, by name
    # Name of the stored tensor that fills each place, in the order of reading.
    sources: Mapping[ParameterPlace, str] = field(repr=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, once they are filled."""
        return sum(slot.size_bytes for slot in self.slots.values())

    @property
    def num_tensors(self) -> int:
        """Number of stored tensors that are read, without FP8 scales."""
        return len(self.sources)

    def fill(
        self,
        source: TensorSource,
        *,
        device: torch.device,
        report: Callable[[int], None] = lambda num_bytes: None,
    ) -> dict[str, torch.Tensor]:
        """Allocate every slot on `device`, and fill it place by place with one thread per core.

        Besides the slots, each thread holds at most one stored tensor in memory.

        Args:
            source: Source of the planned tensors; several threads call it.
            device: Device of the slots.
            report: Called with the number of bytes of each place that was filled, by the thread that filled it.

        Returns:
            The filled tensors by slot name.

        Raises:
            CheckpointError: A tensor cannot be read.
        """
        # torch.empty takes no memory yet: pages are taken as the threads fill them.
        filled = {
            slot.name: torch.empty(slot.shape, dtype=slot.dtype.as_torch(), device=device)
            for slot in self.slots.values()
        }

        def fill_place(place: ParameterPlace) -> None:
            view = place.view(filled[place.slot])
            if view.dtype.is_floating_point:
                source.read_weight_into(self.sources[place], view)
            else:
                _read_integers(source, self.sources[place], view)
            report(view.nbytes)

        with CorePool("binding") as pool:
            try:
                # Taking the results raises the first error of a thread.
                for _ in pool.map(fill_place, self.sources):
                    pass
            finally:
                # After an error the waiting places are not filled.
                pool.shutdown(cancel_futures=True)
        return filled


def plan_binding(
    slots: Mapping[str, Slot],
    stored: StoredTensors,
    names: ModuleNames,
    *,
    layers: range,
    where: Path,
) -> Binding:
    """Match a component's slots with a checkpoint's tensors, by their headers alone.

    Args:
        slots: Slots to fill, by name.
        stored: Tensors of the checkpoint, or of its open shards, in the order of reading.
        names: Names of the model, which match the checkpoint's.
        layers: Layers of the component. A stored tensor of these layers that the model lacks is a fault.
        where: Path of the checkpoint, named in errors.

    Raises:
        CheckpointError: A slot has no tensor or two, a shape or dtype does not fit, FP8 lacks its scales, or a
            tensor is left over. The message lists all faults.
    """
    faults: list[str] = []
    stored_at = _match_places(stored, names, layers, faults)
    chosen: dict[ParameterPlace, str] = {}
    for slot in slots.values():
        chosen.update(_fill_slot(slot, stored_at, names, faults))
    for place, name in chosen.items():
        faults += _misfits(name, stored, expected=place.shape_in(slots[place.slot]), slot=slots[place.slot])
    if faults:
        raise unfit_checkpoint(where, faults)
    reading_order = {name: number for number, name in enumerate(stored)}
    sources = dict(sorted(chosen.items(), key=lambda item: reading_order[item[1]]))
    return Binding(slots=MappingProxyType(dict(slots)), sources=MappingProxyType(sources))


def unfit_checkpoint(where: Path, faults: list[str]) -> CheckpointError:
    """Build the error for tensors at `where` that do not fit their config.json."""
    return CheckpointError(
        f"the tensors at {where} are not the model that its config.json describes",
        found=list_faults(faults),
        next_step="Check that config.json belongs to these files, and fetch the missing files.",
    )


def _match_places(
    stored: StoredTensors, names: ModuleNames, layers: range, faults: list[str]
) -> dict[ParameterPlace, str]:
    """Return the stored name of each place of the model that has one; append to `faults` what has no place."""
    stored_at: dict[ParameterPlace, str] = {}
    for name in stored:
        if _is_scale(name, stored):
            continue
        place = names.place_of(name)
        if place is None:
            if not names.is_ignored(name) and names.layer_of(name) in (None, *layers):
                faults.append(f"{name}: the model has no place for it")
        elif place in stored_at:
            faults.append(f"{name} and {stored_at[place]} are the same tensor of the model")
        else:
            stored_at[place] = name
    return stored_at


def _fill_slot(
    slot: Slot, stored_at: Mapping[ParameterPlace, str], names: ModuleNames, faults: list[str]
) -> dict[ParameterPlace, str]:
    """Return the stored name for each place of a slot: its own tensor, else that of the tied slot, else the experts'.

    Append to `faults` which are missing or too many.
    """
    whole_slot = ParameterPlace(slot=slot.name)
    if whole_slot in stored_at:
        return {whole_slot: stored_at[whole_slot]}
    tied = names.tied.get(slot.name)
    if tied is not None and ParameterPlace(slot=tied) in stored_at:
        return {whole_slot: stored_at[ParameterPlace(slot=tied)]}
    expert_places = _expert_places(slot)
    chosen = {place: stored_at[place] for place in expert_places if place in stored_at}
    if not chosen:
        faults.append(f"{slot}: found nothing")
    else:
        faults += [f"{place}: found nothing" for place in expert_places if place not in stored_at]
    beyond = [place for place in stored_at if place.slot == slot.name and place not in chosen]
    faults += [f"{stored_at[place]}: {slot} has no such expert" for place in beyond]
    return chosen


def _expert_places(slot: Slot) -> list[ParameterPlace]:
    """List the places of a slot that holds all experts of a layer; empty for any other slot."""
    name = slot.name.rpartition(".")[2]
    # Halves of an expert's rows, each stored as a tensor of its own; None for all rows.
    halves: dict[str, tuple[str | None, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": (None,)}
    if name not in halves or len(slot.shape) != 3:
        return []
    return [
        ParameterPlace(slot=slot.name, expert=expert, half=half)
        for expert in range(slot.shape[0])
        for half in halves[name]
    ]


def _misfits(name: str, stored: StoredTensors, *, expected: tuple[int, ...], slot: Slot) -> list[str]:
    """Describe faults of shape, dtype and FP8 scales of a stored tensor that goes into `slot`."""
    tensor = stored[name]
    faults = []
    if tuple(tensor.shape) != expected:
        faults.append(f"{name}: expected {list(expected)}, found {list(tensor.shape)}")
    if slot.dtype.is_floating_point and tensor.dtype not in WEIGHT_DTYPES:
        faults.append(f"{name}: found dtype {tensor.dtype}, which mm2 cannot read as a weight")
    if not slot.dtype.is_floating_point and tensor.dtype != slot.dtype:
        faults.append(f"{name}: expected dtype {slot.dtype}, found {tensor.dtype}")
    if tensor.dtype == FLOAT8_E4M3FN:
        scale = stored.get(scale_name(name))
        grid = scale_shape(tuple(tensor.shape))
        if scale is None:
            faults.append(f"{name}: FP8 without its scales {scale_name(name)}")
        elif tuple(scale.shape) != grid or len(tensor.shape) != 2:
            faults.append(f"{scale_name(name)}: expected {list(grid)}, found {list(scale.shape)}")
    return faults


def _is_scale(name: str, stored: StoredTensors) -> bool:
    """Decide whether a tensor holds scales: of `x.weight_scale_inv`, if `x.weight` is FP8."""
    weight = stored.get(name.removesuffix(SCALE_ENDING)) if name.endswith(SCALE_SUFFIX) else None
    return weight is not None and weight.dtype == FLOAT8_E4M3FN


def _read_integers(source: TensorSource, name: str, view: torch.Tensor) -> None:
    """Fill `view`, which may be on a device; `read_into` only writes to the CPU."""
    if view.device.type == "cpu":
        source.read_into(name, view)
        return
    host = torch.empty(view.shape, dtype=view.dtype)
    source.read_into(name, host)
    view.copy_(host)
