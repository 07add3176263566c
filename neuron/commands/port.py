"""The command `mm2-test port`: a port judged in stages, from the golden to the proof of its mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from minimax_tools.capture.store import DEFAULT_CAPTURES
from minimax_tools.command_line.console import Mm2Command, loading
from minimax_tools.command_line.options import (
    dtype_option,
    model_option,
    output_options,
    quick_option,
)
from neuron.options import backend_option, golden_option, target_option


@click.command(
    "port",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test port --model DIR --target port.py:DecoderLayer",
)
@model_option
@target_option
@golden_option("Golden capture. Default: one is made, in the output folder.")
@quick_option
@backend_option
@click.option(
    "--tp-degree", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that share a layer."
)
@dtype_option
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(DEFAULT_CAPTURES) / "port",
    show_default=True,
    help="Folder of the golden, the runs and the log of finished stages.",
)
@click.option(
    "--overwrite", is_flag=True, help="Replace a golden of another checkpoint in the output folder."
)
@output_options
def port_command(**options: Any) -> None:
    """Judge a port in stages: golden, weights, sweep, then its mistake named and proved, or all layers in a chain.

    Each stage is a command that is shown before it runs; the last leaves a report in the folder `report`. A call that
    was interrupted goes on behind its finished stages, unless the port has changed. The golden is made once.

    Exits with 1 if the port differs.
    """
    with loading():
        from neuron.commands.port_stages import judge_in_stages

    judge_in_stages(**options)
