"""ModelClasses: the class of each submodule as built here, and where the other device gets another.

Ports on NxDI choose modules by `cpu_mode()`. Then a run on the CPU says nothing of the device's class.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron.ports.nxdi import CPU_MODE_VARIABLE

logger = logging.getLogger(__name__)

_LAYERS = "layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelClasses:
    """Classes of the submodules of the first layer and around the layers, by path."""

    here: Mapping[str, str]
    # Class here and on the other device, where they differ; None if the module tree cannot be built for that here
    other: Mapping[str, tuple[str, str]] | None


def compare_classes(module: nn.Module, build_config: Callable[[], Any]) -> ModelClasses:
    """Compare a model's module with the same built for a device; `build_config` gives a config of one layer."""
    here = read_classes(module)
    try:
        with _for_device(), torch.device("meta"):
            there = read_classes(type(module)(build_config()))
    except Exception as error:  # the port's code, set up for a device that is not here
        logger.info("The module tree for the device cannot be built here: %s", error)
        return ModelClasses(here=here, other=None)
    differing = {
        path: (here.get(path, ""), there.get(path, ""))
        for path in dict.fromkeys((*here, *there))
        if here.get(path) != there.get(path)
    }
    return ModelClasses(here=here, other=differing)


def read_classes(module: nn.Module) -> dict[str, str]:
    """Return the class of each submodule by path, without those of later layers."""
    return {
        path: type(submodule).__name__
        for path, submodule in module.named_modules()
        if path and (not path.startswith(_LAYERS) or path.split(".")[1] == "0")
    }


@contextmanager
def _for_device() -> Iterator[None]:
    """Let NxD build modules for the block as it does for a device."""
    before = os.environ.get(CPU_MODE_VARIABLE)
    os.environ[CPU_MODE_VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(CPU_MODE_VARIABLE)
        if before is not None:
            os.environ[CPU_MODE_VARIABLE] = before
