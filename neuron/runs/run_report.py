"""RunReport: what a run tells of itself beside its capture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuron.devices.runtime import CompileCounts
from neuron.runs.layer_times import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """Graphs that the first layer to run compiled, those of the later ones, and what fell back to the CPU."""

    first_layer: int
    later_layers: int
    fallbacks: tuple[str, ...]

    @classmethod
    def of(cls, counts: Sequence[CompileCounts]) -> CompileReport:
        """What was compiled between counts: one from before the first layer that ran, and one after each."""
        start, first, last = counts[0], counts[min(1, len(counts) - 1)], counts[-1]
        return cls(
            first_layer=first.since(start).compiles,
            later_layers=last.since(first).compiles,
            fallbacks=tuple(sorted(last.since(start).fallbacks)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEffect:
    """Whether recording its sites changes what a layer gives.

    Args:
        layer: The layer.
        num_changed: Values of its output that have other bits when nothing is recorded.
        num_values: Values of its output.
        max_abs_diff: The largest difference; NaN where one side alone is.
    """

    layer: int
    num_changed: int
    num_values: int
    max_abs_diff: float

    @classmethod
    def between(cls, layer: int, recorded: torch.Tensor, bare: torch.Tensor) -> CaptureEffect:
        """The difference of two outputs of one shape: with its sites recorded, and without."""
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
    """What one layer of a run took.

    Args:
        layer: The layer.
        started_s: When it began, in seconds since the run did.
        times: Where its time went.
        peak_host_bytes: The most anonymous memory that this process held meanwhile.
        peak_device_bytes: The most that the device held; None where it does not tell.
    """

    layer: int
    started_s: float
    times: LayerTimes
    peak_host_bytes: int
    peak_device_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run tells of itself.

    Args:
        compiles: Its graphs.
        effects: What recording changes, by layer; None where it was not asked for.
        profile: What each layer took; None where it was not asked for.
        num_layers: How many the run has; of those that an earlier attempt ran, effects and profile know nothing.
        generation_error: Why no token was generated that was asked for; None where nothing failed.
    """

    compiles: CompileReport
    effects: tuple[CaptureEffect, ...] | None = None
    profile: tuple[LayerProfile, ...] | None = None
    num_layers: int = 0
    generation_error: str | None = None
