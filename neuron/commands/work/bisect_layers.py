"""`mm2-test bisect` at work: the search for the first wrong layer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from compare.chains.chain_judge import default_chain_length
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, print_json, print_text
from minimax_tools.command_line.options import CaptureStore
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.run import bisect_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from neuron.commands.work.bisect_whole import WholeBisection, refuse_options_of_layers
from neuron.commands.work.device_run import print_warnings
from neuron.devices.compiler import AUTO
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target
from neuron.report_text import render_report
from neuron.runs.bisection import BisectRequest, bisect_layers
from neuron.runs.extent import Extent
from neuron.runs.run_profile import RunReport
from reports.bisection import bisection_record, next_commands, render_bisection


def bisect_port(
    *,
    model: str,
    golden: Path,
    target: str,
    backend: str,
    compile_with: str,
    ranks: Ranks,
    span: Span | None,
    extent: Extent | None,
    chain_length: int | None,
    is_whole: bool,
    num_decoded: int | None,
    is_anew: bool,
    prefetch: bool | None,
    memory_budget: int | None,
    dtype: torch.dtype,
    store: CaptureStore,
    as_json: bool,
) -> None:
    """Search for the first wrong layer, print the findings, and end with the verdict's exit code."""
    if is_whole:
        refuse_options_of_layers(
            layers=span is not None,
            all=extent is Extent.ALL,
            chain_length=chain_length is not None,
            prefetch=prefetch is not None,
            # A whole port is run as it is.
            compile=compile_with != AUTO,
        )
        WholeBisection(
            model=model,
            golden=golden,
            target=target,
            backend=backend,
            ranks=ranks,
            num_decoded=num_decoded,
            is_exhaustive=extent is Extent.EXHAUSTIVE,
            is_anew=is_anew,
            memory_budget=memory_budget,
            dtype=dtype,
            store=store,
            as_json=as_json,
        ).run()
    if num_decoded is not None:
        raise UsageError("--decode is an option of --whole", next_step="Add --whole, or leave out --decode.")
    spec = ModelSpec.from_folder(resolve_config(model))
    span = (span or Span(0, spec.num_hidden_layers)).within(spec.num_hidden_layers)
    capture = Capture.open(golden).natural()
    request = BisectRequest(
        spec=spec,
        golden=capture,
        inputs=capture.read_inputs(),
        target=find_target(target),
        dtype=dtype,
        prefetch=prefetch,
        budget=MemoryBudget(memory_budget),
        span=span,
        extent=extent or Extent.FIRST,
        chain_length=chain_length or default_chain_length(dtype),
        # These judge layers that ran alone; chains have limits of their own.
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        model_source=model,
    )
    directory = store.directory(DEVICE_SIDE, bisect_run(span).name)
    # None means all layers: then no shard may be missing.
    layers = None if len(span) == spec.num_hidden_layers else range(span.start, span.stop)
    folder = resolve_model(model, layers=layers)
    with (
        output_set_aside(),
        open_runtime(backend, compile_with=compile_with, ranks=ranks) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
    ):
        bisection, compiles = bisect_layers(
            request,
            runtime=runtime,
            reader=reader,
            directory=directory,
            is_anew=is_anew,
            open_progress=lambda part: LayerProgress(len(part), label=f"Probe of {part}"),
        )
    if as_json:
        record = bisection_record(bisection)
        record |= {"graphs": asdict(compiles), "directory": address_of(directory)}
        record["notes"] += capture.row_notes
        print_json(record, next_commands=next_commands(bisection))
    else:
        report = RunReport(compiles=compiles)
        parts = (render_bisection(bisection), *capture.row_notes, render_report(report))
        text = "\n\n".join(filter(None, parts))
        print_text(text, next_commands=next_commands(bisection))
        print_warnings(report)
    end_command(bisection.verdict.exit_code)
