"""RunReport: facts about a finished run that its capture does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neuron.devices.compile_counts import CompileCounts, GraphBreak
from neuron.runs.layer_times import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """Graphs that a run compiled."""

    first_layer: int  # number of graphs compiled for the first layer that ran
    later_layers: int  # number of graphs compiled after it; 0 if all layers share their graphs
    fallbacks: tuple[str, ...]  # operations that ran on the CPU instead of the device
    compiler: str | None = (
        None  # backend of torch.compile; None if each layer ran as it is, or XLA made the graphs
    )
    graph_breaks: tuple[GraphBreak, ...] = ()  # breaks of the graphs that torch.compile made
    # Conditions of the first layer's graphs that later layers did not meet, each of which made a graph anew.
    recompiles: tuple[str, ...] = ()

    @classmethod
    def of(cls, counts: Sequence[CompileCounts], *, compiler: str | None = None) -> CompileReport:
        """Build the report from counts: one before the first layer that ran, and one after each."""
        before, end = counts[0], counts[-1]
        # A resumed run may have run no layer.
        after_first = counts[1] if len(counts) > 1 else before
        of_run, of_later_layers = end.since(before), end.since(after_first)
        return cls(
            first_layer=after_first.since(before).compiles,
            later_layers=of_later_layers.compiles,
            fallbacks=tuple(sorted(of_run.fallbacks)),
            compiler=compiler if len(counts) > 1 else None,
            graph_breaks=tuple(of_run.graph_breaks),
            recompiles=tuple(of_later_layers.recompiles),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEffect:
    """Effect of recording its sites on a layer's output."""

    layer: int
    num_changed: int  # number of output values that differ when nothing is recorded; NaN equals NaN
    num_values: int
    max_abs_diff: float  # the largest difference; NaN where only one of two values is NaN

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
    """Time and memory of one layer of a run."""

    layer: int
    started_s: float  # the layer's start, in seconds since the run's start
    times: LayerTimes
    # Peak of this process's anonymous memory since the layer before ended; of the first, since the run's start.
    peak_host_bytes: int
    # Peak of the device's memory since the process began, so never below an earlier layer's; None if unknown.
    peak_device_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Facts about a finished run."""

    compiles: CompileReport
    effects: tuple[CaptureEffect, ...] | None = None  # effects of recording, by layer; None unless asked for
    profile: tuple[LayerProfile, ...] | None = None  # time and memory, by layer; None unless asked for
    # Number of layers, those of an earlier attempt included; effects and profile lack the latter.
    num_layers: int = 0
    generation_error: str | None = None  # why no token was generated; None if nothing failed
