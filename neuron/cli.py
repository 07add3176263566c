"""The command `mm2-test`: runs a port's layers on a device and, with a golden, judges them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

from compare.comparer import compare_captures
from compare.options import read_criteria
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.generation import Generation
from minimax_tools.capture.inspection import inspect_capture
from minimax_tools.capture.manifest import dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE, capture_directory
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import Mm2Group, end_command, print_json
from minimax_tools.command_line.options import (
    dtype_option,
    layer_option,
    optional_model_option,
    output_options,
    parse_lengths,
    read_reading,
    read_span,
    reading_options,
    span_options,
)
from minimax_tools.command_line.progress import LayerProgress
from minimax_tools.dumps.opening import open_source
from minimax_tools.errors import CannotRunError, CaptureError, TargetError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.model.run import (
    Component,
    Run,
    component_run,
    full_run,
    multi_layer_run,
    single_layer_run,
    sweep_run,
)
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Comparison
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.check import Level, check_machine, worst
from neuron.commands.bisect_layers import bisect_command
from neuron.commands.trace import trace_command
from neuron.commands.weights import weights_command
from neuron.devices.runtime import open_runtime
from neuron.options import backend_option, device_options, read_inputs
from neuron.ports.targets import find_target
from neuron.process.supervisor import supervise
from neuron.report_text import find_warnings, render_report
from neuron.runs.device_request import DeviceRequest
from neuron.runs.run_profile import PROFILE_NAME, RunProfile
from neuron.runs.run_report import RunReport
from neuron.runs.runner import DeviceRun
from reports.captures import capture_record, is_damaged, render_capture
from reports.data import comparison_record
from reports.dumps import map_template_of
from reports.json_values import to_json
from reports.terminal import render_comparison

Options = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A finished run, and its verdict where there was a golden."""

    capture: Capture
    report: RunReport | None
    generation: Generation | None
    comparison: Comparison | None


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
def main() -> None:
    """Run layers of a MiniMax-M2 port on a device, from a golden's inputs, and judge them."""


@main.command(
    "single-layer",
    epilog="\b\nExample: mm2-test single-layer --model DIR --layer 0 --golden GOLDEN",
)
@layer_option
@device_options
def single_layer(layer: int, **options: Any) -> None:
    """Run one layer."""
    _run_device(options, lambda _: single_layer_run(layer, sites_level=options["sites_level"]))


@main.command(
    "multi-layer", epilog="\b\nExample: mm2-test multi-layer --model DIR --start-layer 0 --end-layer 5"
)
@span_options
@device_options
def multi_layer(start_layer: int | None, end_layer: int | None, layers: str | None, **options: Any) -> None:
    """Run a range of layers, each fed the output of the one before."""
    given = read_span(start_layer, end_layer, layers)
    _run_device(options, lambda spec: multi_layer_run(_span(given, spec), sites_level=options["sites_level"]))


@main.command(
    "sweep", epilog="\b\nExample: mm2-test sweep --model DIR --golden GOLDEN --target port.py:DecoderLayer"
)
@span_options
@device_options
def sweep(start_layer: int | None, end_layer: int | None, layers: str | None, **options: Any) -> None:
    """Run every layer of a range by itself, on the golden's own inputs: the usual way to find a fault."""
    given = read_span(start_layer, end_layer, layers)
    _run_device(options, lambda spec: sweep_run(_span(given, spec), sites_level=options["sites_level"]))


@main.command(
    "full",
    epilog='\b\nExample: mm2-test full --model DIR --prompt "The capital of France is" --max-new-tokens 8',
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Tokens to generate after each row, greedily; each but the first goes through all layers again.",
)
@device_options
def full(**options: Any) -> None:
    """Run the whole model, from the tokens to the logits, and say how each row goes on."""
    _run_device(options, lambda spec: full_run(spec.num_hidden_layers, sites_level=options["sites_level"]))


@main.command(
    "component",
    epilog="\b\nExample: mm2-test component --layer 7 --component moe --model DIR --golden GOLDEN",
)
@layer_option
@click.option(
    "--component",
    type=click.Choice([str(component) for component in Component]),
    required=True,
    help="The part of the layer to run.",
)
@device_options
def component(layer: int, component: str, **options: Any) -> None:
    """Run one component of a layer, fed the golden's values at its border."""
    _run_device(options, lambda _: component_run(layer, Component(component)))


