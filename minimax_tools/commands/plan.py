"""`mm2-split plan`: a model divided among machines before anything is downloaded."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import torch

from minimax_tools.command_line.console import Mm2Command, print_json, print_text
from minimax_tools.command_line.options import dtype_option, model_option, output_options
from minimax_tools.commands.plan_text import describe_plan, plan_values
from minimax_tools.hub.checkpoint_folder import is_in_bucket, is_on_hub
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.cost_measurement import measure_costs
from minimax_tools.partition.node import Node, check_nodes, read_nodes
from minimax_tools.partition.plan import PartitionPlan, make_plan
from minimax_tools.partition.planners import PLANNERS
from minimax_tools.slices.source import open_source


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
    type=click.Choice(list(PLANNERS)),
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
@dtype_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write the plan to, as JSON. Default: none.",
)
@output_options
def plan_command(
    model: str,
    node_texts: tuple[str, ...],
    nodes_file: Path | None,
    planner: str,
    context_length: int,
    batch_size: int,
    dtype: torch.dtype,
    output: Path | None,
    as_json: bool,
) -> None:
    """Divide a model among machines, and print layers, bytes, memory and time of each.

    Only headers and config.json are read; no weight of a hub's model is downloaded.

    Example: mm2-split plan --model MiniMaxAI/MiniMax-M2 --node a:memory=640GB --node b:memory=80GB --output plan.json
    """
    nodes = [Node.parse(text) for text in node_texts]
    nodes += read_nodes(nodes_file) if nodes_file is not None else ()
    check_nodes(nodes)
    source = open_source(model, headers=True)
    workload = Workload(context_length=context_length, batch_size=batch_size, dtype=dtype)
    # Asked once: a source that has config.json alone builds the list of tensors on every access.
    tensors = source.tensors
    cost = measure_costs(tensors, source.architecture, source.config, workload)
    plan = make_plan(
        model=source.model,
        architecture=source.architecture,
        tensors=tensors,
        folder=source.folder,
        planner=planner,
        cost=cost,
        nodes=nodes,
    )
    plan.validate(source.entries, source.architecture, folder=source.folder)
    if output is not None:
        plan.write(output)
    following = (
        ()
        if output is None
        else _get_slices(output, plan, is_here=not (is_on_hub(model) or is_in_bucket(model)))
    )
    if as_json:
        print_json(plan_values(plan, cost, output=output), next_commands=following)
    else:
        print_text(describe_plan(plan, cost, output=output), next_commands=following)


def _get_slices(plan_file: Path, plan: PartitionPlan, *, is_here: bool) -> tuple[str, ...]:
    """Return the commands that give each node its slice: fetched from where the model is, or cut out of the folder."""
    if is_here:
        return (shlex.join(("mm2-split", "extract", "--plan", str(plan_file), "--all-nodes")),)
    return tuple(
        shlex.join(("mm2-split", "fetch", "--plan", str(plan_file), "--node", slice_.node.name))
        for slice_ in plan.used
    )
