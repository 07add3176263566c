"""`mm2-test bisect`: which layers of a port are wrong, found by running parts of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from compare.chains.chain_limits import LONGEST_CHAIN, default_chain_length
from compare.limits.criteria import DEFAULT_ATOL, DEFAULT_RTOL, Criteria
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE, capture_directory
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import Mm2Command, end_command, print_json
from minimax_tools.command_line.options import (
    dtype_option,
    memory_budget_option,
    model_option,
    output_options,
    read_span,
    span_options,
    store_options,
)
from minimax_tools.command_line.progress import LayerProgress
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.model.run import bisect_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime
from neuron.options import backend_option, prefetch_option, target_option
from neuron.ports.targets import find_target
from neuron.rank_options import rank_options
from neuron.report_text import find_warnings, render_report
from neuron.runs.bisection import BisectRequest, Extent, bisect_layers
from neuron.runs.run_report import CompileReport, RunReport
from reports.bisection import bisection_record, render_bisection


@click.command(
    "bisect",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-test bisect --model DIR --golden GOLDEN --target port.py:DecoderLayer",
)
@model_option
@click.option(
    "--golden",
    type=click.Path(path_type=Path),
    required=True,
    help="Golden capture: it gives chains their inputs, and judges their ends.",
)
@target_option
@backend_option
@rank_options
@span_options
@click.option(
    "--all",
    "extent",
    flag_value=Extent.ALL,
    type=Extent,
    help="Go on behind each finding, to the last layer.",
)
@click.option(
    "--exhaustive", "extent", flag_value=Extent.EXHAUSTIVE, type=Extent, help="Run every layer alone instead."
)
@click.option(
    "--chain-length",
    type=click.IntRange(1, LONGEST_CHAIN),
    help="Layers that run one after the other before they are judged: in more, smaller errors hide.  "
    "[default: 2; 8 in float32]",
)
@click.option("--anew", "is_anew", is_flag=True, help="Forget the probes of earlier runs.")
@prefetch_option
@memory_budget_option
@dtype_option
@store_options
@output_options
def bisect_command(
    start_layer: int | None,
    end_layer: int | None,
    layers: str | None,
    extent: Extent | None,
    is_anew: bool,
    as_json: bool,
    ranks: Ranks,
    **options: Any,
) -> None:
    """Find the first wrong layer by running halves of a range.

    Of 62 layers it takes seven runs at most: log2 of their number, rounded up, and one. Each run goes through its
    layers in short chains, each fed the golden's own input at its start and judged at its end. A port needs to show
    nothing but its output. Finished runs are noted: an interrupted bisection goes on where it stopped.

    Exits with 1 where a layer is wrong, or a chain far beyond its limit. 0 says that no error was large enough to be
    seen (the output says how large), or that no more than a chain a little beyond its limit was, which is a warning.
    """
    spec = ModelSpec.from_folder(resolve_config(options["model"]))
    span = (read_span(start_layer, end_layer, layers) or Span(0, spec.num_hidden_layers)).within(
        spec.num_hidden_layers
    )
    golden = Capture.open(options["golden"])
    request = BisectRequest(
        spec=spec,
        golden=golden,
        inputs=golden.read_inputs(),
        target=find_target(options["target"]),
        dtype=options["dtype"],
        prefetch=options["prefetch"],
        budget=MemoryBudget(options["memory_budget"]),
        span=span,
        extent=extent or Extent.FIRST,
        chain_length=options["chain_length"] or default_chain_length(options["dtype"]),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        model_source=options["model"],
    )
    directory = options["output_dir"] or capture_directory(
        options["captures"], DEVICE_SIDE, bisect_run(span).name
    )
    # None for all layers: then no shard may be missing.
    read = None if len(span) == spec.num_hidden_layers else range(span.start, span.stop)
    folder = resolve_model(options["model"], layers=read)
    with (
        output_set_aside(),
        open_runtime(options["backend"], ranks=ranks) as runtime,
        CheckpointReader(folder, layers=read) as reader,
    ):
        bisection, compiles = bisect_layers(
            request,
            runtime=runtime,
            reader=reader,
            directory=directory,
            is_anew=is_anew,
            watch=lambda part: LayerProgress(len(part), label=f"Probe of {part}"),
        )
    if as_json:
        record = bisection_record(bisection)
        print_json({**record, "graphs": asdict(compiles), "directory": str(directory)})
    else:
        click.echo(render_bisection(bisection))
        _print_compiles(compiles)
    end_command(bisection.verdict.exit_code)


def _print_compiles(compiles: CompileReport) -> None:
    report = RunReport(compiles=compiles)
    text = render_report(report)
    if text:
        click.echo(f"\n{text}")
    for warning in find_warnings(report):
        click.echo(f"warning: {warning}", err=True)
