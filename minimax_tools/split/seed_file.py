"""Seed files: components (bottom, trunk, top) in `.pt` files of older tools. No code in them runs.

Two kinds are read:

- a dict with the state dict, the config, and the component's name and layers
- a state dict alone, with `<name>_metadata.json` beside it

In some files the component's first layer has number 0. The prefix of the base model is often left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.pickled import PickledReader
from minimax_tools.errors import CheckpointError, Mm2Error
from minimax_tools.machine.json_file import MAX_DEPTH, read_json
from minimax_tools.model.span import Span
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.binding import plan_binding
from minimax_tools.split.causal_model import Implementation, make_causal_config
from minimax_tools.split.causal_part import ModelPart, build_part
from minimax_tools.split.module_names import ModuleNames
from minimax_tools.split.part_loading import first_dtype, in_disk_order
from minimax_tools.split.parts import Part, Role
from minimax_tools.torch_file import InertRecord, TorchFile, refusing, word_kind

# Keys under which a file may name its component.
_ROLE_KEYS = ("component", "component_type", "part", "role")
# A config has a hundred values, and a vocabulary of labels some thousands.
_MOST_CONFIG_VALUES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeedDescription:
    """Name, layers and config of a component, as its file tells."""

    role: Role
    span: Span
    config: Mapping[str, Any]


def read_seed_file(path: Path, *, device: torch.device) -> ModelPart:
    """Load a component from a `.pt` file, in the dtype of its first weight that is not FP8.

    Raises:
        CheckpointError: The file is damaged, or does not name its component and model, or its tensors do not fit
            that component.
        MissingExtraError: transformers is missing.
    """
    require_golden_extra("a split model")
    description = _read_description(path)
    config = make_causal_config(description.config, where=path)
    with PickledReader(path) as reader:
        implementation = Implementation(dtype=first_dtype(reader))
        part = _make_part(path, description, num_hidden_layers=config.num_hidden_layers)
        model_part = build_part(config, part, implementation)
        stored = in_disk_order(reader.index)
        renamed = _renumber(stored, model_part.names, part)
        binding = plan_binding(
            model_part.slots(),
            {renamed[name]: entry for name, entry in stored.items()},
            model_part.names,
            layers=part.layers,
            where=path,
        )
        # The binding names tensors as the whole model does; the reader knows them by their stored names.
        stored_names = {new: name for name, new in renamed.items()}
        sources = {place: stored_names[name] for place, name in binding.sources.items()}
        tensors = replace(binding, sources=sources).fill(reader, device=device)
    return model_part.take(tensors, device=device)


def _renumber(stored: Mapping[str, TensorEntry], names: ModuleNames, part: Part) -> dict[str, str]:
    """Return, by stored name, the name with the whole model's layer number, such as `h.8.x` for `h.0.x`."""
    numbers = {names.layer_of(name) for name in stored} - {None}
    # Numbers 0 to n-1 of n layers are counted from the component's first layer.
    shift = part.span.start if numbers == set(range(len(part.span))) else 0
    return {name: names.shift_layer(name, shift) for name in stored}


def _make_part(path: Path, description: _SeedDescription, *, num_hidden_layers: int) -> Part:
    try:
        return Part(role=description.role, span=description.span, num_hidden_layers=num_hidden_layers)
    except Mm2Error as error:
        raise CheckpointError(f"{path} contradicts itself", found=str(error)) from error


def _read_description(path: Path) -> _SeedDescription:
    with refusing(path, CheckpointError, next_step="Copy it again from the host that wrote it."):
        content = TorchFile(path).value
    metadata = path.with_name(f"{path.stem}_metadata.json")
    beside = _read_metadata(metadata) if metadata.is_file() else {}
    inside = content if isinstance(content, Mapping) else {}
    # The file itself goes before the metadata beside it.
    given = {**beside, **{key: item for key, item in inside.items() if isinstance(key, str)}}
    role_names = [given[key] for key in _ROLE_KEYS if isinstance(given.get(key), str)]
    try:
        return _SeedDescription(
            role=Role(role_names[0]),
            # `end_layer` is the layer behind the last.
            span=Span(_layer_number(given["start_layer"]), _layer_number(given["end_layer"])),
            config=_config(given["config"]),
        )
    except (LookupError, TypeError, ValueError, Mm2Error) as error:
        raise CheckpointError(
            f"{path} does not name its component and model",
            expected=f"component, start_layer, end_layer and config, in it or in {metadata.name} beside it",
            found=f"{type(error).__name__}: {error}",
            next_step="Split the model again from its checkpoint.",
        ) from error


def _read_metadata(path: Path) -> Mapping[str, Any]:
    try:
        metadata = read_json(path)
        if not isinstance(metadata, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Copy it again from the host that wrote it."
        ) from error
    return metadata


def _config(value: Any) -> Mapping[str, Any]:
    # A pickled config object is inert: only its attributes are known.
    config = value.state if isinstance(value, InertRecord) else value
    if not isinstance(config, Mapping):
        raise TypeError(f"config is a {word_kind(value)}")
    plain = {key: item for key, item in config.items() if isinstance(key, str) and _is_plain(item)}
    return MappingProxyType(plain)


def _is_plain(value: Any) -> bool:
    """Decide whether a value is one of JSON's, and of a size that a config may have.

    In a pickle, a list may hold itself, and sixty lists may stand for more values than can be written.
    """
    sizes: dict[
        int, float
    ] = {}  # number of values that a list or dict stands for, infinite if it is not plain

    def size(part: Any, parents: tuple[int, ...]) -> float:
        if not isinstance(part, Mapping | list | tuple):
            return 1 if part is None or isinstance(part, str | int | float) else math.inf
        if id(part) in parents or len(parents) == MAX_DEPTH:
            return math.inf
        if id(part) not in sizes:
            items = part.values() if isinstance(part, Mapping) else part
            are_keys_plain = not isinstance(part, Mapping) or all(isinstance(key, str) for key in part)
            around = (*parents, id(part))
            sizes[id(part)] = 1 + sum(size(item, around) for item in items) if are_keys_plain else math.inf
        return sizes[id(part)]

    return size(value, ()) <= _MOST_CONFIG_VALUES


def _layer_number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"a {word_kind(value)} is no layer number")
    return value
