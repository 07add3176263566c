"""The devices that hold the parts of the golden model, in accelerate's terms."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from minimax_tools.errors import BackendError, UsageError, format_count, list_names, shorten
from minimax_tools.machine.json_file import parse_json, read_json
from minimax_tools.machine.size import parse_size
from minimax_tools.model.span import word_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
_DEVICE = re.compile(r"cpu|disk|cuda(:\d+)?|\d+")
_LAYER = re.compile(r"model\.layers\.(\d+)")
# Share of the CPU's free memory for weights; converting them takes the rest.
_CPU_SHARE = 0.9

DeviceMap = str | dict[str, int | str]
MaxMemory = Mapping[int | str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The devices and limits of the golden model."""

    device_map: DeviceMap  # a strategy of accelerate, or a map from module names to devices
    max_memory: MaxMemory | None = None  # limit per device in bytes; None for what is free
    offload_folder: Path | None = None  # folder of modules that fit nowhere else

    @property
    def is_by_hand(self) -> bool:
        """True if the user divided the model by a map, or offloads a part; a map to one device does neither."""
        if self.offload_folder is not None:
            return True
        return isinstance(self.device_map, dict) and (
            set(self.device_map) != {""} or self.device_map[""] == "disk"
        )

    def loading_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `from_pretrained`."""
        arguments: dict[str, Any] = {"device_map": self.device_map}
        if self.max_memory is not None:
            # accelerate writes into it, so it gets a copy.
            arguments["max_memory"] = dict(self.max_memory)
        if self.offload_folder is not None:
            arguments["offload_folder"] = str(self.offload_folder)
        return arguments


def parse_placement(device_map: str, *, max_memory: str | None, offload_folder: Path | None) -> Placement:
    """Read `--device-map`, `--max-memory` and `--offload-folder`.

    A single size for `--max-memory` limits each GPU; the CPU gets most of its free memory. Without a GPU, a single size
    limits the CPU, and every strategy means the CPU, unless limits ask for a split with the disk.

    Raises:
        UsageError: A value cannot be read, or has no effect.
        BackendError: A GPU is named that is not here.
    """
    num_gpus = torch.cuda.device_count()
    limits = _parse_max_memory(max_memory, num_gpus=num_gpus) if max_memory else None
    parsed_map = _parse_device_map(device_map)
    is_strategy = isinstance(parsed_map, str)
    if limits is not None and not is_strategy:
        raise UsageError(
            f"--max-memory has no effect with --device-map {device_map}",
            next_step=f"Leave it out, or use one of {', '.join(_STRATEGIES)}.",
        )
    _refuse_absent_gpus(parsed_map, limits, num_gpus=num_gpus)
    if num_gpus == 0:
        logger.info("No GPU here: the golden runs on the CPU.")
        if is_strategy and limits is None:
            parsed_map = {"": "cpu"}
    return Placement(device_map=parsed_map, max_memory=limits, offload_folder=offload_folder)


def verify_device_map(device_map: DeviceMap, model: torch.nn.Module) -> None:
    """Verify that a map names modules of `model`, and covers all of its weights.

    Raises:
        UsageError: The map does not. transformers would silently put the other weights on the CPU.
    """
    if isinstance(device_map, str):
        return
    modules = dict(model.named_modules())
    unknown = [name for name in device_map if name not in modules]
    if unknown:
        raise UsageError(
            f"--device-map names modules that the model does not have: {', '.join(unknown)}",
            expected="names like model.embed_tokens, model.layers.0, model.norm, lm_head",
        )
    prefixes = tuple(f"{name}." if name else "" for name in device_map)
    left_out = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    if left_out:
        raise UsageError(
            f"--device-map gives no device for {list_names(left_out, most=1)}",
            next_step='Name every module, or {"": "cpu"} for the whole model.',
        )


def describe_placement(model: PreTrainedModel) -> list[str]:
    """Return a line per device: its modules and, for a GPU, name, size and memory in use."""
    names_on: dict[str, list[str]] = {}
    for name, device in _device_map(model).items():
        names_on.setdefault(device, []).append(name)
    lines = []
    for device, names in sorted(names_on.items()):
        modules = _describe_modules(names)
        if device.startswith("cuda"):
            properties = torch.cuda.get_device_properties(device)
            used, total = torch.cuda.memory_allocated(device), properties.total_memory
            lines.append(
                f"{device} {properties.name}, {total / 1e9:.1f} GB: {modules}; {used / 1e9:.1f} GB in use"
            )
        else:
            lines.append(f"{device}: {modules}")
    return lines


def describe_devices(model: PreTrainedModel) -> tuple[str, str]:
    """Return the backend that computes, `cuda` or `cpu`, and its devices in words."""
    gpus = sorted({device for device in _device_map(model).values() if device.startswith("cuda")})
    if not gpus:
        return "cpu", "cpu"
    names = [torch.cuda.get_device_name(device) for device in gpus]
    return "cuda", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device that takes the model's token ids: that of the embedding.

    The embedding is on the meta device if it is streamed or offloaded. A streamed model runs on one device. To an
    offloaded embedding, accelerate moves the ids from the CPU.
    """
    device = model.get_submodule("model.embed_tokens").get_parameter("weight").device
    if device.type != "meta":
        return device
    # Without an entry for the whole model, parts of it are offloaded.
    whole_model_device = _device_map(model).get("", "disk")
    return torch.device("cpu" if whole_model_device == "disk" else whole_model_device)


