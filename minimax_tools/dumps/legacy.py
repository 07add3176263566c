"""LegacyCapture: the `.pt` files of scripts before mm2, read as a capture.

A golden is a folder of `layer_N_output.pt`, with `embedding_output.pt` and `metadata.pt` beside them, and perhaps
`layer_N_input.pt`, norm and logits. Without its own file, a layer's input is the output before it. A device run is a
folder with one `layer_output.pt` (a single layer) or `layers_output.pt` (a range of layers). A range keeps the input of
its first layer and the output of its last layer only.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minimax_tools.dumps.placed_capture import PlacedCapture, SiteKey
from minimax_tools.dumps.tensor_file import load_restricted
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.torch_file import InertRecord, is_plain, without_gradient

# Names of the files, for messages.
LEGACY_LAYOUT = "layer_<N>_output.pt, embedding_output.pt, layer_output.pt or layers_output.pt"
_LAYER_FILE = re.compile(r"layer_(\d+)_(input|output)\.pt")
_METADATA_FILE = "metadata.pt"
_MODEL_FILES: Mapping[str, ModelSite] = {
    "embedding_output.pt": ModelSite.EMBEDDING,
    "norm_output.pt": ModelSite.FINAL_NORM,
    "final_norm.pt": ModelSite.FINAL_NORM,
    "final_norm_output.pt": ModelSite.FINAL_NORM,
    "lm_head_output.pt": ModelSite.LOGITS,
    "logits.pt": ModelSite.LOGITS,
    "logits_output.pt": ModelSite.LOGITS,
}
# Keys of the tensor of a file that holds one tensor, if it lies in a dict; the likeliest first.
_OWN_FILE_KEYS = ("output_hidden_states", "hidden_states", "output", "last_hidden_state", "logits")
# Keys of the tensors of a file that holds a whole run.
_RUN_KEYS: Mapping[Site, tuple[str, ...]] = {
    Site.INPUT: ("input_hidden_states",),
    Site.OUTPUT: ("output_hidden_states", "output_full"),
}
_MASK_KEYS = ("input_attention_mask", "attention_mask")
# Steps from a file's value to its tensor, at most: a dict, a tuple in it, the tensor itself, and one to spare.
_MAX_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyPlace:
    """A tensor's place: its file, and the keys it may have there, the likeliest first."""

    file: str
    keys: tuple[str, ...]


class _RunFile(NamedTuple):
    """A file of a whole run, and where the numbers of the run's first and last layer stand."""

    first_key: str  # key of the first layer's number in the file
    last_key: str  # key of the last layer's number
    folder: re.Pattern[str]  # the folder's name, with both numbers; used if the file lacks a key


_RUN_FILES: Mapping[str, _RunFile] = {
    "layer_output.pt": _RunFile("layer_idx", "layer_idx", re.compile(r"single_layer_(?P<layer_idx>\d+)")),
    "layers_output.pt": _RunFile(
        "start_layer",
        "end_layer",
        re.compile(r"layers_(?P<start_layer>\d+)_to_(?P<end_layer>\d+)"),
    ),
}


def is_legacy(directory: Path) -> bool:
    """Decide whether a folder holds files of this layout."""
    return any(
        name in _RUN_FILES or name in _MODEL_FILES or _LAYER_FILE.fullmatch(name)
        for name in _list_names(directory)
    )


def find_tensor(value: Any, keys: tuple[str, ...]) -> torch.Tensor | None:
    """Return the tensor that `value` is, begins with, or holds under one of `keys`; None if there is none."""
    for _ in range(_MAX_STEPS):
        if isinstance(value, torch.Tensor):
            return without_gradient(value) if is_plain(value) else None
        if isinstance(value, np.ndarray):
            return torch.as_tensor(value)
        if isinstance(value, tuple | list) and value:
            value = value[0]
        elif isinstance(value, Mapping):
            found = _first_of(value, keys)
            value = _only_tensor(value) if found is None else found
        else:
            return None
    return None


