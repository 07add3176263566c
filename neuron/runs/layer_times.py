"""LayerTimes: where the time of one layer goes, and what memory it takes at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds by the clock, of one layer or of several together.

    Args:
        read_s: Bytes from the disk or its cache.
        regroup_s: Making them the port's weights: dequantised, cut, put together, converted.
        transfer_s: Weights on their way to the device.
        compile_s: Graphs compiled.
        run_s: The forward passes, compiling aside.
        copy_back_s: What they gave, on its way to the host.
    """

    read_s: float = 0.0
    regroup_s: float = 0.0
    transfer_s: float = 0.0
    compile_s: float = 0.0
    run_s: float = 0.0
    copy_back_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return float(sum(dataclasses.astuple(self)))

    def by_phase(self) -> dict[str, float]:
        """Seconds by the name of each phase in words, such as `copy back`."""
        return {
            name.removesuffix("_s").replace("_", " "): value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def combined(cls, times: Sequence[LayerTimes], how: Callable[[list[float]], float]) -> LayerTimes:
        """Of each phase what `how` makes of all its times."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: how([getattr(one, name) for one in times]) for name in names})

    def __add__(self, other: LayerTimes) -> LayerTimes:
        return self.combined((self, other), sum)
