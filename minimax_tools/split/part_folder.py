"""A component's folder: its tensors, the model's config.json, and component.json, which says what it is.

It is written to a temporary sibling and renamed, so what bears its name is whole.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, Mm2Error, UsageError
from minimax_tools.model.span import Span
from minimax_tools.provenance import library_versions
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_model import Implementation, read_causal_config
from minimax_tools.split.causal_part import ModelPart, build_part
from minimax_tools.split.parts import Part, Role

if TYPE_CHECKING:
    from minimax_tools.split.causal_model import CausalModel
import struct
import zlib

from minimax_tools.checkpoint.header import DTYPES, TensorEntry

logger = logging.getLogger(__name__)

DESCRIPTION_FILE = "component.json"
TENSORS_FILE = "model.safetensors"
_FORMAT = "mm2 split component"
_VERSION = 1
_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write the tensors in the order of their names, and see that they are on the disk.

    Returns:
        The crc32 of each tensor's bytes, by name.

    Raises:
        OSError: The disk is full, or cannot be written to.
        ValueError: A tensor has a dtype that safetensors does not know.
    """
    names = sorted(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors does not know")
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    checksums = {}
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            view = _bytes(tensors[name].detach().to("cpu").contiguous())
            file.write(view)
            checksums[name] = zlib.crc32(view)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def read_tensor(
    reader: CheckpointReader, entry: TensorEntry, *, crc32: int, device: torch.device
) -> torch.Tensor:
    """The tensor on `device`, in its stored dtype.

    Raises:
        CheckpointError: It cannot be read, or its bytes are not those that were written.
    """
    tensor = reader.read(entry.name)
    found = zlib.crc32(_bytes(tensor))
    if found != crc32:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is damaged",
            expected=f"crc32 {crc32:08x}",
            found=f"{found:08x}",
            next_step="Copy the folder again, or save the component anew.",
        )
    return tensor.to(device)


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """A component with its data.

    Args:
        model: transformers' model, stand-ins where other components compute.
        part: Which component it is.
        implementation: What it computes with.
    """

    model: CausalModel
    part: Part
    implementation: Implementation


def write_part(folder: Path, loaded: LoadedPart) -> None:
    """Save a component, in place of one that was saved there before.

    Raises:
        UsageError: Something else lies there.
        CheckpointError: The disk is full, or cannot be written to.
    """
    refuse_foreign(folder)
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        loaded.model.config.save_pretrained(temporary)
        checksums = write_tensors(temporary / TENSORS_FILE, loaded.model.state_dict())
        text = json.dumps(_describe(loaded, checksums), indent=2)
        (temporary / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")
        _replace(folder, temporary)
    except (OSError, ValueError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot save {loaded.part} to {folder}",
            found=str(error),
            next_step="Mend that, or choose another folder.",
        ) from error


def read_part(folder: Path, *, device: torch.device) -> LoadedPart:
    """Load a component that `write_part` saved, bit for bit.

    Raises:
        CheckpointError: The folder is missing, damaged, or holds no component.
        MissingExtraError: transformers is missing.
    """
    require_golden_extra("a split model")
    description = _read_description(folder)
    part, implementation = _parse(folder, description)
    model_part = build_part(
        read_causal_config(folder),
        layers=part.layers,
        with_embedding=part.has_embedding,
        with_head=part.has_head,
        implementation=implementation,
    )
    tensors = _read_tensors(folder, model_part, description["tensors"], device=device)
    return LoadedPart(model=model_part.take(tensors, device=device), part=part, implementation=implementation)


def refuse_foreign(folder: Path) -> None:
    """Check that a component may be saved there.

    Raises:
        UsageError: Something else lies there.
    """
    is_ours = (folder / DESCRIPTION_FILE).is_file()
    if folder.exists() and not is_ours and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} holds something else",
            expected="a new or empty folder, or one that holds a component",
            next_step="Choose another folder.",
        )


def _describe(loaded: LoadedPart, checksums: Mapping[str, int]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "component": str(loaded.part.role),
        "start_layer": loaded.part.span.start,
        "end_layer": loaded.part.span.stop,
        "num_hidden_layers": loaded.part.num_hidden_layers,
        "model_type": loaded.model.config.model_type,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "attn_implementation": loaded.implementation.attn,
        "experts_implementation": loaded.implementation.experts,
        "versions": library_versions(),
        "tensors": checksums,
    }


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION_FILE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no component of a split model",
            expected=f"a folder with {DESCRIPTION_FILE}",
            found=f"{type(error).__name__}: {error}" if folder.is_dir() else "no such folder",
            next_step="Give a folder that SplitModel.save or auto_save wrote.",
        ) from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise CheckpointError(f"{path} does not describe a component", expected=f"format {_FORMAT!r}")
    if description.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} is of another version",
            expected=f"version {_VERSION}",
            found=repr(description.get("version")),
            next_step="Load it with the mm2 that saved it.",
        )
    return description


def _parse(folder: Path, description: Mapping[str, Any]) -> tuple[Part, Implementation]:
    try:
        part = Part(
            role=Role(description["component"]),
            span=Span(int(description["start_layer"]), int(description["end_layer"])),
            num_hidden_layers=int(description["num_hidden_layers"]),
        )
        dtype = getattr(torch, description["dtype"])
        if not isinstance(dtype, torch.dtype) or not isinstance(description["tensors"], dict):
            raise TypeError("dtype or tensors is not what it should be")
        implementation = Implementation(
            dtype=dtype,
            attn=description["attn_implementation"],
            experts=description["experts_implementation"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, Mm2Error) as error:
        raise CheckpointError(
            f"{folder / DESCRIPTION_FILE} is damaged",
            found=f"{type(error).__name__}: {error}",
            next_step="Copy the folder again, or save the component anew.",
        ) from error
    return part, implementation


def _read_tensors(
    folder: Path, model_part: ModelPart, checksums: Mapping[str, int], *, device: torch.device
) -> dict[str, torch.Tensor]:
    slots = model_part.slots()
    with CheckpointReader(folder) as reader:
        index = reader.index
        faults = [f"{slot}: found nothing" for name, slot in slots.items() if name not in index]
        faults += [f"{name}: the model has no place for it" for name in index.names if name not in slots]
        faults += [
            f"{slot}: found {list(index[name].shape)}"
            for name, slot in slots.items()
            if name in index and index[name].shape != slot.shape
        ]
        faults += [f"{name}: no checksum" for name in slots if not isinstance(checksums.get(name), int)]
        if faults:
            raise CheckpointError(
                f"the component at {folder} is not what its config.json and {DESCRIPTION_FILE} describe",
                found="; ".join(faults[:12]),
                next_step="Copy the folder again, or save the component anew.",
            )
        return {
            name: read_tensor(reader, index[name], crc32=checksums[name], device=device) for name in slots
        }


def _replace(folder: Path, temporary: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    # A folder that is not empty cannot be replaced in one step.
    former = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(former, ignore_errors=True)
    folder.rename(former)
    try:
        temporary.rename(folder)
    except OSError:
        former.rename(folder)
        raise
    shutil.rmtree(former, ignore_errors=True)
    _sync(folder.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
