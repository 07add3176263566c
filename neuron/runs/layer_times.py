"""LayerTimes: the time of one layer, by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Wall time of one layer, or the sum of several, in seconds.

    Args:
        read_s: Reading bytes from the disk or its cache.
        regroup_s: Making weights of these bytes: dequantising, converting dtypes, cutting, joining.
        transfer_s: Copying weights to the device.
        compile_s: Compiling graphs.
        run_s: The forward passes, without compiling.
        copy_back_s: Copying the results to the host.
    """

    read_s: float = 0.0
    regroup_s: float = 0.0
    transfer_s: float = 0.0
    compile_s: float = 0.0
    run_s: float = 0.0
    copy_back_s: float = 0.0

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
