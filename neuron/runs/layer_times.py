"""LayerTimes: where the time of one layer goes, and what memory it takes at most."""

from __future__ import annotations

import dataclasses
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

    def __add__(self, other: LayerTimes) -> LayerTimes:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        names = [field.name for field in dataclasses.fields(self)]
        return LayerTimes(**dict(zip(names, (mine + theirs for mine, theirs in pairs), strict=True)))
