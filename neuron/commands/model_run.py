"""A run of a whole port as `mm2-test model` carries it out: run from token ids to logits, and judged."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from compare.comparer import JudgedRun, judge_run, with_untested
from compare.diagnosis.report import diagnosis_record, render_diagnosis
from compare.limits.criteria import Criteria
from compare.limits.limits import computes_in_float32
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.model_runs.chunks import join_chunks
from compare.model_runs.passes import is_black_box
from compare.run_report import report_run
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, print_json, print_then_report, say
from minimax_tools.command_line.options import SUMMARY_JSON
from minimax_tools.golden_logits.logits_store import LOGITS_FOLDER
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.machine.stops import same_command
from minimax_tools.machine.streams import write
from minimax_tools.model.run import model_run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Verdict
from neuron.devices.runtime import open_runtime
from neuron.model_runs.judgement import NamedRun, judge_black_box, judge_in_float32, name_first
from neuron.model_runs.model_request import ModelRequest
from neuron.model_runs.model_runner import ModelRun
from neuron.options import ModelOptions
from neuron.ports.targets import find_model_target
from reports.captures import capture_record
from reports.data import comparison_record, summary_record
from reports.terminal import render_comparison

# Steps to decode, if --decode does not say: the first reads the cache of the prefill, the later ones those of steps.
_USUAL_STEPS = 4
# Folder in the run's capture, with the capture of the suspect layer alone.
_ISOLATED_FOLDER = "isolated"


def run_model(options: ModelOptions) -> None:
    """Run a whole port, judge it, print, and end with the verdict's exit code."""
    spec = ModelSpec.from_folder(resolve_config(options.model))
    golden = Capture.open(options.golden).of_whole_ports()
    inputs = golden.read_inputs()
    num_decoded = options.num_decoded
    if num_decoded is None:
        num_decoded = min(_USUAL_STEPS, min(inputs.lengths) - 1)
    run = model_run(spec.num_hidden_layers, sites_level="all", num_decoded=num_decoded, graph=spec.graph)
    folder = resolve_model(options.model)
    with output_set_aside():
        request = ModelRequest(
            target=find_model_target(options.target),
            spec=spec,
            folder=folder,
            dtype=options.dtype,
            sites=run.sites,
            budget=MemoryBudget(options.memory_budget),
            run=run,
            model_source=options.model,
            inputs=inputs,
            golden=golden,
            max_new_tokens=options.max_new_tokens,
            runs_chunks=options.runs_chunks,
        )
        with (
            open_runtime(options.backend, ranks=options.ranks) as runtime,
            CheckpointReader(folder) as reader,
            LayerProgress(num_decoded + 1, label="Port", unit="pass") as progress,
            ModelRun(request, runtime=runtime, reader=reader, progress=progress) as model,
        ):
            directory = options.store.place_run(run.name, model.describe())
            model.capture(directory)
            capture = Capture.open(directory)
            weights = CheckpointWeights(model=options.model)
            criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
            judged = judge_run(golden, capture, criteria=criteria, layer_pattern="layer_*", weights=weights)
            if is_black_box(capture):
                judge = partial(
                    _judge_black_box, reader=reader, spec=spec, folder=options.store.captures / LOGITS_FOLDER
                )
                judged = with_untested(_judge_all(judged, judge))
            named = name_first(
                judged, model, weights=weights, criteria=criteria, directory=directory / _ISOLATED_FOLDER
            )
    following = _after_run(named, options)
    report = None
    if options.report_path is not None:
        judged = replace(judged, comparison=named.comparison)
        report = partial(
            report_run, judged, options.report_path, next_commands=following, diagnosis=named.diagnosis
        )
    if options.as_json:
        record = _summary(capture, named) if options.as_json == SUMMARY_JSON else _record(capture, named)
        print_json(record, next_commands=following)
        if report:
            report()
    else:
        _print_text(named)
        print_then_report("", report, next_commands=following)
    end_command(named.comparison.verdict.exit_code)


def _judge_black_box(
    judged: JudgedRun, *, reader: CheckpointReader, spec: ModelSpec, folder: Path
) -> JudgedRun:
    if computes_in_float32(judged.sides.reference):
        return replace(judged, comparison=judge_in_float32(judged))
    comparison = judge_black_box(
        judged.comparison,
        judged.sides.reference,
        judged.sides.target,
        reader=reader,
        spec=spec,
        folder=folder,
    )
    return replace(judged, comparison=comparison)


def _judge_all(judged: JudgedRun, judge: Callable[[JudgedRun], JudgedRun]) -> JudgedRun:
    run = judge(judged)
    if judged.chunks is None:
        return run
    chunks = judge(judged.chunks)
    joined = join_chunks(run.comparison, chunks.comparison, chunks.sides.target)
    return replace(run, comparison=joined, chunks=chunks)


def _record(capture: Capture, named: NamedRun) -> dict[str, Any]:
    # The whole diagnosis has keys of the comparison too, so it is a value of its own.
    diagnosed = None if named.diagnosis is None else diagnosis_record(named.diagnosis)
    return {
        **capture_record(capture),
        **comparison_record(named.comparison),
        "isolated": None if named.isolated is None else comparison_record(named.isolated),
        "diagnosis": [] if diagnosed is None else diagnosed["diagnosis"],
        "diagnosed": diagnosed,
    }


def _summary(capture: Capture, named: NamedRun) -> dict[str, Any]:
    diagnosed = None if named.diagnosis is None else diagnosis_record(named.diagnosis)
    return {
        "directory": address_of(capture.directory),
        **summary_record(named.comparison),
        "diagnosis": [] if diagnosed is None else diagnosed["diagnosis"],
    }


def _after_run(named: NamedRun, options: ModelOptions) -> tuple[str, ...]:
    """Return what comes next: the diagnosis of the suspect layer alone, if it has no name; then the run again."""
    if named.comparison.verdict is Verdict.PASS:
        return ()
    # A mended port is another run, for which a named folder is refused.
    is_refused = options.store.output_dir is not None and not options.store.overwrite
    again = same_command("mm2-test", *(("--overwrite",) if is_refused else ()))
    is_named = named.diagnosis is not None and bool(named.diagnosis.findings)
    if named.isolated is None or is_named:
        return (again,)
    sides = ("--golden", named.isolated.reference, "--run", named.isolated.target)
    return (shlex.join(("mm2-diagnose", "--model", options.model, *sides)), again)


def _print_text(named: NamedRun) -> None:
    write(render_comparison(named.comparison, shows_metrics=False))
    if named.note:
        say(f"\nThe suspect layer did not run alone: {named.note}")
    if named.isolated is not None:
        layer = named.isolated.layers[0]
        write(f"\nLayer {layer} alone, on the golden's input: {str(named.isolated.verdict).upper()}")
    if named.diagnosis is not None and named.diagnosis.verdict is Verdict.FAIL:
        write(render_diagnosis(named.diagnosis))
