"""`mm2-split plan`: a model divided among machines before anything is downloaded."""

from __future__ import annotations

from pathlib import Path

import click

from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import memory_dtype_option, model_option, output_options
from minimax_tools.command_line.work import done_by
from minimax_tools.partition.node import Planner


@click.command("plan", cls=Mm2Command)
@model_option
@click.option(
    "--node",
    "node_texts",
    multiple=True,
    metavar="NAME:memory=40GB,tflops=312",
    help="Machine, and the memory that its slice may take. Repeat for several. Planners compute and balanced need "
    "tflops; manual needs layers=A:B (A to B-1).",
)
@click.option(
    "--nodes-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='JSON file of further machines: a list of {"name": …, "memory": "40GB", "tflops": 312}.',
)
@click.option(
    "--planner",
    type=click.Choice([str(planner) for planner in Planner]),
    default="memory",
    show_default=True,
    help="Divide layers by memory, by throughput (compute), by the slowest stage (balanced), or by hand (manual).",
)
@click.option(
    "--context-length",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens per row, for the memory of keys, values and activations.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Rows, for the same memory.",
)
@memory_dtype_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write the plan to, as JSON. Default: none.",
)
@output_options
@done_by("minimax_tools.commands.work.plan", "divide_model")
def plan_command() -> None:
    """Divide a model among machines, and print layers, bytes, memory and time of each.

    Only headers and config.json are read; no weight of a hub's model is downloaded.

    Example: mm2-split plan --model MiniMaxAI/MiniMax-M2 --node a:memory=640GB --node b:memory=80GB --output plan.json
    """
