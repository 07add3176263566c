"""Times and memory of a run's layers, as a trace that Perfetto opens, and further facts about a finished run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import torch

from minimax_tools.errors import CaptureError, shorten
from minimax_tools.json_codec import decode, decode_fields, encode, encode_fields
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.machine.memory_tracker import MemoryTracker
from neuron.devices.compiler import CompileCounts, GraphBreak
from neuron.devices.runtime import Runtime
from neuron.runs.layer_run import LayerTimes


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


PROFILE_NAME = "profile.json"
# More than any run has: a damaged file may give any number.
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProfile:
    """Time and memory of every layer of a run."""

    backend: str
    spec_digest: str
    dtype: str
    num_ranks: int  # number of ranks that shared each layer
    num_decoded: int  # number of tokens of each prompt that ran one at a time, after the others
    batch_size: int  # number of prompts
    sequence_length: int  # tokens of each prompt, padding included
    layers: tuple[LayerProfile, ...]  # the layers, in the order in which they ran

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length"):
            if not 1 <= getattr(self, name) <= _MOST_TOKENS:
                raise ValueError(f"{name} is {shorten(str(getattr(self, name)))}")

    @property
    def median_times(self) -> LayerTimes:
        """The median time of each phase, without compiling."""
        times = LayerTimes.combined([profile.times for profile in self.layers], median_high)
        return dataclasses.replace(times, compile_s=0.0)

    def verify(self, *, spec_digest: str, dtype: str, backend: str | None) -> None:
        """Check that the profile can estimate other lengths for one rank of this model, dtype and backend.

        None for `backend` stands for no backend that works here, and fits any profile.
        """
        pairs = (
            ("another model", spec_digest, self.spec_digest),
            ("another dtype", dtype, self.dtype),
            ("another backend", backend, self.backend),
            ("several ranks", 1, self.num_ranks),
            ("a run that decodes", 0, self.num_decoded),
        )
        for difference, expected, found in pairs:
            if expected is not None and expected != found:
                raise CaptureError(
                    f"the profile is of {difference}",
                    expected=str(expected),
                    found=str(found),
                    next_step="Run with --profile what the check is asked about, on this machine.",
                )

    def write(self, directory: Path) -> Path:
        """Write the trace into `directory`, and return its path."""
        path = directory / PROFILE_NAME
        record = {"traceEvents": list(self._events()), "displayTimeUnit": "ms", **encode(_Trace(mm2=self))}
        with whole_file(path) as file:
            json.dump(record, file)
        return path

    @classmethod
    def read(cls, directory: Path) -> RunProfile:
        """Read the profile beside the capture in `directory`."""
        path = directory / PROFILE_NAME
        try:
            profile = decode(_Trace, read_own_json(path)).mm2
            if not profile.layers:
                raise ValueError("no layer ran")
            return profile
        except (OSError, ValueError) as error:
            raise CaptureError(
                f"{directory} holds no profile that can be read",
                found=f"{type(error).__name__}: {error}",
                next_step="Run with --profile, and name the directory that it prints.",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the profile as a trace holds it."""
        return encode_fields(self, num_decoded="decode_rows")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunProfile:
        """Return the profile of a trace."""
        return decode_fields(cls, record, num_decoded="decode_rows")

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield events of the trace: one for each layer, and then the layer's phases, one after the other."""
        for profile in self.layers:
            start_s = profile.started_s
            memory = {
                "peak_host_bytes": profile.peak_host_bytes,
                "peak_device_bytes": profile.peak_device_bytes,
            }
            yield _event(f"layer {profile.layer}", start_s, profile.times.total_s, memory)
            for phase, seconds in profile.times.by_phase().items():
                yield _event(phase, start_s, seconds, {"layer": profile.layer})
                start_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trace:
    """The key of a trace that is mm2's own; a trace viewer ignores it."""

    mm2: RunProfile


class Profiler:
    """A record of the layers' time and memory. A context manager: a thread samples the memory during its block."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tracker = MemoryTracker()
        self._began_s = time.perf_counter()
        self.layers: list[LayerProfile] = []

    def __enter__(self) -> Profiler:
        self._tracker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._tracker.stop()

    def add(self, layer: int, started_s: float, times: LayerTimes) -> None:
        """Add a layer that ended now, and began at `started_s` of `time.perf_counter`."""
        snapshot = self._tracker.snapshot(f"layer {layer}")
        self.layers.append(
            LayerProfile(
                layer=layer,
                started_s=started_s - self._began_s,
                times=times,
                peak_host_bytes=snapshot.peak_anonymous_bytes,
                peak_device_bytes=self._runtime.peak_memory_bytes(),
            )
        )


def _event(name: str, start_s: float, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """Build an event of Chrome's trace format: `X` is an event with a duration, and times are in microseconds."""
    times = {"ts": start_s * 1e6, "dur": seconds * 1e6}
    return {"name": name, "ph": "X", **times, "pid": 0, "tid": 0, "args": arguments}