@main.command("check", epilog="\b\nExample: mm2-test check --model DIR --seq-len 128,2048")
@optional_model_option
@backend_option
@click.option(
    "--seq-len",
    "seq_lens",
    callback=parse_lengths,
    metavar="128,2048",
    default="128",
    show_default=True,
    help="Lengths of a row; the memory that a layer takes is told for each.",
)
@click.option(
    "--profile-of",
    type=click.Path(path_type=Path),
    metavar="CAPTURE",
    help="A run with --profile on this machine: from its times those of the lengths are told.",
)
@dtype_option
@output_options
def check(
    model: str | None,
    backend: str,
    seq_lens: tuple[int, ...],
    profile_of: Path | None,
    dtype: torch.dtype,
    as_json: bool,
) -> None:
    """Tell what this machine is, what changes numbers on it, and whether a layer fits.

    Without --model a layer is one of MiniMax-M2's. Exits with 3 where no run can work.
    """
    spec = SyntheticModel.m2().spec() if model is None else ModelSpec.from_folder(resolve_config(model))
    profile = None if profile_of is None else RunProfile.read(profile_of)
    findings = check_machine(spec, seq_lens, backend=backend, dtype=dtype, profile=profile)
    if as_json:
        print_json({"worst": str(worst(findings)), "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            click.echo(f"{f'[{finding.level}]':7}{finding.subject}: {finding.found}")
            if finding.next_step:
                click.echo(f"       → {finding.next_step}")
    if worst(findings) is Level.FAIL:
        end_command(CannotRunError.exit_code)


@main.command("show", epilog="\b\nExample: mm2-test show mm2-captures/neuron/single_layer_0")
@click.argument("directory", type=click.Path(path_type=Path))
@reading_options()
@click.option("--map-template", is_flag=True, help="Print a map of another tool's dump to fill in, and end.")
@output_options
def show(directory: Path, map_template: bool, as_json: bool, **reading: Any) -> None:
    """Print what a saved run holds: layers, sites, shapes and statistics, and whether its files are as written.

    Exits with 3 where they are not.
    """
    source = open_source(directory, read_reading(reading["format"], reading["map"]))
    if map_template:
        click.echo(map_template_of(source), nl=False)
        return
    inspection = inspect_capture(source) if source.known_description else None
    if as_json:
        print_json(capture_record(source, inspection))
    else:
        click.echo(render_capture(source, inspection))
    if is_damaged(source, inspection):
        end_command(CaptureError.exit_code)


main.add_command(bisect_command)
main.add_command(trace_command)
main.add_command(weights_command)


def _span(given: Span | None, spec: ModelSpec) -> Span:
    return given or Span(0, spec.num_hidden_layers)


def _run_device(options: Options, make_run: Callable[[ModelSpec], Run]) -> None:
    """Run, or load what was run, judge it if there is a golden, print, and exit with the verdict's code."""
    spec = ModelSpec.from_folder(resolve_config(options["model"]))
    run = make_run(spec).decoding(options["decode_rows"])
    run.span.within(spec.num_hidden_layers)
    directory = options["output_dir"] or capture_directory(options["captures"], DEVICE_SIDE, run.name)
    golden = Capture.open(options["golden"]) if options["golden"] else None
    report = None
    if options["skip_compile"]:
        _refuse_other_run(Capture.open(directory), run, options)
    else:
        with output_set_aside():
            report = _execute(options, spec, run, golden, directory)
    capture = Capture.open(directory)
    comparison = None
    if golden is not None:
        criteria = read_criteria(options)
        comparison = compare_captures(
            golden,
            capture,
            criteria=criteria,
            layer_pattern="layer_*",
            weights=CheckpointWeights(model=options["model"]),
        )
    outcome = _Outcome(
        capture=capture,
        report=report,
        generation=capture.read_generation(),
        comparison=comparison,
    )
    _print_outcome(outcome, as_json=options["as_json"], shows_metrics=options["shows_metrics"])
    if comparison is not None:
        end_command(comparison.verdict.exit_code)
    if report is not None and report.generation_error is not None:
        end_command(TargetError.exit_code)


def _execute(
    options: Options, spec: ModelSpec, run: Run, golden: Capture | None, directory: Path
) -> RunReport:
    layers = _read_layers(options, spec, run)
    folder = resolve_model(options["model"], layers=layers)
    request = DeviceRequest(
        folder=folder,
        spec=spec,
        model_source=options["model"],
        run=run,
        inputs=read_inputs(options, folder, spec, golden),
        dtype=options["dtype"],
        target=find_target(options["target"]),
        golden=golden,
        random_input=options["random_input"],
        seed=options["seed"],
        prefetch=options["prefetch"],
        budget=MemoryBudget(options["memory_budget"]),
        checks_capture=options["check_capture"],
        profiles=options["profile"],
        max_new_tokens=options.get("max_new_tokens", 0),
    )
    with (
        open_runtime(options["backend"], ranks=options["ranks"]) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
        LayerProgress(request.num_layers, label="Device") as progress,
    ):
        report = DeviceRun(request, runtime=runtime, reader=reader, progress=progress).capture(directory)
        if report.profile:
            RunProfile(
                backend=str(runtime.backend),
                spec_digest=spec.digest(),
                dtype=dtype_name(request.dtype),
                num_ranks=options["ranks"].degree,
                decode_rows=run.decode_rows,
                batch_size=request.inputs.batch_size,
                sequence_length=request.inputs.sequence_length,
                layers=report.profile,
            ).write(directory)
        return report


def _read_layers(options: Options, spec: ModelSpec, run: Run) -> range | None:
    """The layers whose weights the run reads: from the first one on, where nothing else gives the span its input.

    None for all of them: then no shard may be missing.
    """
    is_fed = options["golden"] is not None or options["random_input"]
    layers = range(run.span.start if is_fed else 0, run.span.stop)
    return None if len(layers) == spec.num_hidden_layers else layers


def _refuse_other_run(saved: Capture, run: Run, options: Options) -> None:
    """Refuse to show a saved run as the one asked for where it is another."""
    description = saved.description
    found = description.run
    if (found.span, found.mode, found.component, found.decode_rows) != (
        run.span,
        run.mode,
        run.component,
        run.decode_rows,
    ):
        raise CaptureError(
            f"{saved.directory} holds another run than --skip-compile asks for",
            expected=str(run),
            found=str(found),
            next_step="Name its directory with --output-dir, or leave out --skip-compile.",
        )
    asked, stored = options["ranks"].degree, description.provenance.options.get("tp_degree", 1)
    if options["ranks"].are_several and asked != stored:
        raise CaptureError(
            f"{saved.directory} holds a run of another number of ranks",
            expected=str(asked),
            found=str(stored),
            next_step="Leave out --tp-degree to show it, or --skip-compile to run with it.",
        )
    is_chosen = click.get_current_context().get_parameter_source("target") is not ParameterSource.DEFAULT
    if is_chosen and description.provenance.target != options["target"]:
        raise CaptureError(
            f"{saved.directory} holds a run of another target",
            expected=options["target"],
            found=description.provenance.target,
            next_step="Leave out --target to show it, or --skip-compile to run the target.",
        )


def _print_outcome(outcome: _Outcome, *, as_json: bool, shows_metrics: bool) -> None:
    if as_json:
        record = capture_record(outcome.capture)
        record["graphs"] = asdict(outcome.report.compiles) if outcome.report else None
        if outcome.report is not None and outcome.report.effects is not None:
            record["capture_effects"] = to_json(outcome.report.effects)
        if outcome.generation is not None:
            record["generation"] = outcome.generation.as_json()
        print_json({**record, **(comparison_record(outcome.comparison) if outcome.comparison else {})})
        return
    click.echo(render_capture(outcome.capture))
    if outcome.generation is not None:
        click.echo(str(outcome.generation))
        if outcome.comparison is None and any(len(row.generated_ids) > 1 for row in outcome.generation.rows):
            click.echo("Tokens are judged with --golden: one that generated, made by mm2-gpu full.")
    if outcome.report is not None:
        _print_report(outcome.report, outcome.capture.directory)
    if outcome.comparison is not None:
        click.echo(render_comparison(outcome.comparison, shows_metrics=shows_metrics))


def _print_report(report: RunReport, directory: Path) -> None:
    text = render_report(report)
    if text:
        click.echo(text)
    if report.profile:
        click.echo(f"  trace: {directory / PROFILE_NAME}")
    for warning in find_warnings(report):
        click.echo(f"warning: {warning}", err=True)


if __name__ == "__main__":
    sys.exit(supervise(main, sys.argv[1:]))
