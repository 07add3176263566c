"""A run of a port as a command carries it out: run the port or load a saved run, judge it, print, exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from compare.comparer import JudgedRun, judge_run
from compare.next_commands import after_comparison
from compare.run_report import report_run
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.further import ALSO
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.passes import Generation
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import RunCommands, judge_port_of
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.layer_faults import warn_of_rounded_router
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, leave_record, print_json, print_then_report, say
from minimax_tools.command_line.options import SUMMARY_JSON
from minimax_tools.errors import CaptureError, TargetError, UsageError, format_count
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.machine.size import format_size
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.span import word_layers
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Comparison
from minimax_tools.stored_dtype import dtype_name
from neuron.devices.runtime import open_runtime
from neuron.options import DeviceOptions, port_arguments
from neuron.ports.targets import find_target
from neuron.runs.device_request import DeviceRequest, read_inputs
from neuron.runs.layer_run import LayerTimes
from neuron.runs.run_profile import PROFILE_NAME, CaptureEffect, LayerProfile, RunProfile, RunReport
from neuron.runs.runner import DeviceRun
from reports.canvas import Canvas, Column, Row
from reports.captures import capture_record, render_capture
from reports.data import comparison_record, summary_record, to_json
from reports.terminal import render_comparison

# Names of the phases, which every `LayerTimes` has: read, regroup, transfer, compile, run, copy back.
_PHASES = tuple(LayerTimes().by_phase())
_COLUMNS = [
    Column(title=title)
    for title in ("layer", *(f"{phase}\n(s)" for phase in (*_PHASES, "total")), "host\npeak", "device\npeak")
]


def render_report(report: RunReport, *, trace: Path | None = None) -> str:
    """Return the report as text, for stdout; empty if there is nothing to report. `trace` is the profile's file."""
    canvas = Canvas()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A finished run."""

    capture: Capture
    report: RunReport | None  # None if a saved run was loaded
    generation: Generation | None  # the tokens that the run generated; None if it generates none
    comparison: Comparison | None  # None without a golden
    write_report: Callable[[], str] | None  # None if no report was asked for
    following: tuple[str, ...]  # commands to run next

    @property
    def exit_code(self) -> int:
        if self.comparison is not None:
            return self.comparison.verdict.exit_code
        failed = self.report is not None and self.report.generation_error is not None
        return TargetError.exit_code if failed else 0


def run_device(options: DeviceOptions, make_run: Callable[[ModelSpec], Run]) -> None:
    """Run the target or load its saved run, judge it if there is a golden, print, and end with the exit code.

    `make_run` returns the command's run for a model.
    """
    if options.as_json == SUMMARY_JSON and options.golden is None:
        raise UsageError(
            "--json=summary sums up a verdict, and nothing is judged without a golden",
            next_step="Give --golden, or --json alone.",
        )
    if options.report_path is not None and options.golden is None:
        raise UsageError(
            "--report-path is a report of a judged run, and nothing judges this one",
            next_step="Name the golden with --golden, or leave out --report-path.",
        )
    spec = ModelSpec.from_folder(resolve_config(options.model))
    run = make_run(spec).decoding(options.num_decoded)
    run.span.within(spec.num_hidden_layers)  # raises if the model lacks a layer
    golden = _open_golden(options.golden, run) if options.golden else None
    report = None
    if options.skip_compile:
        directory = options.store.saved(DEVICE_SIDE, run.name)
        _refuse_other_run(Capture.open(directory), run, options)
    else:
        with output_set_aside():
            report, directory = _run_port(options, spec, run, golden)
    capture = Capture.open(directory)
    judged: JudgedRun | None = None
    following: tuple[str, ...] = (judge_port_of(options.model, *port_arguments(options)),)
    if golden is not None:
        judged = judge_run(
            golden,
            capture,
            criteria=options.criteria,
            layer_pattern="layer_*",
            weights=CheckpointWeights(model=options.model),
        )
        following = after_comparison(judged.comparison, RunCommands.of(golden, capture, model=options.model))
    write = None
    if judged is not None and options.report_path is not None:
        write = partial(report_run, judged, options.report_path, next_commands=following)
    outcome = _Outcome(
        capture=capture,
        report=report,
        generation=capture.read_generation(),
        comparison=None if judged is None else judged.comparison,
        write_report=write,
        following=following,
    )
    if options.as_json:
        record = _summary(outcome) if options.as_json == SUMMARY_JSON else _record(outcome)
        print_json(record, next_commands=following)
        if write:
            write()
    else:
        _print_text(outcome, options)
    end_command(outcome.exit_code)


def _open_golden(directory: Path, run: Run) -> Capture:
    """Open the golden of a run. Its expert tokens have states of their own for each layer, which no chain gives."""
    golden = Capture.open(directory)
    return golden if run.mode is Mode.ISOLATED else golden.natural()


def build_request(
    options: DeviceOptions, spec: ModelSpec, run: Run, golden: Capture | None, *, folder: Path
) -> DeviceRequest:
    """Build the request of a run from a command's options; `folder` holds the checkpoint."""
    return DeviceRequest(
        folder=folder,
        spec=spec,
        model_source=options.model,
        run=run,
        inputs=read_inputs(options.inputs, folder, spec, golden),
        dtype=options.dtype,
        target=find_target(options.target),
        golden=golden,
        random_input=options.random_input,
        seed=options.inputs.seed,
        prefetch=options.prefetch,
        budget=MemoryBudget(options.memory_budget),
        checks_capture=options.check_capture,
        profiles=options.profile,
        max_new_tokens=options.max_new_tokens,
        further=options.further,
    )


