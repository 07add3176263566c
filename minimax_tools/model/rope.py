"""The rotary embedding that a config.json describes: its width and theta, under all their names.

MiniMax writes `rotary_dim` and `rope_theta`. transformers 5 writes `rope_parameters` with `partial_rotary_factor` and
`rope_theta`; older versions wrote `rope_scaling`. mm2 computes plain RoPE: scaled kinds, such as yarn, are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minimax_tools.model.family import ConfigFault

logger = logging.getLogger(__name__)

_PARAMETERS = ("rope_parameters", "rope_scaling")
_PLAIN = "default"
_SCALED_STEP = (
    "mm2 computes plain RoPE only. Remove the scaling from a copy of config.json, and test the port without it: "
    "all other parts stay the same."
)
_CONTRADICTION_STEP = "Programs read either: keep the right one in a copy of config.json."


def read_rotary_dim(config: Mapping[str, Any], *, head_dim: int, default_factor: float = 1.0) -> int:
    """Return the number of dims of a head that are rotated, or their default share if config.json names none."""
    return int(next(iter(_stated_widths(config, head_dim).values()), head_dim * default_factor))


def warn_of_rotary_width(config: Mapping[str, Any], *, where: Path | str) -> None:
    """Log a warning if a config.json states no rotary width; it names the file `where`."""
    if config.get("rotary_dim") is None and not _stated(config, "partial_rotary_factor"):
        logger.warning(
            "%s names no rotary width (rotary_dim, partial_rotary_factor): all dims of each head are rotated. "
            "MiniMax-M2 rotates half of them: if this copy has lost the key, every number is another. Write it.",
            where,
        )


def read_rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of the rotary frequencies; raise KeyError if config.json names none."""
    thetas = _stated(config, "rope_theta")
    if not thetas:
        raise KeyError("rope_theta")
    return next(iter(thetas.values()))


def find_rope_faults(config: Mapping[str, Any], *, head_dim: int) -> list[ConfigFault]:
    """Find the keys that scale RoPE's frequencies, and those that contradict each other."""
    faults = [
        ConfigFault(key=key, expected=expected, found=found, next_step=_SCALED_STEP)
        for key, expected, found in _find_scaling(config)
    ]
    widths, thetas = _stated_widths(config, head_dim), _stated(config, "rope_theta")
    # Below one dim, two ways to write a width differ by rounding only.
    if widths and max(widths.values()) - min(widths.values()) >= 1:
        faults.append(_contradiction("rotary_dim", "one rotary width", widths))
    if len(set(thetas.values())) > 1:
        faults.append(_contradiction("rope_theta", "one base of the frequencies", thetas))
    return faults


def _find_scaling(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for parent in _PARAMETERS:
        parameters = config.get(parent)
        if not parameters:
            continue
        if not isinstance(parameters, Mapping):
            yield parent, "a JSON object", repr(parameters)
            continue
        # `type` is the older name.
        name = "rope_type" if parameters.get("rope_type") is not None else "type"
        kind = parameters.get(name) or _PLAIN
        if kind != _PLAIN:
            yield f"{parent}.{name}", repr(_PLAIN), repr(kind)
        elif parameters.get("factor", 1) not in (None, 1):
            yield f"{parent}.factor", "1", repr(parameters["factor"])
        for key, value in parameters.items():
            if isinstance(value, Mapping):
                yield f"{parent}.{key}", "one RoPE for all layers", "parameters of its own"


def _stated_widths(config: Mapping[str, Any], head_dim: int) -> dict[str, float]:
    """Return the rotary widths that config.json states, by key; MiniMax's own key first."""
    factors = _stated(config, "partial_rotary_factor")
    own = config.get("rotary_dim")
    return ({} if own is None else {"rotary_dim": float(own)}) | {
        key: head_dim * factor for key, factor in factors.items()
    }


def _stated(config: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the numbers that config.json states under `name`, by key with its parent."""
    values = {name: config.get(name)}
    for parent in _PARAMETERS:
        parameters = config.get(parent)
        if isinstance(parameters, Mapping):
            values[f"{parent}.{name}"] = parameters.get(name)
    return {key: float(value) for key, value in values.items() if value is not None}


def _contradiction(key: str, expected: str, stated: Mapping[str, float]) -> ConfigFault:
    found = ", ".join(f"{value:g} by {name}" for name, value in stated.items())
    return ConfigFault(key=key, expected=expected, found=found, next_step=_CONTRADICTION_STEP)
