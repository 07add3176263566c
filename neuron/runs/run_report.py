"""RunReport: facts about a finished run that its capture does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuron.devices.runtime import CompileCounts
from neuron.runs.layer_times import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """Numbers of graphs compiled for the first layer that ran and for the later ones; operations run on the CPU."""

    first_layer: int
    later_layers: int
    fallbacks: tuple[str, ...]

    @classmethod
    def of(cls, counts: Sequence[CompileCounts]) -> CompileReport:
        """Build the report from counts: one before the first layer that ran, and one after each."""
        start, first, last = counts[0], counts[min(1, len(counts) - 1)], counts[-1]
        return cls(
            first_layer=first.since(start).compiles,
            later_layers=last.since(first).compiles,
            fallbacks=tuple(sorted(last.since(start).fallbacks)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEffect:
    """Effect of recording its sites on a layer's output.

    Args:
        num_changed: Number of output values with other bits when nothing is recorded.
        max_abs_diff: The largest difference; NaN where only one of two values is NaN.
    """

    layer: int
    num_changed: int
    num_values: int
    max_abs_diff: float

    @classmethod
    def between(cls, layer: int, recorded: torch.Tensor, bare: torch.Tensor) -> CaptureEffect:
        """Compare two outputs of one shape: with the sites recorded, and without."""
        differs = (recorded != bare) & ~(recorded.isnan() & bare.isnan())
        difference = (recorded[differs].double() - bare[differs].double()).abs()
        return cls(
            layer=layer,
            num_changed=int(differs.sum()),
            num_values=recorded.numel(),
            max_abs_diff=float(difference.max()) if difference.numel() else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Time and memory of one layer of a run.

    Args:
        started_s: Its start, in seconds since that of the run.
        peak_host_bytes: Peak of this process's anonymous memory meanwhile.
        peak_device_bytes: Peak of the device's memory; None where it is unknown.
    """

    layer: int
    started_s: float
    times: LayerTimes
    peak_host_bytes: int
    peak_device_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Facts about a finished run.

    Args:
        effects: Effects of recording, by layer; None unless asked for.
        profile: Time and memory, by layer; None unless asked for.
        num_layers: Number of layers, those of an earlier attempt included, of which effects and profile know nothing.
        generation_error: Why no token was generated; None where nothing failed.
    """

    compiles: CompileReport
    effects: tuple[CaptureEffect, ...] | None = None
    profile: tuple[LayerProfile, ...] | None = None
    num_layers: int = 0
    generation_error: str | None = None
