"""The quantisation that a checkpoint names: none, or FP8 in blocks with dynamic activations, as in the originals.

Other formats are refused by name before any shard is opened: from config.json, or from the file beside it in which a
tool names its format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minimax_tools.errors import UnsupportedModelError
from minimax_tools.machine.json_file import read_json
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import ConfigFault

BLOCK_SIZE = 128  # rows and columns of a weight that share a scale

_KEY = "quantization_config"
# Keys of formats that do not write `quantization_config`, or write it without a method beside their own key.
_OTHER_KEYS = {"quantization": "MLX", "compression_config": "compressed-tensors"}
# Keys that tell more of a format.
_DETAILS = ("format", "quant_algo", "mode", "bits", "group_size")
_SIDE_DETAILS = ("quant_method", "weight_format", "method", "profile", *_DETAILS, "w_bit", "q_group_size")
# Files in which tools name the format of the weights: hf_quant_config.json (ModelOpt), jang_config.json, and so on.
_SIDE_FILE = re.compile(r"(?i).*(quant|jang|awq|gptq|exl[23]|hqq).*\.json")
_SIDE_TOOLS = {"hf_quant_config.json": "ModelOpt", "jang_config.json": "JANG", "quantize_config.json": "GPTQ"}
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "activation_scheme": ("dynamic",),
    "fmt": ("float8_e4m3fn", "e4m3"),
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
}
_EXPECTED = f"weights in BF16, FP16 or float32, or in FP8 with blocks of {BLOCK_SIZE} × {BLOCK_SIZE}"


def scale_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [R,C]: one per block, ragged blocks included."""
    return tuple(-(-size // BLOCK_SIZE) for size in weight_shape)


def original_step(config: Mapping[str, Any]) -> str:
    """Return the next step where a checkpoint has weights in another format: the models that mm2 reads."""
    family = FAMILIES.get(str(config.get("model_type")))
    originals = "" if family is None else f" ({family.originals})"
    return f"Use the original{originals}, or a BF16 copy of it."


def find_quantisation_faults(config: Mapping[str, Any]) -> list[ConfigFault]:
    """Find the keys of a config.json that name another quantisation than FP8 in blocks."""
    other = find_other_format(config)
    if other is not None:
        return [other]
    next_step = original_step(config)
    return [
        ConfigFault(key=f"{_KEY}.{name}", expected=expected, found=found, next_step=next_step)
        for name, expected, found in _find_other_fp8(config.get(_KEY) or {})
    ]


def find_other_format(config: Mapping[str, Any]) -> ConfigFault | None:
    """Find the key of any model's config.json that names another quantisation than FP8; None if there is none."""
    for key, format_name in _OTHER_KEYS.items():
        if config.get(key):
            return _other_format(config, key, f"the format of {format_name}{_describe(config[key])}")
    stored = config.get(_KEY)
    if stored is None:
        return None
    if not isinstance(stored, Mapping):
        return _other_format(config, _KEY, repr(stored))
    method = stored.get("quant_method")
    if method == "fp8":
        return None
    return _other_format(
        config, _KEY, (f"quant_method {method!r}" if method else "no quant_method") + _describe(stored)
    )


def find_side_format(folder: Path, config: Mapping[str, Any]) -> tuple[Path, str] | None:
    """Find the file of a folder that names the format of its weights, and the format; None if config.json names one."""
    if any(config.get(key) for key in (_KEY, *_OTHER_KEYS)):
        return None
    for path in sorted(folder.glob("*.json")):
        if _SIDE_FILE.fullmatch(path.name) and not path.name.endswith(".index.json"):
            stored = _read_side_file(path)
            inner = stored.get("quantization", {})
            # ModelOpt writes null if the cache of keys and values alone is quantised.
            if isinstance(inner, Mapping) and inner.get("quant_algo", "") is None:
                continue
            tool = _SIDE_TOOLS.get(path.name, "quantised weights")
            return path, f"{tool}{_describe(stored, _SIDE_DETAILS)}{_describe(inner, _SIDE_DETAILS)}"
    return None


def refuse_side_format(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError if a file of the folder names the format of its weights, and config.json none."""
    found = find_side_format(folder, config)
    if found is not None:
        raise UnsupportedModelError(
            f"{found[0]} names the format of the weights, which config.json does not",
            expected=_EXPECTED,
            found=found[1],
            next_step=f"{original_step(config)} If the shards hold such weights all the same, as a dequantised copy "
            "does, remove the file from a copy.",
        )


def _read_side_file(path: Path) -> Mapping[str, Any]:
    """Read a file that names a format; {} if it holds no JSON object."""
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, Mapping) else {}


def _find_other_fp8(stored: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    blocks = [BLOCK_SIZE, BLOCK_SIZE]
    size = stored.get("weight_block_size", blocks)
    if size != blocks:
        yield "weight_block_size", repr(blocks), "null: no blocks" if size is None else repr(size)
    for name, known in _DEFAULTS.items():
        value = stored.get(name)
        if value is not None and value not in known:
            yield name, " or ".join(map(repr, known)), repr(value)


def _other_format(config: Mapping[str, Any], key: str, found: str) -> ConfigFault:
    return ConfigFault(key=key, expected=_EXPECTED, found=found, next_step=original_step(config))


def _describe(stored: object, names: Sequence[str] = _DETAILS) -> str:
    """Return the details of a format, such as ", bits 4, group_size 64"."""
    if not isinstance(stored, Mapping):
        return ""
    details = [(name, stored[name]) for name in names if isinstance(stored.get(name), str | int)]
    return "".join(f", {name} {value}" for name, value in details)
