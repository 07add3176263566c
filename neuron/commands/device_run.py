"""A run of a port as a command carries it out: run the port or load a saved run, judge it, print, exit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from compare.comparer import JudgedRun, judge_run
from compare.next_commands import after_comparison
from compare.run_report import print_then_report, report_run
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.further import ALSO
from minimax_tools.capture.passes import Generation
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import RunCommands, judge_port_of
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.layer_faults import warn_of_rounded_router
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, print_json, say
from minimax_tools.command_line.options import SUMMARY_JSON
from minimax_tools.errors import CaptureError, TargetError, UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Comparison
from neuron.devices.runtime import open_runtime
from neuron.options import DeviceOptions, port_arguments
from neuron.ports.targets import find_target
from neuron.report_text import find_warnings, render_report
from neuron.runs.device_request import DeviceRequest
from neuron.runs.golden_inputs import read_inputs
from neuron.runs.run_profile import PROFILE_NAME, RunProfile, RunReport
from neuron.runs.runner import DeviceRun
from reports.captures import capture_record, render_capture
from reports.data import comparison_record, summary_record, to_json
from reports.folder import WrittenReport
from reports.terminal import render_comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A finished run."""

    capture: Capture
    report: RunReport | None  # None if a saved run was loaded
    generation: Generation | None  # the tokens that the run generated; None if it generates none
    comparison: Comparison | None  # None without a golden
    write_report: Callable[[], WrittenReport] | None  # None if no report was asked for
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
        _print_summary(outcome) if options.as_json == SUMMARY_JSON else _print_record(outcome)
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
    """Run the port; return the report, and the directory of the capture."""
    layers = _read_layers(options, spec, run)
    folder = resolve_model(options.model, layers=layers)
    request = build_request(options, spec, run, golden, folder=folder)
    with (
        open_runtime(options.backend, compile_with=options.compile_with, ranks=options.ranks) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
        LayerProgress(request.num_layers, label="Device") as progress,
    ):
        warn_of_rounded_router(reader.index.entries)
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
    if any(
        getattr(found, name) != getattr(run, name) for name in ("span", "mode", "component", "num_decoded")
    ):
        raise CaptureError(
            f"{saved.directory} holds another run than --skip-compile asks for",
            expected=str(run),
            found=str(found),
            next_step="Name its directory with --output-dir, or leave out --skip-compile.",
        )
    degree, saved_degree = options.ranks.degree, provenance.options.get("tp_degree", 1)
    if options.ranks.are_several and degree != saved_degree:
        raise CaptureError(
            f"{saved.directory} holds a run of another number of ranks",
            expected=str(degree),
            found=str(saved_degree),
            next_step="Leave out --tp-degree to show it, or --skip-compile to run with it.",
        )
    if options.further and list(map(str, options.further)) != provenance.options.get(ALSO, []):
        raise CaptureError(
            f"{saved.directory} holds a run with other further outputs",
            expected=", ".join(map(str, options.further)),
            found=", ".join(provenance.options.get(ALSO, [])) or "none",
            next_step="Leave out --also to show it, or --skip-compile to run with it.",
        )
    # A default of mm2 or of the project says nothing about the saved run.
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    is_given = click.get_current_context().get_parameter_source("target") not in defaults
    if is_given and provenance.target != options.target:
        raise CaptureError(
            f"{saved.directory} holds a run of another port",
            expected=options.target,
            found=provenance.target,
            next_step="Leave out --target to show it, or --skip-compile to run the port.",
        )


def _print_summary(outcome: _Outcome) -> None:
    assert outcome.comparison is not None, "a summary was refused without a golden"
    record = {"directory": address_of(outcome.capture.directory), **summary_record(outcome.comparison)}
    print_json(record, next_commands=outcome.following)


def _print_record(outcome: _Outcome) -> None:
    record = capture_record(outcome.capture)
    record["graphs"] = asdict(outcome.report.compiles) if outcome.report else None
    if outcome.report is not None and outcome.report.effects is not None:
        record["capture_effects"] = to_json(outcome.report.effects)
    if outcome.generation is not None:
        record["generation"] = encode(outcome.generation)
    record |= comparison_record(outcome.comparison) if outcome.comparison else {}
    print_json(record, next_commands=outcome.following)


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
    print_then_report(text, outcome.write_report, next_commands=outcome.following)
    if report is not None:
        print_warnings(report)
