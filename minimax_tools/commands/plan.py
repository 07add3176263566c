"""`mm2-split plan`: a model divided among machines before anything is downloaded."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minimax_tools.checkpoint.layer_faults import warn_of_rounded_router
from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import memory_dtype_option, model_option, output_options
from minimax_tools.errors import format_count
from minimax_tools.hub.checkpoint_folder import is_in_bucket, is_on_hub
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import align_columns
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.quantisation import find_other_format, find_side_format
from minimax_tools.model.rope import warn_of_rotary_width
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import ModelCost, PartCost, Workload, measure_costs
from minimax_tools.partition.node import Node, Planner, check_nodes, read_nodes
from minimax_tools.stored_dtype import StoredDtype

if TYPE_CHECKING:
    from minimax_tools.partition.plan import PartitionPlan, Slice
    from minimax_tools.slices.source import SliceSource


logger = logging.getLogger(__name__)
_SIZE_COLUMNS = ("stored", "loaded", "KV", "activations")
_WORK_COLUMNS = ("parameters", "GFLOPs/token")
_NODE_COLUMNS = ("node", "holds", "share", *_SIZE_COLUMNS, "memory", *_WORK_COLUMNS, "ms/token", "files")
_PART_COLUMNS = ("part", *_SIZE_COLUMNS, *_WORK_COLUMNS)
# Columns that hold words, which are aligned left.
_WORD_COLUMNS = ("node", "holds", "part")


@click.command("plan", cls=Mm2Command)
@model_option
@click.option(
    "--node",
    "node_texts",
    multiple=True,
    metavar="NAME:memory=40GB,tflops=312",
    help="Machine, and the memory that its slice may take. Repeat for several. Planner balanced needs tflops; "
    "manual needs layers=A:B (A to B-1).",
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
    help="Divide layers by memory, by the slowest stage (balanced), or by hand (manual).",
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
def plan_command(
    model: str,
    node_texts: tuple[str, ...],
    nodes_file: Path | None,
    planner: str,
    context_length: int,
    batch_size: int,
    dtype: StoredDtype,
    output: Path | None,
    as_json: bool,
) -> None:
    """Divide a model among machines, and print layers, bytes, memory and time of each.

    Only headers and config.json are read; no weight of a hub's model is downloaded.

    Example: mm2-split plan --model MiniMaxAI/MiniMax-M2 --node a:memory=640GB --node b:memory=80GB --output plan.json
    """
    with loading():
        from minimax_tools.partition.plan import make_plan
        from minimax_tools.slices.source import open_source

    nodes = [Node.parse(text) for text in node_texts]
    nodes += read_nodes(nodes_file) if nodes_file is not None else ()
    check_nodes(nodes)
    source = open_source(model, headers=True)
    family = FAMILIES.get(source.config["model_type"])
    if family is not None:
        warn_of_rounded_router(source.headers_known, family.read_graph(source.config))
        if family.names_rotary_width:
            warn_of_rotary_width(source.config, where=source.model)
    _warn_of_other_format(source)
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


def describe_plan(plan: PartitionPlan, cost: ModelCost, *, output: Path | None) -> str:
    """Return the plan as tables of nodes and of the model's parts, with files and the slowest node."""
    blocks = [
        f"{plan.model}: {format_count(plan.num_hidden_layers, 'layer')} on {len(plan.used)} of "
        f"{format_count(len(plan.slices), 'node')}, by {plan.planner}",
        "\n".join(
            align_columns(
                [_NODE_COLUMNS, *(_node_row(plan, slice_) for slice_ in plan.slices)], words=_WORD_COLUMNS
            )
        ),
        "\n".join(
            align_columns(
                [_PART_COLUMNS, *(_part_row(name, part) for name, part in _parts(cost))], words=_WORD_COLUMNS
            )
        ),
        "\n".join((*_describe_files(plan), *_notes(plan))),
    ]
    if output is not None:
        blocks.append(f"Written to {output}.")
    return "\n\n".join(block for block in blocks if block)


def plan_values(plan: PartitionPlan, cost: ModelCost, *, output: Path | None) -> dict[str, Any]:
    """Return the plan as JSON, without the names of the tensors, which the plan's file lists."""
    from minimax_tools.json_codec import encode

    values = encode(plan)
    del values["schema_version"]  # of the plan's file; the output has its own
    slowest = _slowest(plan)
    nodes = [
        {
            **slice_values,
            "files": list(slice_.files),
            "num_tensors": len(slice_.tensors),
            "share_of_layers": plan.share(slice_),
            "memory_needed_bytes": slice_.cost.memory_bytes,
            "seconds_per_token": slice_.seconds_per_token,
        }
        for slice_, slice_values in zip(plan.slices, values.pop("slices"), strict=True)
    ]
    return {
        **values,
        "nodes": nodes,
        "parts": {name: asdict(part) for name, part in _parts(cost)},
        "layers": [asdict(layer) for layer in cost.layers],
        "slowest_node": None if slowest is None else slowest.node.name,
        "plan": None if output is None else str(output),
    }


