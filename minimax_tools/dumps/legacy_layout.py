"""LegacyLayout: which tensors a folder of `.pt` files holds, and what it says of its token rows."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from minimax_tools.dumps.legacy_files import LegacyFiles, LegacyPlace, described, first_of
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site

# In words, for messages.
LEGACY_LAYOUT = "layer_<N>_output.pt, embedding_output.pt, layer_output.pt or layers_output.pt"

_LAYER_FILE = re.compile(r"layer_(\d+)_(input|output)\.pt")
_METADATA_FILE = "metadata.pt"
_MODEL_FILES: Mapping[str, ModelSite] = MappingProxyType(
    {
        "embedding_output.pt": ModelSite.EMBEDDING,
        "norm_output.pt": ModelSite.FINAL_NORM,
        "final_norm.pt": ModelSite.FINAL_NORM,
        "final_norm_output.pt": ModelSite.FINAL_NORM,
        "lm_head_output.pt": ModelSite.LOGITS,
        "logits.pt": ModelSite.LOGITS,
        "logits_output.pt": ModelSite.LOGITS,
    }
)

# Keys of a tensor in a file of its own, should it lie in a dict there.
_OWN_FILE_KEYS = ("output_hidden_states", "hidden_states", "output", "last_hidden_state", "logits")
_RUN_KEYS: Mapping[Site, tuple[str, ...]] = MappingProxyType(
    {Site.INPUT: ("input_hidden_states",), Site.OUTPUT: ("output_hidden_states", "output_full")}
)
_MASK_KEYS = ("input_attention_mask", "attention_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A file that holds a whole run: the keys of its first and last layer, and its folder's name."""

    first_key: str
    last_key: str
    folder: re.Pattern[str]


_RUN_FILES: Mapping[str, RunFile] = MappingProxyType(
    {
        "layer_output.pt": RunFile(
            first_key="layer_idx",
            last_key="layer_idx",
            folder=re.compile(r"single_layer_(?P<layer_idx>\d+)"),
        ),
        "layers_output.pt": RunFile(
            first_key="start_layer",
            last_key="end_layer",
            folder=re.compile(r"layers_(?P<start_layer>\d+)_to_(?P<end_layer>\d+)"),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LegacyLayout:
    """What a folder holds.

    Args:
        layers: Places of inputs and outputs, by layer and site.
        model: Places of the sites outside the layers.
        mask: The attention mask as it was saved; None where no file holds one.
        batch_shape: (B, S) of the token rows; None where no file says.
    """

    layers: Mapping[tuple[int, Site], LegacyPlace]
    model: Mapping[ModelSite, LegacyPlace]
    mask: Any
    batch_shape: tuple[int, int] | None


def is_legacy(names: Iterable[str]) -> bool:
    """Whether files of these names are of this layout."""
    return any(name in _RUN_FILES or name in _MODEL_FILES or _LAYER_FILE.fullmatch(name) for name in names)


def read_layout(files: LegacyFiles) -> LegacyLayout:
    """Find what the files hold; those that do not tell by their names are read.

    Raises:
        CaptureError: A file is damaged, or does not say which layers it is of.
    """
    layers: dict[tuple[int, Site], LegacyPlace] = {}
    mask: Any = None
    batch_shape: tuple[int, int] | None = None
    for name in files.names:
        for key, place in _layer_places(files, name).items():
            if layers.setdefault(key, place) != place:
                raise _stored_twice(files, key, layers[key], place)
        if name in _RUN_FILES or name == _METADATA_FILE:
            for record in _mappings(files.load(name)):
                mask = first_of(record, _MASK_KEYS) if mask is None else mask
                batch_shape = batch_shape or _batch_shape(record)
    model = {
        _MODEL_FILES[name]: LegacyPlace(file=name, keys=_OWN_FILE_KEYS)
        for name in files.names
        if name in _MODEL_FILES
    }
    return LegacyLayout(layers=layers, model=model, mask=mask, batch_shape=batch_shape)


def _layer_places(files: LegacyFiles, name: str) -> dict[tuple[int, Site], LegacyPlace]:
    layer_file = _LAYER_FILE.fullmatch(name)
    if layer_file is not None:
        layer, site = int(layer_file[1]), Site(layer_file[2])
        keys = _OWN_FILE_KEYS if site is Site.OUTPUT else (*_RUN_KEYS[site], "hidden_states", "input")
        return {(layer, site): LegacyPlace(file=name, keys=keys)}
    if name not in _RUN_FILES:
        return {}
    record = files.load(name)
    if not isinstance(record, Mapping):
        raise CaptureError(
            f"{files.directory / name} is of another layout",
            expected=f"a dict with {_RUN_FILES[name].last_key} and output_hidden_states",
            found=described(record),
            next_step="Run the capture again.",
        )
    first, last = _run_layers(files, name, record)
    owners = ((first, Site.INPUT), (last, Site.OUTPUT))
    return {
        (layer, site): LegacyPlace(file=name, keys=_RUN_KEYS[site])
        for layer, site in owners
        if first_of(record, _RUN_KEYS[site]) is not None
    }


def _run_layers(files: LegacyFiles, name: str, record: Mapping[Any, Any]) -> tuple[int, int]:
    """The first and the last layer of a run, the latter included."""
    run = _RUN_FILES[name]
    match = run.folder.fullmatch(files.directory.resolve().name)
    named = {key: int(value) for key, value in match.groupdict().items()} if match else {}
    try:
        first, last = (
            operator.index(record.get(key, named.get(key))) for key in (run.first_key, run.last_key)
        )
    except TypeError:
        raise CaptureError(
            f"{files.directory / name} does not say which layer it holds",
            expected=f"a whole number under {run.last_key}",
            found=described(record),
            next_step="Name the folder single_layer_N or layers_A_to_B as the script did.",
        ) from None
    stated = record.get("num_layers")
    is_other_number = isinstance(stated, int) and stated != last - first + 1
    if first < 0 or last < first or is_other_number:
        raise CaptureError(
            f"{files.directory / name} contradicts itself",
            expected=f"{last - first + 1} layers, {first} to {last}",
            found=f"num_layers {stated}",
            next_step="Run the capture again.",
        )
    return first, last


def _stored_twice(
    files: LegacyFiles, key: tuple[int, Site], first: LegacyPlace, second: LegacyPlace
) -> CaptureError:
    return CaptureError(
        f"{files.directory} holds the {key[1]} of layer {key[0]} twice",
        found=f"{first.file} and {second.file}",
        next_step="Keep the files of each run in a folder of their own.",
    )


def _mappings(record: Any) -> list[Mapping[Any, Any]]:
    """The record and the one of inputs in it, where they are dicts."""
    inputs = record.get("inputs") if isinstance(record, Mapping) else None
    return [found for found in (record, inputs) if isinstance(found, Mapping)]


def _batch_shape(record: Mapping[Any, Any]) -> tuple[int, int] | None:
    """(B, S) where the record's mask [B,S], ids [B,S] or hidden states [B,S,H] say it."""
    rows = [first_of(record, _MASK_KEYS), record.get("input_ids")]
    hidden = [record.get("input_hidden_states"), record.get("output_hidden_states")]
    for tensors, ndim in ((rows, 2), (hidden, 3)):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.ndim == ndim:
                return tensor.shape[0], tensor.shape[1]
    return None
