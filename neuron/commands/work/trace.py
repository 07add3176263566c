"""`mm2-test trace` at work: a layer compiled into a file, with its sites as outputs."""

from __future__ import annotations

from pathlib import Path

import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import judge_port, judge_port_of
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import print_json, print_text, say
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.size import format_size
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from neuron.devices.backend import Backend
from neuron.devices.backend_choice import choose_backend
from neuron.devices.runtime import open_runtime
from neuron.ports.targets import find_target
from neuron.ports.traced import PREFIX
from neuron.ports.tracing import Trace, TraceRequest, trace_layer
from neuron.runs.golden_inputs import read_inputs


def trace_to_file(
    *,
    model: str,
    layer: int,
    target: str,
    output: Path,
    golden: Path | None,
    backend: str,
    check_capture: bool,
    inputs: InputRequest,
    dtype: torch.dtype,
    as_json: bool,
) -> None:
    """Compile a layer into a file, and print what it holds."""
    spec = ModelSpec.from_folder(resolve_config(model))
    Span.single(layer).within(spec.num_hidden_layers)
    layers = range(layer, layer + 1)
    folder = resolve_model(model, layers=layers)
    # A run calls the layer with some of the rows at a time: a program has the shape of one call.
    rows = read_inputs(inputs, folder, spec, Capture.open(golden) if golden else None)
    request = TraceRequest(
        target=find_target(target),
        spec=spec,
        layer=layer,
        inputs=rows.in_rows(rows.plan_calls()[0]),
        dtype=dtype,
        backend=choose_backend(backend),
        checks_capture=check_capture,
    )
    # A port may ask for its rank while it is built; the compiler opens the device itself.
    with (
        output_set_aside(),
        open_runtime(str(Backend.CPU)),
        CheckpointReader(folder, layers=layers) as reader,
    ):
        # Compilers write it themselves, and run the port's code, which may change the working folder.
        trace = trace_layer(request, reader, output.absolute())
    arguments = ("--target", f"{PREFIX}{output}")
    run = single_layer_run(layer, sites_level="all")
    if golden is None:
        following = judge_port_of(model, *arguments, run=run, batch_shape=rows.batch_shape)
    else:
        following = judge_port(golden, run, model=model, arguments=arguments)
    _print_trace(trace, output, as_json=as_json, next_commands=(following,))


def _print_trace(trace: Trace, output: Path, *, as_json: bool, next_commands: tuple[str, ...]) -> None:
    description, effect = trace.description, trace.effect_of_sites
    if as_json:
        sizes = {"file": str(output), "size_bytes": output.stat().st_size}
        record = {**sizes, **encode(description), "effect_of_sites": effect}
        print_json(record, next_commands=next_commands)
        return
    sites = ", ".join(str(site) for site in description.sites) or "none"
    say(f"{output}: layer {description.layer} of {description.port}, {format_size(output.stat().st_size)}")
    say(
        f"compiled by {description.program} for hidden states {list(description.shape)} in {description.dtype}"
    )
    say(f"sites beside its input and output: {sites}")
    if effect is not None:
        changed = f"changes its output by up to {effect:.3g}" if effect else "does not change its output"
        say(f"returning the sites {changed}")
    print_text("", next_commands=next_commands)
