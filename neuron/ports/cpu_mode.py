"""Modes in which the CPU stands for the device, and the classes that a port chooses by them.

NxD and the vLLM Neuron plugin compute on the CPU if a variable says so. Ports choose modules by the device that they
are built for: `ModelClasses` tells what a run on the CPU says nothing of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from minimax_tools.errors import TargetError

NXD_CPU_MODE, VLLM_NEURON_CPU_MODE = "NXD_CPU_MODE", "VLLM_NEURON_CPU_MODE"
_VARIABLES = (NXD_CPU_MODE, VLLM_NEURON_CPU_MODE)
# Attribute of a port that holds its `ModelClasses`.
CLASSES = "classes"
# The number of a layer in the path of a submodule.
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


def is_cpu_mode() -> bool:
    """Decide whether the environment says that the CPU stands for the device."""
    return any(os.environ.get(name) == "1" for name in _VARIABLES)


@contextmanager
def for_the_device() -> Iterator[None]:
    """Let what is built in the block be built as for the device."""
    before = {name: value for name in _VARIABLES if (value := os.environ.get(name)) is not None}
    os.environ.update(dict.fromkeys(before, "0"))
    try:
        yield
    finally:
        os.environ.update(before)


def refuse_other_mode(variable: str, what: str, *, is_on_cpu: bool, is_cpu_mode: bool) -> None:
    """Raise TargetError unless a port runs where the library of `variable` was told; `what` says where it runs."""
    if is_on_cpu != is_cpu_mode:
        raise TargetError(
            f"{what}, which {variable} does not say",
            expected=f"{variable}={int(is_on_cpu)}",
            found=f"{variable}={int(is_cpu_mode)}",
            next_step=f"Set {variable}=1 for --backend cpu, and only there.",
        )


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


def _read(module: nn.Module) -> dict[str, str]:
    return {
        path: type(submodule).__name__
        for path, submodule in module.named_modules()
        if path and ((found := _LAYER.search(path)) is None or found[1] == "0")
    }