def print_warnings(report: RunReport) -> None:
    """Print a run's warnings to stderr."""
    for warning in find_warnings(report):
        say(f"warning: {warning}", to_stderr=True)


def _run_port(
    options: DeviceOptions, spec: ModelSpec, run: Run, golden: Capture | None
) -> tuple[RunReport, Path]:
    layers = _read_layers(options, spec, run)
    folder = resolve_model(options.model, layers=layers)
    request = build_request(options, spec, run, golden, folder=folder)
    with (
        open_runtime(options.backend, compile_with=options.compile_with, ranks=options.ranks) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
        LayerProgress(request.num_layers, label="Device") as progress,
    ):
        warn_of_rounded_router(reader.index.entries, spec.graph)
        device_run = DeviceRun(request, runtime=runtime, reader=reader, progress=progress)
        directory = options.store.place_run(run.name, device_run.describe())
        report = device_run.capture(directory)
        if report.profile:
            RunProfile(
                backend=str(runtime.backend),
                spec_digest=spec.digest(),
                dtype=dtype_name(request.dtype),
                num_ranks=options.ranks.degree,
                num_decoded=run.num_decoded,
                batch_size=request.inputs.batch_size,
                sequence_length=request.inputs.sequence_length,
                layers=report.profile,
            ).write(directory)
        return report, directory


def _read_layers(options: DeviceOptions, spec: ModelSpec, run: Run) -> range | None:
    """Return the layers whose weights are read; None for all, so that no shard may be missing."""
    # Without a golden or random input, the layers before the span make its input.
    has_input = options.golden is not None or options.random_input
    layers = range(run.span.start if has_input else 0, run.span.stop)
    return None if len(layers) == spec.num_hidden_layers else layers


def _refuse_other_run(saved: Capture, run: Run, options: DeviceOptions) -> None:
    """Raise CaptureError if a saved run is another one: other layers, or other ranks, outputs or port where given."""
    found, provenance = saved.description.run, saved.description.provenance
    degree = provenance.options.get("tp_degree", 1)
    also, saved_also = (
        ", ".join(map(str, places)) for places in (options.further, provenance.options.get(ALSO, []))
    )
    # A default of mm2 or of the project says nothing about the saved run.
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    is_given = click.get_current_context().get_parameter_source("target") not in defaults
    names = ("span", "mode", "component", "num_decoded")
    is_another_run = any(getattr(found, name) != getattr(run, name) for name in names)
    has_other_ranks = options.ranks.are_several and options.ranks.degree != degree
    has_other_outputs = bool(also) and also != saved_also
    differences = (
        (is_another_run, "another run than --skip-compile asks for", "", run, found),
        (has_other_ranks, "a run of another number of ranks", "--tp-degree", options.ranks.degree, degree),
        (has_other_outputs, "a run with other further outputs", "--also", also, saved_also or "none"),
        (
            is_given and provenance.target != options.target,
            "a run of another port",
            "--target",
            options.target,
            provenance.target,
        ),
    )
    for differs, what, option, expected, there in differences:
        if differs:
            raise CaptureError(
                f"{saved.directory} holds {what}",
                expected=str(expected),
                found=str(there),
                next_step=f"Leave out {option} to show it, or --skip-compile to run it."
                if option
                else "Name its directory with --output-dir, or leave out --skip-compile.",
            )


def _summary(outcome: _Outcome) -> dict[str, Any]:
    assert outcome.comparison is not None, "a summary was refused without a golden"
    return {"directory": address_of(outcome.capture.directory), **summary_record(outcome.comparison)}


def _record(outcome: _Outcome) -> dict[str, Any]:
    record = capture_record(outcome.capture)
    record["graphs"] = asdict(outcome.report.compiles) if outcome.report else None
    if outcome.report is not None and outcome.report.effects is not None:
        record["capture_effects"] = to_json(outcome.report.effects)
    if outcome.generation is not None:
        record["generation"] = encode(outcome.generation)
    return record | (comparison_record(outcome.comparison) if outcome.comparison else {})


def _print_text(outcome: _Outcome, options: DeviceOptions) -> None:
    """Print the verdict first; without a golden, and with --verbose, what the capture holds."""
    comparison, report = outcome.comparison, outcome.report
    parts = []
    if comparison is None or options.is_verbose:
        parts.append(render_capture(outcome.capture))
    if outcome.generation is not None and (comparison is None or options.is_verbose):
        parts.append(str(outcome.generation))
        if comparison is None and any(len(row.generated_ids) > 1 for row in outcome.generation.rows):
            parts.append("Tokens are judged with --golden: one that generated, made by mm2-gpu full.")
    if report is not None:
        parts.append(render_report(report, trace=outcome.capture.directory / PROFILE_NAME))
    if comparison is not None:
        text = render_comparison(
            comparison,
            shows_metrics=options.shows_metrics,
            is_verbose=options.is_verbose,
            further=parts,
        )
    else:
        text = "\n\n".join(filter(None, parts))
    leave_record(lambda: _record(outcome), text, next_commands=outcome.following)
    print_then_report(text, outcome.write_report, next_commands=outcome.following)
    if report is not None:
        print_warnings(report)