@contextmanager
def watched_memory() -> Iterator[None]:
    """Translate a GPU's out-of-memory error within the block.

    Raises:
        BackendError: A GPU ran out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BackendError(
            "a GPU ran out of memory",
            found=str(error).partition(". ")[0],
            next_step="Lower --max-memory so that activations fit beside the weights, or give fewer tokens.",
        ) from error


def _device_map(model: PreTrainedModel) -> dict[str, str]:
    """Return each module's device, `cuda:N`, `cpu` or `disk`; the empty name is the whole model."""
    devices: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {"": model.device}
    return {name: _full_device_name(str(device)) for name, device in devices.items()}


def _full_device_name(device: str) -> str:
    if device.isdigit():
        return f"cuda:{device}"
    return "cuda:0" if device == "cuda" else device


def _describe_modules(names: list[str]) -> str:
    if names == [""]:
        return "the whole model"
    layers = [int(match[1]) for name in names if (match := _LAYER.fullmatch(name))]
    others = [name.removeprefix("model.") for name in names if not _LAYER.fullmatch(name)]
    return ", ".join([word_layers(layers), *others] if layers else others)


def _parse_device_map(text: str) -> DeviceMap:
    if text in _STRATEGIES:
        return text
    if text == "cpu" or re.fullmatch(r"cuda(:\d+)?", text):
        return {"": text}
    try:
        mapping = read_json(Path(text)) if text.endswith(".json") else parse_json(text)
        if not isinstance(mapping, dict) or not mapping or not all(map(_is_device, mapping.values())):
            raise ValueError("no object of modules and devices")
    except (OSError, ValueError) as error:
        choices = ", ".join((*_STRATEGIES, "cpu", "cuda:N"))
        raise UsageError(
            f"--device-map {shorten(repr(text))} cannot be read",
            expected=f'{choices}, or JSON that maps modules to such devices, GPU numbers or "disk"',
            found=str(error),
        ) from error
    return mapping


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, int)) and _DEVICE.fullmatch(str(value)) is not None


def _parse_max_memory(text: str, *, num_gpus: int) -> MaxMemory:
    limits: dict[int | str, int] = {}
    size_bytes = _size_bytes(text)
    if size_bytes is not None:
        limits |= dict.fromkeys(range(num_gpus), size_bytes)
        limits["cpu"] = int(psutil.virtual_memory().available * _CPU_SHARE) if num_gpus else size_bytes
        return limits
    for part in text.split(","):
        device, _, size_text = (word.strip() for word in part.partition(":"))
        size_bytes = _size_bytes(size_text)
        if not (device.isdigit() or device == "cpu") or size_bytes is None:
            raise UsageError(
                f"--max-memory {text!r} cannot be read at {part!r}",
                expected="40GB, or 0:40GB,1:60GB,cpu:100GB",
            )
        limits[int(device) if device.isdigit() else device] = size_bytes
    return limits


def _size_bytes(text: str) -> int | None:
    try:
        return parse_size(text)
    except ValueError:
        return None


def _refuse_absent_gpus(device_map: DeviceMap, limits: MaxMemory | None, *, num_gpus: int) -> None:
    named = {str(device) for device in (device_map.values() if isinstance(device_map, dict) else ())}
    named |= {str(device) for device in (limits or {})}
    for device in sorted(named):
        index = "0" if device == "cuda" else device.removeprefix("cuda:")
        if index.isdigit() and int(index) >= num_gpus:
            raise BackendError(
                f"GPU {index} is not here",
                expected=f"one of {format_count(num_gpus, 'GPU')}" if num_gpus else "a CUDA GPU",
                found=f"torch {torch.__version__} sees {num_gpus}",
                next_step="Use --device-map auto or cpu.",
            )