def describe_value(value: Any) -> str:
    """Describe in a few words what a file holds, for messages."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return "a dict with " + (", ".join(str(key) for key in list(value)[:8]) or "nothing")
    if isinstance(value, InertRecord):
        return f"a pickled {value.kind}"
    return type(value).__name__


def _list_names(directory: Path) -> tuple[str, ...]:
    """Return the names of the files in a folder, sorted; none if it cannot be read."""
    try:
        return tuple(sorted(path.name for path in directory.iterdir() if path.is_file()))
    except OSError:
        return ()


def _run_layers(path: Path, record: Mapping[Any, Any]) -> tuple[int, int]:
    """Return the first and the last layer of a run, the latter included."""
    first_key, last_key, folder = _RUN_FILES[path.name]
    match = folder.fullmatch(path.resolve().parent.name)
    named = {key: int(value) for key, value in match.groupdict().items()} if match else {}
    try:
        first = operator.index(record.get(first_key, named.get(first_key)))
        last = operator.index(record.get(last_key, named.get(last_key)))
    except TypeError:  # no number, or not a whole one
        raise CaptureError(
            f"{path} does not say which layer it holds",
            expected=f"a whole number under {last_key}",
            found=describe_value(record),
            next_step="Name the folder single_layer_N or layers_A_to_B as the script did.",
        ) from None
    num_layers = record.get("num_layers")
    is_other_number = isinstance(num_layers, int) and num_layers != last - first + 1
    if first < 0 or last < first or is_other_number:
        raise CaptureError(
            f"{path} contradicts itself",
            expected=f"{last - first + 1} layers, {first} to {last}",
            found=f"num_layers {num_layers}",
            next_step="Run the capture again.",
        )
    return first, last


def _mappings(record: Any) -> list[Mapping[Any, Any]]:
    """Return the record and the record of inputs in it, if they are dicts."""
    inputs = record.get("inputs") if isinstance(record, Mapping) else None
    return [found for found in (record, inputs) if isinstance(found, Mapping)]


def _batch_shape(record: Mapping[Any, Any]) -> tuple[int, int] | None:
    """Return (B, S) of the record's mask [B,S], ids [B,S] or hidden states [B,S,H]; None if it holds none."""
    rows = [_first_of(record, _MASK_KEYS), record.get("input_ids")]
    hidden = [record.get("input_hidden_states"), record.get("output_hidden_states")]
    for tensors, ndim in ((rows, 2), (hidden, 3)):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.ndim == ndim:
                return tensor.shape[0], tensor.shape[1]
    return None


def _first_of(record: Mapping[Any, Any], keys: tuple[str, ...]) -> Any:
    return next((record[key] for key in keys if record.get(key) is not None), None)


def _only_tensor(record: Mapping[Any, Any]) -> torch.Tensor | None:
    """Return the dict's one tensor under a key that is not an input's."""
    tensors = [
        value
        for key, value in record.items()
        if isinstance(value, torch.Tensor) and not str(key).startswith("input")
    ]
    return tensors[0] if len(tensors) == 1 else None


