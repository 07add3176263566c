"""ModelSplitter: a node's tensors, chosen by name, cut out of a checkpoint.

A split plan is a list of tensor names for each node, whoever made it; `split_plans` makes one of a PartitionPlan.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import UsageError, list_faults
from minimax_tools.model.weight_names import SCALE_SUFFIX, scale_name
from minimax_tools.partition.node import is_node_name
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.cut import FileFormat, SliceCut
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.extract import DEFAULT_FOLDER
from minimax_tools.slices.folder import write_slice
from minimax_tools.slices.stored_weights import StoredWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """What one node gets.

    Args:
        node_id: The node.
        layer_names: Full names of its tensors, as the checkpoint has them.
        total_compute: What they take, in FLOPs per token where `split_plans` made the plan.
        compute_utilization: How busy the node will be, 0 to 1.

    Raises:
        UsageError: The node's name is none for a folder, the compute is below zero, or the utilization not between 0
            and 1.
    """

    node_id: str
    layer_names: Sequence[str]
    total_compute: float
    compute_utilization: float

    def __post_init__(self) -> None:
        if not is_node_name(self.node_id):
            raise UsageError(
                f"{self.node_id!r} is no node: its shard goes to a folder of that name",
                expected="letters, digits, '.', '_' and '-', the first a letter or a digit",
            )
        if not self.total_compute >= 0 or not 0 <= self.compute_utilization <= 1:
            raise UsageError(
                f"the split plan of {self.node_id} cannot be",
                expected="a total_compute of 0 or more and a compute_utilization of 0 to 1",
                found=f"{self.total_compute} and {self.compute_utilization}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """What is split.

    Args:
        model_name: What the model is called, for people.
        model_path: The checkpoint's folder.
        split_plan: What each node gets, by node.
        output_dir: Folder in which each node's shard becomes a folder of the node's name; ./model_shards where None.
    """

    model_name: str
    model_path: str | Path
    split_plan: Mapping[str, SplitPlan]
    output_dir: str | Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """What was written.

    Args:
        node_id: The node.
        shard_path: The folder of safetensors, or the `.pth` file.
        layer_names: The tensors it holds, sorted; block scales included.
        total_params: Their weights; block scales are none.
        shard_size_mb: Size of their data, in 10⁶ bytes.
    """

    node_id: str
    shard_path: Path
    layer_names: tuple[str, ...]
    total_params: int
    shard_size_mb: float


class ModelSplitter:
    """Cuts a node's tensors out of a checkpoint of any architecture.

    Args:
        file_format: A folder of safetensors, or a `.pth` state dict in it.
    """

    def __init__(self, *, file_format: FileFormat = FileFormat.SAFETENSORS) -> None:
        self._file_format = file_format

    def split_model(
        self, config: SplitConfig, node_id: str, *, progress: Progress | None = None
    ) -> SplitResult:
        """Write the node's shard; one that is there already, byte for byte, is left as it is.

        Block scales go with their weights, whether they are named or not. Only this node's names are looked at: the
        plan may leave out the rest of the model (see `validate_split_plan`).

        Raises:
            UsageError: There is no such node, or its names are not the checkpoint's, each once; or something else
                lies where the shard is to be.
            CheckpointError: The checkpoint cannot be read, or the shard not be written.
        """
        if node_id not in config.split_plan:
            raise UsageError(
                f"the split plan has no node {node_id!r}", expected="one of " + ", ".join(config.split_plan)
            )
        own = config.split_plan[node_id]
        if own.node_id != node_id:
            raise _faulty([f"the plan of {node_id} names node {own.node_id}"])
        names = own.layer_names
        logger.info("Splitting %s: the tensors of %s", config.model_name, node_id)
        source = StoredWeights.of(str(config.model_path))
        known = {*source.headers.names, *source.headers.absent}
        faults = _find_name_faults(names, known, node_id)
        if faults:
            raise _faulty(faults)
        held = sorted({*names, *(_scales_of(names, known))})
        description = SliceDescription(
            node=node_id,
            layers=None,
            has_embedding=None,
            has_head=None,
            source=source.model,
            tensors=dict.fromkeys(held),
        )
        cut = SliceCut.of(source, description, file_format=self._file_format)
        folder = DEFAULT_FOLDER if config.output_dir is None else Path(config.output_dir)
        written = write_slice(cut, folder / node_id, progress=progress)
        is_pth = self._file_format is FileFormat.PTH
        return SplitResult(
            node_id=node_id,
            shard_path=written.files[0] if is_pth else written.folder,
            layer_names=tuple(held),
            total_params=sum(
                math.prod(entry.shape) for entry in cut.entries if not entry.name.endswith(SCALE_SUFFIX)
            ),
            shard_size_mb=cut.size_bytes / 1e6,
        )

    async def split_model_async(self, config: SplitConfig, node_id: str) -> SplitResult:
        """`split_model` in a thread of its own; cancelled, it stops after the file it is at and leaves nothing."""
        progress = _UntilCancelled()
        try:
            return await asyncio.to_thread(self.split_model, config, node_id, progress=progress)
        except asyncio.CancelledError:
            progress.cancelled.set()
            raise

    @staticmethod
    def validate_split_plan(
        all_layers: Collection[str], split_plan: Mapping[str, SplitPlan], *, shared: Collection[str] = ()
    ) -> None:
        """Pass where every tensor goes to exactly one node.

        Block scales go with their weights and need not be named; named, they must lie with them.

        Args:
            all_layers: Names of all tensors of the checkpoint.
            split_plan: What each node gets, by node.
            shared: Tensors that several nodes hold on purpose, as an embedding that the lm_head is tied to.

        Raises:
            UsageError: With everything that is wrong: tensors of no node, of two nodes, unknown or named twice,
                scales without their weights, nodes under another's name.
        """
        known = set(all_layers)
        faults: list[str] = []
        holders: dict[str, list[str]] = {}
        for node_id, plan in split_plan.items():
            if plan.node_id != node_id:
                faults.append(f"the plan of {node_id} names node {plan.node_id}")
            faults += _find_name_faults(plan.layer_names, known, node_id)
            for name in {*plan.layer_names, *_scales_of(plan.layer_names, known)}:
                holders.setdefault(name, []).append(node_id)
        faults += [f"{name} is not assigned" for name in all_layers if name not in holders]
        faults += [
            f"{name} is assigned to {' and '.join(nodes)}"
            for name, nodes in sorted(holders.items())
            if len(nodes) > 1 and name not in shared
        ]
        if faults:
            raise _faulty(faults)


def split_plans(plan: PartitionPlan) -> dict[str, SplitPlan]:
    """The plan as tensor names by node; nodes that hold nothing are left out.

    The utilization is the node's time for a token over that of the slowest node: a pipeline is as fast as that one.
    Where a node's throughput is unknown, all are taken as equally fast.
    """
    speeds = [slice_.node.tflops for slice_ in plan.used]
    is_known = None not in speeds
    times = {
        slice_.node.name: slice_.cost.flops_per_token / ((slice_.node.tflops or 1.0) if is_known else 1.0)
        for slice_ in plan.used
    }
    slowest = max(times.values()) or 1.0
    return {
        slice_.node.name: SplitPlan(
            node_id=slice_.node.name,
            layer_names=slice_.names,
            total_compute=float(slice_.cost.flops_per_token),
            compute_utilization=times[slice_.node.name] / slowest,
        )
        for slice_ in plan.used
    }


class _UntilCancelled(NoProgress):
    """Ends the thread that tells it of progress, once nobody waits for it."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def advance(self, layer: int, *, num_bytes: int) -> None:
        if self.cancelled.is_set():
            raise asyncio.CancelledError


def _scales_of(names: Collection[str], known: Collection[str]) -> set[str]:
    """The block scales of these weights, where the checkpoint has them."""
    return {scale_name(name) for name in names if name.endswith(".weight")}.intersection(known)


def _find_name_faults(names: Sequence[str], known: Collection[str], node_id: str) -> list[str]:
    known, own = set(known), set(names)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    faults = [f"{node_id} gets {name} twice" for name in twice]
    for name in sorted(own):
        weight = name.removesuffix(SCALE_SUFFIX) + ".weight"
        if name not in known:
            faults.append(f"{node_id} gets {name}, which the checkpoint lacks")
        elif name.endswith(SCALE_SUFFIX) and weight not in own:
            faults.append(f"{node_id} gets {name} without its weight")
    return faults if names else [*faults, f"{node_id} gets nothing"]


def _faulty(faults: list[str]) -> UsageError:
    return UsageError(
        f"the split plan has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
        found=list_faults(faults),
        next_step="Names must be the checkpoint's tensors', letter by letter.",
    )
