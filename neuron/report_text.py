"""Report text of a run: compiled graphs, the effect of recording on the output, and times by phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from minimax_tools.errors import format_count
from minimax_tools.machine.size import format_size
from minimax_tools.model.span import word_layers
from neuron.runs.layer_run import LayerTimes
from neuron.runs.run_profile import CaptureEffect, LayerProfile, RunReport
from reports.canvas import Canvas, Column, Row

# Names of the phases, which every `LayerTimes` has: read, regroup, transfer, compile, run, copy back.
_PHASES = tuple(LayerTimes().by_phase())
_COLUMNS = [
    Column(title=title)
    for title in ("layer", *(f"{phase}\n(s)" for phase in (*_PHASES, "total")), "host\npeak", "device\npeak")
]


def render_report(report: RunReport, *, trace: Path | None = None) -> str:
    """Return the report as text, for stdout; empty if there is nothing to report. `trace` is the profile's file."""
    canvas = Canvas(width=None, is_terminal=None)
    compiles = report.compiles
    if compiles.first_layer or compiles.later_layers:
        by = f" by torch.compile for {compiles.compiler}" if compiles.compiler else ""
        canvas.line(
            f"graphs compiled{by}: {compiles.first_layer} for the first layer, {compiles.later_layers} after it"
        )
    if report.effects is not None and not _list_changed(report):
        num_checked = len(report.effects)
        # A resumed run checks only the layers that it runs itself.
        earlier = f"; the others of {report.num_layers} ran before" if num_checked < report.num_layers else ""
        canvas.line(
            f"recording the sites changes no bit of the output of {format_count(num_checked, 'layer')}{earlier}"
        )
    if report.profile:
        canvas.gap()
        canvas.table(_COLUMNS, _profile_rows(report.profile))
        canvas.line(f"  trace: {trace}")
    return canvas.text


def find_warnings(report: RunReport) -> Iterator[str]:
    """Yield warnings about a run, for stderr."""
    compiles = report.compiles
    if compiles.later_layers:
        yield "a graph depends on the layer: a number, a shape or a slice differs between layers"
    # A layer that breaks everywhere makes no graph either: its breaks tell that.
    if compiles.compiler and not (compiles.first_layer or compiles.later_layers or compiles.graph_breaks):
        yield "torch.compile made no graph, and layers ran as they are: is TORCHDYNAMO_DISABLE or such a variable set?"
    if compiles.recompiles:
        # All begin alike: a number that differs between layers, for instance.
        yield f"the first graph that did not serve a later layer was made for {compiles.recompiles[0]}"
    for graph_break in compiles.graph_breaks:
        yield f"the graph breaks at {graph_break}: this line runs uncompiled; in a loop, its whole function does"
    for operation in compiles.fallbacks:
        yield f"{operation} ran on the CPU instead of the device"
    if report.generation_error is not None:
        yield f"no token was generated: {report.generation_error}"
    if changed := _list_changed(report):
        yield _word_effects(changed)


def _list_changed(report: RunReport) -> list[CaptureEffect]:
    return [effect for effect in report.effects or () if effect.num_changed]


def _word_effects(changed: list[CaptureEffect]) -> str:
    worst = max(changed, key=lambda effect: effect.num_changed)
    return (
        f"recording the sites changes the output of {word_layers([effect.layer for effect in changed])}: of layer "
        f"{worst.layer} {worst.num_changed} of {worst.num_values} values, by at most {worst.max_abs_diff:.3g}"
    )


def _profile_rows(profiles: Sequence[LayerProfile]) -> list[Row]:
    rows = [_profile_row(str(profile.layer), [profile]) for profile in profiles]
    if len(profiles) > 1:
        rows.append(_profile_row("all", profiles))
    return rows


def _profile_row(name: str, profiles: Sequence[LayerProfile]) -> Row:
    """Return the row of one or more layers: the sum of their times, and the highest of their peaks."""
    times = sum((profile.times for profile in profiles), LayerTimes())
    seconds = [f"{value:.2f}" for value in (*times.by_phase().values(), times.total_s)]
    host_peak = max(profile.peak_host_bytes for profile in profiles)
    device_peaks = [
        profile.peak_device_bytes for profile in profiles if profile.peak_device_bytes is not None
    ]
    device_peak = format_size(max(device_peaks)) if device_peaks else "-"
    return Row(cells=(name, *seconds, format_size(host_peak), device_peak))
