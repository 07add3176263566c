"""`mm2-test trace`: compiles one layer of a port into a file for `--target traced:FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text, say
from minimax_tools.command_line.options import (
    dtype_option,
    input_options,
    layer_option,
    model_option,
    output_options,
    stack_options,
)
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.size import format_size
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from neuron.devices.backend import Backend
from neuron.options import golden_option, target_option

if TYPE_CHECKING:
    import torch

    from neuron.ports.tracing import Trace


_BACKENDS = ("auto", str(Backend.NEURON_XLA), str(Backend.CPU))


@click.command(
    "trace",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-test trace --model DIR --layer 0 --golden GOLDEN --target port.py:DecoderLayer "
    "--output layer_0.pt2",
)
@model_option
@layer_option
@target_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File to write, as large as the layer's weights.",
)
@golden_option("Golden capture that gives the shape of the rows. Default: none, see --seq-len.")
@click.option(
    "--backend",
    type=click.Choice(_BACKENDS),
    default="auto",
    show_default=True,
    help="Backend to compile for: torch_neuronx.trace for neuron-xla, torch.export for cpu.",
)
@click.option(
    "--check-capture",
    is_flag=True,
    help="Also compile the layer without its sites, and report whether returning them changes its output.",
)
@stack_options(input_options, dtype_option)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random numbers.")
@output_options
def trace_command(
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
    """Compile one layer into a file for --target traced:FILE, with its sites as further outputs.

    The file holds the weights. The program takes rows of one shape, which --golden or --seq-len gives.
    Loading such a file executes its code, as with a port's own file.
    """
    with loading():
        from minimax_tools.capture.reader import Capture
        from minimax_tools.capture.run_commands import judge_port, judge_port_of
        from minimax_tools.checkpoint.reader import CheckpointReader
        from neuron.devices.backend import choose_backend
        from neuron.devices.runtime import open_runtime
        from neuron.ports.targets import find_target
        from neuron.ports.traced import PREFIX
        from neuron.ports.tracing import TraceRequest, trace_layer
        from neuron.runs.device_request import read_inputs

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
    run = single_layer_run(layer, sites_level="all", graph=spec.graph)
    if golden is None:
        following = judge_port_of(model, *arguments, run=run, batch_shape=rows.batch_shape)
    else:
        following = judge_port(golden, run, model=model, arguments=arguments)
    _print_trace(trace, output, as_json=as_json, next_commands=(following,))


def _print_trace(trace: Trace, output: Path, *, as_json: bool, next_commands: tuple[str, ...]) -> None:
    from minimax_tools.json_codec import encode

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
