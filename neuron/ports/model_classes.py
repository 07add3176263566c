"""ModelClasses: the class of each submodule of a whole port, and where another device gets another class.

Ports choose modules by the device that they are built for. Then a run on the CPU says nothing of the device's class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

# Attribute of a port that holds its `ModelClasses`.
CLASSES = "classes"
# Variables by which the CPU stands for the device, in NxD and in the vLLM Neuron plugin.
_CPU_MODES = ("NXD_CPU_MODE", "VLLM_NEURON_CPU_MODE")
# The number of a layer in the path of a submodule.
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelClasses:
    """Classes of the submodules of the first layer and around the layers, by path; a missing submodule has none, ''."""

    here: Mapping[str, str]
    # Class here and on the other device, where they differ; None if the module tree cannot be built for it here
    other: Mapping[str, tuple[str, str]] | None

    @classmethod
    def compare(cls, here: nn.Module, there: nn.Module | None) -> ModelClasses:
        """Compare a model's module with the same built for the other device; None if it cannot be built."""
        own = _read(here)
        if there is None:
            return cls(here=own, other=None)
        others = _read(there)
        return cls(
            here=own,
            other={
                path: (own.get(path, ""), others.get(path, ""))
                for path in dict.fromkeys((*own, *others))
                if own.get(path) != others.get(path)
            },
        )


def is_cpu_mode() -> bool:
    """Decide whether the environment says that the CPU stands for the device."""
    return any(os.environ.get(name) == "1" for name in _CPU_MODES)


@contextmanager
def for_the_device() -> Iterator[None]:
    """Let what is built in the block be built as for the device, without memory."""
    before = {name: value for name in _CPU_MODES if (value := os.environ.get(name)) is not None}
    os.environ.update(dict.fromkeys(before, "0"))
    try:
        with torch.device("meta"):
            yield
    finally:
        os.environ.update(before)


def _read(module: nn.Module) -> dict[str, str]:
    return {
        path: type(submodule).__name__
        for path, submodule in module.named_modules()
        if path and ((found := _LAYER.search(path)) is None or found[1] == "0")
    }
