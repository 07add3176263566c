"""SplitModel: bottom, trunk or top of a causal language model, as a module that runs by itself.

Seed files are components in `.pt` files of older tools: a dict with the state dict, the config, and the component's
name and layers, or a state dict alone with `<name>_metadata.json` beside it. No code in them runs.

B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.pickled import read_pickled_header
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import PICKLED_SUFFIXES, SAFETENSORS_SUFFIX
from minimax_tools.errors import CheckpointError, Mm2Error, UsageError
from minimax_tools.machine.json_file import MAX_DEPTH, read_json
from minimax_tools.machine.size import format_size
from minimax_tools.model.span import Span
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_part import Division, Implementation, ModelPart, make_causal_config
from minimax_tools.split.part_folder import read_part, write_part
from minimax_tools.split.part_loading import first_dtype, stored_weights
from minimax_tools.split.parts import DeviceName, Part, Role
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
    # Whatever its suffix: torch wrote it.
    index = TensorIndex.of(path.parent, read_pickled_header(path))
    with CheckpointReader(path.parent, index=index) as reader:
        part = _make_part(path, description, num_hidden_layers=config.num_hidden_layers)
        division = Division.of(config, Implementation(dtype=first_dtype(reader)))
        tensors = stored_weights(reader, reader.index.names, dtype=division.implementation.dtype)
        return division.load(part, _renumber(tensors, division, part), where=path, device=device)


def _renumber(tensors: Mapping[str, Any], division: Division, part: Part) -> dict[str, Any]:
    """Return the tensors with the whole model's layer numbers, such as `h.8.x` for `h.0.x`."""
    path = division.layers.removeprefix(f"{division.prefix}.")
    pattern = re.compile(rf"(?:{re.escape(division.prefix)}\.)?{re.escape(path)}\.(\d+)\.")
    matches = {name: pattern.match(name) for name in tensors}
    numbers = {int(match[1]) for match in matches.values() if match}
    # Numbers 0 to n-1 of n layers are counted from the component's first layer.
    shift = part.span.start if numbers == set(range(len(part.span))) else 0
    return {
        name
        if match is None
        else f"{name[: match.start(1)]}{int(match[1]) + shift}{name[match.end(1) :]}": tensor
        for (name, match), tensor in zip(matches.items(), tensors.values(), strict=True)
    }


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


# Endings of the names of files that hold weights.
_WEIGHT_SUFFIXES = (*PICKLED_SUFFIXES, SAFETENSORS_SUFFIX)


class SplitModel(nn.Module):
    """A component of a split model. All three, called one after the other, are the whole model.

        hidden_states = bottom(input_ids, attention_mask)
        hidden_states = trunk(hidden_states, attention_mask)
        logits = top(hidden_states, attention_mask)

    The logits are bit for bit those of transformers' whole model with the same dtype and implementations. Each
    component takes the whole mask and all positions, and moves its inputs to its own device. `model` is transformers'
    model, with stand-ins for the modules of other components.
    """

    def __init__(self, loaded: ModelPart) -> None:
        super().__init__()
        self.model = loaded.model
        self.part: Part = loaded.part
        self._loaded = loaded

    def forward(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the component's layers.

        Args:
            inputs: Token ids [B,S] for bottom, else hidden states [B,S,H] of the component before.
            attention_mask: [B,S], 1 for tokens and 0 for padding. Default: all ones.
            position_ids: [B,S] or [1,S]. Default: counted from 0, padding included.

        Returns:
            Hidden states [B,S,H], or logits [B,S,V] from top, on the component's device.

        Raises:
            ValueError: `inputs` has another dtype or shape than this component takes, or the mask or positions do not
                fit it.
        """
        self._check_inputs(inputs, attention_mask, position_ids)
        given = {
            "input_ids" if self.part.has_embedding else "inputs_embeds": inputs,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        # `use_cache` is left as the config has it: without a cache, transformers takes gaps in positions for borders of
        # packed sequences.
        arguments = {name: tensor.to(self.device) for name, tensor in given.items() if tensor is not None}
        if self.part.has_head:
            logits: torch.Tensor = self.model(**arguments).logits
            return logits
        states: torch.Tensor = self.model.base_model(**arguments).last_hidden_state
        return states

    @property
    def device(self) -> torch.device:
        """Device of the component."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the component's hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))

    def save(self, path: str | Path) -> None:
        """Save the component to the folder `path`: safetensors, config.json and component.json.

        Raises:
            UsageError: The name is that of a file, such as `bottom.pt`, or the folder holds something other than a
                component.
            CheckpointError: The disk is full, or cannot be written to.
        """
        folder = Path(path).expanduser()
        if folder.suffix in _WEIGHT_SUFFIXES:
            raise UsageError(
                f"a component is saved to a folder, and {folder.name} is the name of a file",
                expected="a folder, which holds safetensors and JSON",
                next_step=f"Save it to {str(folder.with_suffix(''))!r}: SplitModel.load({str(path)!r}) finds it there.",
            )
        write_part(folder, self._loaded)

    @classmethod
    def load(cls, path: str | Path, device: DeviceName = "cpu") -> SplitModel:
        """Load a component from the folder that `save` wrote, or from an older `.pt` file.

        No code in a `.pt` file is run. If `bottom.pt` does not exist, the folder `bottom` is loaded.

        Raises:
            CheckpointError: The path is missing, damaged, or not a component.
            MissingExtraError: transformers is missing.
        """
        source = Path(path).expanduser()
        if source.is_file():
            return cls(read_seed_file(source, device=torch.device(device)))
        if not source.exists() and source.suffix == ".pt" and source.with_suffix("").is_dir():
            source = source.with_suffix("")
        return cls(read_part(source, device=torch.device(device)))

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"SplitModel({self.part}, {self.model.config.model_type}, {dtype}, "
            f"{format_size(self.size_bytes)} on {self.device})"
        )

    def _check_inputs(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> None:
        found = f"{inputs.dtype} {list(inputs.shape)}"
        if self.part.has_embedding:
            if inputs.dim() != 2 or inputs.is_floating_point():
                raise ValueError(f"bottom takes token ids [batch, sequence] of integers, not {found}")
        else:
            width = self.model.config.hidden_size
            if inputs.dim() != 3 or inputs.shape[2] != width or inputs.dtype != self.dtype:
                raise ValueError(
                    f"{self.part.role} takes hidden states [batch, sequence, {width}] of {self.dtype}, not {found}"
                )
        for name, tensor in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            batch_size, length = inputs.shape[:2]
            shapes = [(batch_size, length)]
            if name == "position_ids":
                shapes.append((1, length))
            if tensor is not None and tuple(tensor.shape) not in shapes:
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, expected {list(inputs.shape[:2])} as the inputs"
                )
