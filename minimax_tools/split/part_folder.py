"""Folder of a saved component: its tensors, the model's config.json, and component.json, which describes it.

A folder is written in a temporary folder and renamed, so it is complete or absent.

Tensors of a saved component (a model's bottom, trunk or top): one safetensors file, a checksum of each tensor.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import encode_header
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, UsageError, shorten
from minimax_tools.json_codec import DecodeError, decode, encode
from minimax_tools.machine.files import make_folder, put_in_place, sync_tree, temporary_beside
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.span import Span
from minimax_tools.provenance import library_versions
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_part import (
    Division,
    Implementation,
    ModelPart,
    read_causal_config,
    unfit_checkpoint,
)
from minimax_tools.split.parts import Part, Role
from minimax_tools.stored_dtype import SAFETENSORS_NAMES

DESCRIPTION_FILE = "component.json"
TENSORS_FILE = "model.safetensors"
_FORMAT = "mm2 split component"
_VERSION = 1
_AGAIN = "Copy the folder again, or save the component anew."


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write tensors in the order of their names, and flush them to the disk.

    Returns:
        The crc32 of each tensor's bytes, by name.

    Raises:
        OSError: The disk is full, or cannot be written to.
        ValueError: A tensor has a dtype that safetensors does not know.
    """
    sizes = [TensorSize.of(name, tensor) for name, tensor in sorted(tensors.items())]
    for size in sizes:
        if size.dtype not in SAFETENSORS_NAMES:
            raise ValueError(f"{size.name} is {size.dtype}, which safetensors does not know")
    checksums = {}
    with path.open("wb") as file:
        file.write(encode_header(sizes))
        for name, tensor in sorted(tensors.items()):
            data = _bytes_of(tensor.detach().to("cpu").contiguous())
            file.write(data)
            checksums[name] = zlib.crc32(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedTensor:
    """A stored tensor that is read, and compared with its checksum, when it is asked for."""

    reader: CheckpointReader
    name: str
    crc32: int

    def __getitem__(self, _: object) -> torch.Tensor:
        tensor = self.reader.read(self.name)
        found = zlib.crc32(_bytes_of(tensor))
        if found != self.crc32:
            raise CheckpointError(
                f"{self.name} in {self.reader.index[self.name].file} is damaged",
                expected=f"crc32 {self.crc32:08x}",
                found=f"{found:08x}",
                next_step=_AGAIN,
            )
        return tensor


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view


@dataclass(frozen=True, slots=True, kw_only=True)
class _Description:
    """The content of component.json."""

    format: str
    version: int
    component: Role
    start_layer: int
    end_layer: int  # the layer behind the last
    num_hidden_layers: int  # of the whole model
    model_type: str
    dtype: torch.dtype
    attn_implementation: str | None
    experts_implementation: str | None
    versions: Mapping[str, str]
    tensors: Mapping[str, int]  # crc32 of each tensor's bytes, by name

    def __post_init__(self) -> None:
        _ = self.part  # refuses layers that such a component cannot have

    @property
    def part(self) -> Part:
        """The component."""
        return Part(
            role=self.component,
            span=Span(self.start_layer, self.end_layer),
            num_hidden_layers=self.num_hidden_layers,
        )

    @property
    def implementation(self) -> Implementation:
        """The dtype and implementations that compute it."""
        return Implementation(
            dtype=self.dtype, attn=self.attn_implementation, experts=self.experts_implementation
        )


def write_part(folder: Path, loaded: ModelPart) -> None:
    """Save a component to `folder`; a component that the folder already holds is replaced.

    Raises:
        UsageError: The folder holds something else.
        CheckpointError: The disk is full, or cannot be written to.
    """
    refuse_foreign(folder)
    try:
        make_folder(folder.parent)
        with temporary_beside(folder) as written:
            written.mkdir()
            loaded.model.config.save_pretrained(written)
            checksums = write_tensors(written / TENSORS_FILE, loaded.model.state_dict())
            text = json.dumps(encode(_describe(loaded, checksums)), indent=2)
            (written / DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")
            sync_tree(written)
            _replace(folder, written)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot save {loaded.part} to {folder}",
            found=str(error),
            next_step="Make room or mend the permissions, or choose another folder.",
        ) from error


def read_part(folder: Path, *, device: torch.device) -> ModelPart:
    """Load a component that `write_part` saved, bit for bit.

    Raises:
        CheckpointError: The folder is missing, damaged, or holds no component.
        MissingExtraError: transformers is missing.
    """
    require_golden_extra("a split model")
    description = _read_description(folder)
    division = Division.of(read_causal_config(folder), description.implementation)
    with CheckpointReader(folder) as reader:
        unchecked = [f"{name}: no checksum" for name in reader.index.names if name not in description.tensors]
        if unchecked:
            raise unfit_checkpoint(folder, unchecked)
        tensors = {
            name: _CheckedTensor(reader=reader, name=name, crc32=description.tensors[name])
            for name in reader.index.names
        }
        return division.load(description.part, tensors, where=folder, device=device)


def refuse_foreign(folder: Path) -> None:
    """Check that a component may be saved to `folder`: it is new, empty or holds a component.

    Raises:
        UsageError: The folder holds something else.
    """
    is_component = (folder / DESCRIPTION_FILE).is_file()
    if folder.exists() and not is_component and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} holds something else",
            expected="a new or empty folder, or one that holds a component",
            next_step="Choose another folder.",
        )


def _describe(loaded: ModelPart, checksums: Mapping[str, int]) -> _Description:
    return _Description(
        format=_FORMAT,
        version=_VERSION,
        component=loaded.part.role,
        start_layer=loaded.part.span.start,
        end_layer=loaded.part.span.stop,
        num_hidden_layers=loaded.part.num_hidden_layers,
        model_type=loaded.model.config.model_type,
        dtype=loaded.model.dtype,
        attn_implementation=loaded.implementation.attn,
        experts_implementation=loaded.implementation.experts,
        versions=library_versions(),
        tensors=checksums,
    )


def _read_description(folder: Path) -> _Description:
    path = folder / DESCRIPTION_FILE
    try:
        record = read_own_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no component of a split model",
            expected=f"a folder with {DESCRIPTION_FILE}",
            found=f"{type(error).__name__}: {error}" if folder.is_dir() else "no such folder",
            next_step="Give a folder that SplitModel.save or auto_save wrote.",
        ) from error
    form = (record.get("format"), record.get("version")) if isinstance(record, dict) else record
    if form != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{path} does not describe a component",
            expected=f"format {_FORMAT!r} of version {_VERSION}",
            found=shorten(repr(form)),
            next_step="Load it with the mm2 that saved it.",
        )
    try:
        return decode(_Description, record)
    except DecodeError as error:
        raise CheckpointError(f"{path} is damaged", found=str(error), next_step=_AGAIN) from error


def _replace(folder: Path, written: Path) -> None:
    """Rename `written` to `folder`; if that fails, the former folder is put back."""
    if not folder.exists():
        put_in_place(written, folder)
        return
    # A folder with content cannot be replaced in one step, so it is moved aside: into the temporary folder, with which
    # it is removed.
    former = written.with_name(".former")
    folder.rename(former)
    try:
        put_in_place(written, folder)
    except OSError:
        former.rename(folder)
        raise
