"""`mm2-split plan` at work: a model measured and divided."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

from minimax_tools.checkpoint.layer_faults import warn_of_rounded_router
from minimax_tools.command_line.console import print_json, print_text
from minimax_tools.commands.work.plan_text import describe_plan, plan_values
from minimax_tools.hub.checkpoint_folder import is_in_bucket, is_on_hub
from minimax_tools.model.family import MODEL_TYPE
from minimax_tools.model.quantisation import find_other_format, find_side_format
from minimax_tools.model.rope import warn_of_rotary_width
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.cost_measurement import measure_costs
from minimax_tools.partition.node import Node, check_nodes, read_nodes
from minimax_tools.partition.plan import PartitionPlan, make_plan
from minimax_tools.slices.source import SliceSource, open_source
from minimax_tools.stored_dtype import StoredDtype

logger = logging.getLogger(__name__)


def divide_model(
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
    """Divide a model among machines, write the plan if asked to, and print it."""
    nodes = [Node.parse(text) for text in node_texts]
    nodes += read_nodes(nodes_file) if nodes_file is not None else ()
    check_nodes(nodes)
    source = open_source(model, headers=True)
    if source.config["model_type"] == MODEL_TYPE:
        warn_of_rounded_router(source.headers_known)
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