def _node_row(plan: PartitionPlan, slice_: Slice) -> tuple[str, ...]:
    cost, node = slice_.cost, slice_.node
    if not slice_.stage.is_used:
        memory = f"0 B of {format_size(node.memory_bytes)}"
        return (node.name, "idle", "", *[""] * len(_SIZE_COLUMNS), memory, *[""] * len(_WORK_COLUMNS), "", "")
    seconds = slice_.seconds_per_token
    return (
        node.name,
        _describe_content(slice_),
        f"{plan.share(slice_):.1%}",
        *_sizes(cost),
        f"{format_size(cost.memory_bytes)} of {format_size(node.memory_bytes)} "
        f"({cost.memory_bytes / node.memory_bytes:.0%})",
        *_work(cost),
        "-" if seconds is None else f"{seconds * 1e3:.4g}",
        str(len(slice_.files)) if slice_.files else "-",
    )


def _part_row(name: str, part: PartCost) -> tuple[str, ...]:
    return (name, *_sizes(part), *_work(part))


def _sizes(cost: PartCost) -> tuple[str, ...]:
    return tuple(
        format_size(size)
        for size in (cost.stored_bytes, cost.loaded_bytes, cost.kv_bytes, cost.activation_bytes)
    )


def _work(cost: PartCost) -> tuple[str, str]:
    return _format_number(cost.num_parameters), f"{cost.flops_per_token / 1e9:.3f}"


def _format_number(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return str(number)


def _describe_content(slice_: Slice) -> str:
    """Return the parts that a slice holds, such as `embedding + layers 0 to 30`."""
    stage = slice_.stage
    parts = ["embedding"] if stage.has_embedding else []
    # A node may have room for the embedding or the head alone.
    if stage.layers:
        parts.append(str(Span(stage.layers.start, stage.layers.stop)))
    return " + ".join([*parts, "head"] if stage.has_head else parts)


def _parts(cost: ModelCost) -> Iterator[tuple[str, PartCost]]:
    """Yield the parts of the model with their costs; neighbouring layers of the same cost are one part."""
    yield "embedding", cost.embedding
    start = 0
    for stop in range(1, len(cost.layers) + 1):
        if stop == len(cost.layers) or cost.layers[stop] != cost.layers[start]:
            span = Span(start, stop)
            yield f"each of {span}" if len(span) > 1 else str(span), cost.layers[start]
            start = stop
    yield "final norm", cost.final_norm
    yield "lm_head, tied" if cost.is_tied else "lm_head", cost.lm_head
    if cost.rest != PartCost():  # tensors of no part above
        yield "else stored", cost.rest
    yield "whole model", cost.whole


def _describe_files(plan: PartitionPlan) -> Iterator[str]:
    for slice_ in plan.used:
        if slice_.files:
            yield f"{slice_.node.name} reads {', '.join(slice_.files)}"
    if not any(slice_.files for slice_ in plan.used):
        yield "Which files hold what is not known yet: this plan is from config.json alone."


def _notes(plan: PartitionPlan) -> Iterator[str]:
    for name, reason in plan.shared.items():
        yield f"{name} is held twice: {reason}."
    slowest = _slowest(plan)
    if slowest is not None and slowest.seconds_per_token is not None:
        total = sum(slice_.seconds_per_token or 0.0 for slice_ in plan.used)
        yield (
            f"{slowest.node.name} bounds the pipeline: {slowest.seconds_per_token * 1e3:.4g} ms for a token, "
            f"{1 / slowest.seconds_per_token:.4g} tokens/s; through all nodes a token takes {total * 1e3:.4g} ms."
        )
    else:
        fullest = max(plan.used, key=lambda slice_: slice_.cost.memory_bytes / slice_.node.memory_bytes)
        yield f"{fullest.node.name} is the fullest node; give tflops to learn which is the slowest."


def _slowest(plan: PartitionPlan) -> Slice | None:
    """Return the node that bounds the pipeline; None if a node's throughput is unknown."""
    if any(slice_.seconds_per_token is None for slice_ in plan.used):
        return None
    return max(plan.used, key=lambda slice_: slice_.seconds_per_token or 0.0)


def _warn_of_other_format(source: SliceSource) -> None:
    """Log what a plan of weights in a format that mm2 does not read is worth."""
    named, beside = find_other_format(source.config), find_side_format(source.folder, source.config)
    if named is not None:
        found = named.found
    elif beside is not None:
        found = beside[1]
    else:
        return
    logger.warning(
        "The weights are in a format that mm2 does not read: %s. The files are divided as they are; parameters and "
        "sizes are those of the packed tensors, and mm2-gpu refuses the checkpoint.",
        found,
    )


def _get_slices(plan_file: Path, plan: PartitionPlan, *, is_here: bool) -> tuple[str, ...]:
    """Return the commands that give each node its slice: fetched from where the model is, or cut out of the folder."""
    if is_here:
        return (shlex.join(("mm2-split", "extract", "--plan", str(plan_file), "--all-nodes")),)
    return tuple(
        shlex.join(("mm2-split", "fetch", "--plan", str(plan_file), "--node", slice_.node.name))
        for slice_ in plan.used
    )
