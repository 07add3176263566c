"""The command `mm2-test model`: runs a whole port from token ids to logits, and judges it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from compare.options import report_option
from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.command_line.options import (
    dtype_option,
    grouped_as,
    judging_output_options,
    memory_budget_option,
    model_option,
    stack_options,
    store_options,
)
from neuron.options import ModelOptions, backend_option, golden_option, layer_timeout_option, rank_options

if TYPE_CHECKING:
    pass


@click.command(
    "model",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test model --model DIR --golden GOLDEN --target port.py:Model",
)
@stack_options(
    model_option,
    golden_option(
        "Golden capture of the whole model: gives the prompts and their continuation, and judges the run.",
        required=True,
    ),
    click.option(
        "--target",
        required=True,
        metavar="PATH.py:NAME|package.module:NAME|nxdi:…|vllm-neuron:…",
        help="Whole port to run: NAME(config) returns its module; nxdi: and an application of "
        "neuronx-distributed-inference; vllm-neuron: and a model of the vLLM Neuron plugin. Its code is executed.",
    ),
    layer_timeout_option,
    backend_option,
    rank_options,
    click.option(
        "--decode",
        "num_decoded",
        type=click.IntRange(min=0),
        metavar="N",
        help="Decode the last N tokens of each prompt one at a time, from the port's own cache. Default: 4, or fewer "
        "if a prompt is shorter.",
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Tokens to generate freely after each prompt.",
    ),
    click.option(
        "--chunks/--no-chunks",
        "runs_chunks",
        default=True,
        show_default=True,
        help="Run the prompts in chunks too: passes of several tokens behind a cache, as of a chunked prefill.",
    ),
    memory_budget_option,
    dtype_option,
    store_options,
    report_option,
    judging_output_options,
    grouped_as("options", ModelOptions),
)
def model_command(options: ModelOptions) -> None:
    """Run a whole port: prefill, decoding of the golden's own tokens, chunks, free generation; judge all of it."""
    with loading():
        from neuron.commands.model_run import run_model

    run_model(options)