class LegacyCapture(PlacedCapture[LegacyPlace]):
    """A folder of `.pt` files opened for reading; one file is in memory at a time.

    Such files hold the batch as the golden does, padding included, so tensors are read as they lie.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._loaded: tuple[str, Any] | None = None  # the last file that was read
        places: dict[SiteKey, LegacyPlace] = {}
        self._mask: Any = None  # the attention mask as it was saved; None if no file holds one
        self._batch_shape: tuple[int, int] | None = None  # (B, S) of the token rows; None if no file tells
        for name in _list_names(directory):
            for key, place in self._places_in(name).items():
                first = places.setdefault(key, place)
                if first != place:
                    layer, site = key
                    raise CaptureError(
                        f"{directory} holds the {site}{'' if layer is None else f' of layer {layer}'} twice",
                        found=f"{first.file} and {place.file}",
                        next_step="Keep the files of each run in a folder of their own.",
                    )
            if name in _RUN_FILES or name == _METADATA_FILE:
                # The first record that holds a mask or a shape counts.
                for record in _mappings(self._load(name)):
                    self._mask = _first_of(record, _MASK_KEYS) if self._mask is None else self._mask
                    self._batch_shape = self._batch_shape or _batch_shape(record)
        super().__init__(directory, places)

    @classmethod
    def open(cls, directory: Path) -> LegacyCapture:
        """Open a folder of this layout; files are read only if their names do not tell what they hold."""
        if not is_legacy(directory):
            raise CaptureError(
                f"no capture at {directory}",
                expected=LEGACY_LAYOUT,
                next_step="Name the folder that holds the files themselves.",
            )
        return cls(directory)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read a site's tensor to the CPU, in its stored dtype; [B,S,H] if the files tell B and S."""
        place = self._find(layer, site)
        if place is not None:
            return self._read(place)
        if layer is None:
            raise CaptureError(
                f"{self.directory} holds no {site}", next_step="Only whole-model runs capture it."
            )
        raise CaptureError(
            f"{self.directory} holds no {site} of layer {layer}",
            found=", ".join(f"layer {held}: {'/'.join(self.sites(held))}" for held in self.layers),
            next_step="Such files keep inputs and outputs of layers only; for more, capture with mm2.",
        )

    def read_attention_mask(self) -> torch.Tensor | None:
        """Read the mask, int64 [B,S], 1 on real tokens; None if no file holds one.

        Raises:
            CaptureError: The stored mask does not tell real tokens from padding.
        """
        if self._mask is None:
            return None
        mask = find_tensor(self._mask, keys=())  # a tensor, or the first or only one of its container
        if mask is None or mask.ndim not in (1, 2) or not bool(((mask == 0) | (mask == 1)).all()):
            raise CaptureError(
                f"the attention mask of {self.directory} does not tell real tokens from padding",
                expected="[B,S] of 0 and 1",
                found=describe_value(self._mask),
                next_step="Capture again with mm2, which stores the rows it ran.",
            )
        return (mask[None] if mask.ndim == 1 else mask).to(torch.int64)

    def _load(self, name: str) -> Any:
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # before the next is read, so that memory holds one
            self._loaded = name, load_restricted(self.directory / name)
        return self._loaded[1]

    def _read(self, place: LegacyPlace) -> torch.Tensor:
        value = self._load(place.file)
        tensor = find_tensor(value, place.keys)
        if tensor is None:
            raise CaptureError(
                f"{self.directory / place.file} holds no tensor where one is looked for",
                expected="a tensor, a tuple that begins with it, or a dict with " + ", ".join(place.keys),
                found=describe_value(value),
                next_step="Save the tensor alone: torch.save(tensor.cpu(), FILE).",
            )
        # In memory of its own: the file may change now.
        tensor, shape = tensor.clone(), self._batch_shape
        if tensor.ndim == 2 and shape is not None and tensor.shape[0] == shape[0] * shape[1]:
            return tensor.reshape(*shape, -1)
        return tensor

    def _places_in(self, name: str) -> dict[SiteKey, LegacyPlace]:
        """Return the places in one file; {} for a file that holds none."""
        if name in _MODEL_FILES:
            return {(None, _MODEL_FILES[name]): LegacyPlace(file=name, keys=_OWN_FILE_KEYS)}
        layer_file = _LAYER_FILE.fullmatch(name)
        if layer_file is not None:
            layer, site = int(layer_file[1]), Site(layer_file[2])
            keys = _OWN_FILE_KEYS if site is Site.OUTPUT else (*_RUN_KEYS[site], "hidden_states", "input")
            return {(layer, site): LegacyPlace(file=name, keys=keys)}
        if name not in _RUN_FILES:
            return {}
        record = self._load(name)
        if not isinstance(record, Mapping):
            raise CaptureError(
                f"{self.directory / name} is of another layout",
                expected=f"a dict with {_RUN_FILES[name].last_key} and output_hidden_states",
                found=describe_value(record),
                next_step="Run the capture again.",
            )
        first, last = _run_layers(self.directory / name, record)
        return {
            (layer, site): LegacyPlace(file=name, keys=_RUN_KEYS[site])
            for layer, site in ((first, Site.INPUT), (last, Site.OUTPUT))
            if _first_of(record, _RUN_KEYS[site]) is not None
        }
