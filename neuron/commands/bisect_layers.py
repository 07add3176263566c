"""`mm2-test bisect`: the wrong layers of a port, found by running parts of a range."""

from __future__ import annotations

from dataclasses import asdict

import click

from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL, LONGEST_CHAIN
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.command_line.console import Mm2Command, end_command, loading, print_json, print_text
from minimax_tools.command_line.options import (
    dtype_option,
    grouped_as,
    memory_budget_option,
    model_option,
    output_options,
    search_store_options,
    span_options,
)
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.run import Extent, bisect_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from neuron.options import (
    BisectOptions,
    backend_option,
    compile_option,
    golden_option,
    prefetch_option,
    rank_options,
    target_option,
)


@click.command(
    "bisect",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test bisect --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
@model_option
@golden_option("Golden capture: gives the chains their inputs, and judges their outputs.", required=True)
@target_option
@backend_option
@compile_option
@rank_options
@span_options
@click.option(
    "--all",
    "extent",
    flag_value=Extent.ALL,
    type=Extent,
    help="Continue after each finding, to the last layer. Default: stop at the first that proves a layer wrong.",
)
@click.option(
    "--exhaustive",
    "extent",
    flag_value=Extent.EXHAUSTIVE,
    type=Extent,
    help="Run every layer alone instead of halves of the range; --chain-length then changes no result. With --whole: "
    "replace the stream at every layer, from the last on.",
)
@click.option(
    "--chain-length",
    type=click.IntRange(1, LONGEST_CHAIN),
    help="Layers per chain, run one after the other before they are judged. Longer chains hide small errors. "
    "Default: 2; 8 in float32.",
)
@click.option(
    "--whole",
    "is_whole",
    is_flag=True,
    help="The port is a whole port, as of mm2-test model, of which no layer can run alone: replace its stream by the "
    "golden's at one layer in each run, and judge its logits.",
)
@click.option(
    "--decode",
    "num_decoded",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --whole: decode the last N tokens of each prompt one at a time. More of them "
    "show smaller mistakes. Default: 32, or half of the shortest prompt.",
)
@click.option("--anew", "is_anew", is_flag=True, help="Ignore the probes of earlier runs.")
@prefetch_option
@memory_budget_option
@dtype_option
@search_store_options
@output_options
@grouped_as("options", BisectOptions)
def bisect_command(options: BisectOptions) -> None:
    """Find the first wrong layer by running halves of a range.

    If no chain drifts, 62 layers take seven runs at most: log2 of their number, rounded up, plus one. Each run goes
    through its layers in short chains, up to the first wrong one. A chain starts from the golden's input and only its
    last output is judged, so a port needs to show nothing but its output. Finished runs are stored: with the same port,
    golden, dtype and chain length, an interrupted bisection continues where it stopped.

    Exits with 1 if a layer is wrong, or a chain is far beyond its limit. Exits with 0 if no error was large enough to
    be seen; the output says how large that is. A chain a little beyond its limit drifts: that is a warning, which exits
    with 0 too, and the search goes on behind it, with more runs.

    With --whole, the last wrong layer is found: the one behind which the golden's stream makes the logits right, and
    before which it does not.
    """
    with loading():
        from compare.chains.chain_judge import default_chain_length
        from compare.limits.criteria import Criteria
        from minimax_tools.capture.mirror import address_of
        from minimax_tools.capture.reader import Capture
        from minimax_tools.checkpoint.reader import CheckpointReader
        from minimax_tools.machine.memory import MemoryBudget
        from neuron.commands.bisect_whole import bisect_whole_port
        from neuron.commands.device_run import print_warnings, render_report
        from neuron.devices.runtime import open_runtime
        from neuron.ports.targets import find_target
        from neuron.runs.bisection import BisectRequest, bisect_layers
        from neuron.runs.run_profile import RunReport
        from reports.bisection import bisection_record, next_commands, render_bisection

    if options.is_whole:
        bisect_whole_port(options)
    if options.num_decoded is not None:
        raise UsageError("--decode is an option of --whole", next_step="Add --whole, or leave out --decode.")
    spec = ModelSpec.from_folder(resolve_config(options.model))
    span = (options.span or Span(0, spec.num_hidden_layers)).within(spec.num_hidden_layers)
    golden = Capture.open(options.golden).natural()
    request = BisectRequest(
        spec=spec,
        golden=golden,
        inputs=golden.read_inputs(),
        target=find_target(options.target),
        dtype=options.dtype,
        prefetch=options.prefetch,
        budget=MemoryBudget(options.memory_budget),
        span=span,
        extent=options.extent or Extent.FIRST,
        chain_length=options.chain_length or default_chain_length(options.dtype),
        # These judge layers that ran alone; chains have limits of their own.
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        model_source=options.model,
    )
    directory = options.store.directory(DEVICE_SIDE, bisect_run(span).name)
    # None means all layers: then no shard may be missing.
    layers = None if len(span) == spec.num_hidden_layers else range(span.start, span.stop)
    folder = resolve_model(options.model, layers=layers)
    with (
        output_set_aside(),
        open_runtime(options.backend, compile_with=options.compile_with, ranks=options.ranks) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
    ):
        bisection, compiles = bisect_layers(
            request,
            runtime=runtime,
            reader=reader,
            directory=directory,
            is_anew=options.is_anew,
            open_progress=lambda part: LayerProgress(len(part), label=f"Probe of {part}"),
        )
    if options.as_json:
        record = bisection_record(bisection)
        record |= {"graphs": asdict(compiles), "directory": address_of(directory)}
        record["notes"] += golden.row_notes
        print_json(record, next_commands=next_commands(bisection))
    else:
        report = RunReport(compiles=compiles)
        parts = (render_bisection(bisection), *golden.row_notes, render_report(report))
        text = "\n\n".join(filter(None, parts))
        print_text(text, next_commands=next_commands(bisection))
        print_warnings(report)
    end_command(bisection.verdict.exit_code)
