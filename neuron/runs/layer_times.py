"""LayerTimes: the time of one layer, by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Wall time of one layer, or the sum of several, in seconds."""

    read_s: float = 0.0  # reading bytes from the disk or its cache
    regroup_s: float = 0.0  # making weights of these bytes: dequantising, converting dtypes, cutting, joining
    transfer_s: float = 0.0  # copying weights to the device
    compile_s: float = 0.0  # compiling graphs
    run_s: float = 0.0  # the forward passes, without compiling
    copy_back_s: float = 0.0  # copying the results to the host

    @property
    def total_s(self) -> float:
        """The sum of all phases."""
        return float(sum(dataclasses.astuple(self)))

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase, by its name in words, such as `copy back`."""
        return {
            name.removesuffix("_s").replace("_", " "): value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def combined(cls, times: Sequence[LayerTimes], combine: Callable[[list[float]], float]) -> LayerTimes:
        """Combine the times of several layers, phase by phase, by a function such as `sum`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: combine([getattr(layer, name) for layer in times]) for name in names})

    def __add__(self, other: LayerTimes) -> LayerTimes:
        return self.combined((self, other), sum)
