"""The options of every command that runs a port on a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from compare.options import criteria_options
from minimax_tools.capture.reader import Capture
from minimax_tools.command_line.options import (
    input_options,
    memory_budget_option,
    model_option,
    output_options,
    read_input_request,
    run_options,
    stack_options,
    store_options,
)
from minimax_tools.errors import UsageError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.prompts import InputRequest, build_inputs
from neuron.devices.backend import Backend
from neuron.process.record import LAYER_TIMEOUT_S
from neuron.process.status import limit_layers
from neuron.rank_options import rank_options

backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", *(str(backend) for backend in Backend)]),
    default="auto",
    show_default=True,
    help="The device.",
)
_target_name_option = click.option(
    "--target",
    default="builtin",
    show_default=True,
    metavar="builtin|reference|PATH.py:NAME|package.module:NAME|nxdi:…|traced:FILE",
    help="The implementation to run: mm2's own, a port's class, nxdi: and a class on neuronx-distributed-inference, "
    "or what mm2-test trace wrote. Code in what you name is executed.",
)
# A port may never end.
_layer_timeout_option = click.option(
    "--layer-timeout",
    type=click.FloatRange(min=0),
    default=LAYER_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    expose_value=False,
    callback=lambda _, __, timeout_s: limit_layers(timeout_s),
    help="Longest time for one pass through a layer, compiling included; 0 for no limit.",
)
target_option = stack_options(_target_name_option, _layer_timeout_option)
prefetch_option = click.option(
    "--prefetch/--no-prefetch",
    default=None,
    help="Fetch the next layer from the disk while one runs; by default where memory holds it.",
)
device_options = stack_options(
    model_option,
    click.option(
        "--golden",
        type=click.Path(path_type=Path),
        help="Golden capture: its inputs are used, and it judges.",
    ),
    target_option,
    backend_option,
    rank_options,
    click.option("--random-input", is_flag=True, help="Feed the first layer random hidden states."),
    prefetch_option,
    memory_budget_option,
    click.option(
        "--decode",
        "decode_rows",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Compute the last N rows of each prompt one at a time, from the keys and values of those before them.",
    ),
    click.option(
        "--check-capture",
        is_flag=True,
        help="Run every layer once more with nothing recorded, and tell whether recording changes its output.",
    ),
    click.option(
        "--profile",
        is_flag=True,
        help="Tell where the time of every layer goes, as a table and a trace file in the capture directory.",
    ),
    click.option("--skip-compile", is_flag=True, help="Load the saved run instead of compiling and running."),
    criteria_options,
    input_options,
    run_options,
    store_options,
    output_options,
)


def read_inputs(options: Mapping[str, Any], folder: Path, spec: ModelSpec, golden: Capture | None) -> Inputs:
    """The token rows of a run: the golden's own, else what the input options say.

    Raises:
        UsageError: Both were given.
        CaptureError: The golden's inputs cannot be read.
    """
    request = read_input_request(dict(options))
    if golden is None:
        return build_inputs(request, folder=folder, spec=spec)
    if request != InputRequest(seed=request.seed):
        raise UsageError(
            "the golden's own inputs are run: options that choose others cannot be given beside --golden",
            next_step="Leave out --prompt, --input-ids, --seq-len and so on, or capture a golden with them.",
        )
    return golden.read_inputs()
