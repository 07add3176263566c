"""Placement: which device holds which part of the golden model, as accelerate understands it."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.errors import BackendError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_SIZE = re.compile(r"\d+(\.\d+)?\s*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.IGNORECASE)

DeviceMap = str | dict[str, int | str]
MaxMemory = dict[int | str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where to put the golden model.

    Args:
        device_map: A strategy of accelerate, or a map from module names to devices.
        max_memory: Memory limit per device, or None for what is free.
        offload_folder: Where modules go that fit nowhere else.
    """

    device_map: DeviceMap
    max_memory: MaxMemory | None = None
    offload_folder: Path | None = None

    def loading_arguments(self) -> dict[str, Any]:
        """The keyword arguments of `from_pretrained`."""
        arguments: dict[str, Any] = {"device_map": self.device_map}
        if self.max_memory is not None:
            arguments["max_memory"] = self.max_memory
        if self.offload_folder is not None:
            arguments["offload_folder"] = str(self.offload_folder)
        return arguments


def parse_placement(device_map: str, *, max_memory: str | None, offload_folder: Path | None) -> Placement:
    """Read `--device-map`, `--max-memory` and `--offload-folder`.

    Without a GPU every strategy means the CPU, unless limits or an offload folder ask for accelerate's split.

    Raises:
        UsageError: A value cannot be read.
        BackendError: A GPU is named that is not here.
    """
    num_gpus = torch.cuda.device_count()
    limits = _parse_max_memory(max_memory, num_gpus=num_gpus) if max_memory else None
    placed = _parse_device_map(device_map)
    if num_gpus == 0:
        logger.info("No GPU here: the golden runs on the CPU.")
        if isinstance(placed, str) and limits is None:
            placed = {"": "cpu"}
    _refuse_absent_gpus(placed, limits, num_gpus=num_gpus)
    return Placement(device_map=placed, max_memory=limits, offload_folder=offload_folder)


def describe_placement(model: PreTrainedModel) -> list[str]:
    """A line per device: its name, its memory, the modules placed there, the memory in use."""
    device_map: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {"": str(model.device)}
    modules = Counter(str(device) for device in device_map.values())
    lines = []
    for device, count in sorted(modules.items()):
        placed = "the whole model" if set(device_map) == {""} else f"{count} modules"
        if device.isdigit() or device.startswith("cuda"):
            index = int(device.removeprefix("cuda:") or 0) if device != "cuda" else 0
            properties = torch.cuda.get_device_properties(index)
            used, total = torch.cuda.memory_allocated(index), properties.total_memory
            lines.append(
                f"cuda:{index} {properties.name}, {total / 1e9:.1f} GB: {placed}, {used / 1e9:.1f} GB in use"
            )
        else:
            lines.append(f"{device}: {placed}")
    return lines


def _parse_device_map(text: str) -> DeviceMap:
    if text in _STRATEGIES:
        return text
    if text == "cpu" or re.fullmatch(r"cuda(:\d+)?", text):
        return {"": text}
    if text.endswith(".json"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--device-map {text} cannot be read", found=str(error)) from error
    try:
        mapping = json.loads(text)
    except ValueError:
        mapping = None
    if not isinstance(mapping, dict) or not mapping:
        choices = ", ".join((*_STRATEGIES, "cpu", "cuda:N"))
        raise UsageError(
            f"--device-map {text!r} cannot be read", expected=f"{choices}, or JSON like {{\"model.layers.0\": 0}}"
        )
    return mapping


def _parse_max_memory(text: str, *, num_gpus: int) -> MaxMemory:
    if _SIZE.fullmatch(text.strip()):
        devices: list[int | str] = list(range(num_gpus)) or ["cpu"]
        return dict.fromkeys(devices, text.strip())
    limits: MaxMemory = {}
    for part in text.split(","):
        device, _, size = part.partition(":")
        device, size = device.strip(), size.strip()
        if not (device.isdigit() or device in ("cpu", "disk")) or not _SIZE.fullmatch(size):
            raise UsageError(
                f"--max-memory {text!r} cannot be read at {part!r}", expected="40GB, or 0:40GB,1:60GB,cpu:100GB"
            )
        limits[int(device) if device.isdigit() else device] = size
    return limits


def _refuse_absent_gpus(device_map: DeviceMap, limits: MaxMemory | None, *, num_gpus: int) -> None:
    named = {str(device) for device in (device_map.values() if isinstance(device_map, dict) else ())}
    named |= {str(device) for device in (limits or {})}
    for device in sorted(named):
        index = 0 if device == "cuda" else device.removeprefix("cuda:")
        if str(index).isdigit() and int(index) >= num_gpus:
            raise BackendError(
                f"GPU {index} is not here",
                expected=f"one of {num_gpus} GPUs" if num_gpus else "a CUDA GPU",
                found=f"torch {torch.__version__} sees {num_gpus}",
                next_step="Use --device-map auto or cpu.",
            )
