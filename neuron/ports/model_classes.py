"""ModelClasses: the class of each submodule of a whole port, and where another device gets another class.

Ports choose modules by the device that they are built for. Then a run on the CPU says nothing of the device's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

# Attribute of a port that holds its `ModelClasses`.
CLASSES = "classes"
_LAYERS, _FIRST_LAYER = "layers.", "layers.0"


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
        if path
        and (not path.startswith(_LAYERS) or path == _FIRST_LAYER or path.startswith(f"{_FIRST_LAYER}."))
    }
