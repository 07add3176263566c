"""Plans that slices are cut by: one of stages, as `mm2-split plan` writes it, or one of tensor names (`ModelSplitter`).

In ModelSplitter's interface a slice is called the shard of its node, and `layer_names` are names of tensors.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import UsageError, format_count, list_faults
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.weight_names import SCALE_SUFFIX, scale_name
from minimax_tools.partition.node import is_node_name
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.description import DEFAULT_FOLDER, FileFormat, SliceDescription
from minimax_tools.slices.folder import SliceCut, cut_slice, write_slice
from minimax_tools.slices.source import open_source
from minimax_tools.slices.stored_weights import StoredWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """The tensors of one node.

    Args:
        node_id: Name of the node.
        layer_names: Full names of its tensors in the checkpoint.
        total_compute: Compute that they need.
        compute_utilization: Fraction of the time that the node is busy, 0 to 1.

    Raises:
        UsageError: The node's name cannot name a folder, the compute is negative, or the utilization is not
            between 0 and 1.
    """

    node_id: str
    layer_names: Sequence[str]
    total_compute: float
    compute_utilization: float

    def __post_init__(self) -> None:
        if not is_node_name(self.node_id):
            raise UsageError(
                f"{self.node_id!r} is no node: its shard goes into a folder of that name",
                expected="letters, digits, '.', '_' and '-', the first a letter or a digit",
            )
        if not self.total_compute >= 0 or not 0 <= self.compute_utilization <= 1:
            raise UsageError(
                f"the split plan of {self.node_id} is invalid",
                expected="a total_compute of 0 or more and a compute_utilization of 0 to 1",
                found=f"{self.total_compute} and {self.compute_utilization}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """A model to split."""

    model_name: str  # name of the model, for the log
    model_path: str | Path  # the checkpoint's folder
    split_plan: Mapping[str, SplitPlan]  # tensors of each node, by node
    # Folder for the shards, each in a folder of its node's name; None for ./model_shards.
    output_dir: str | Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """A shard that was written."""

    node_id: str  # name of the node
    shard_path: Path  # the `.pth` file, or the folder of safetensors
    layer_names: tuple[str, ...]  # names of its tensors, sorted, block scales included
    total_params: int  # number of weights; block scales do not count
    shard_size_mb: float  # size of the tensors' data, in 10⁶ bytes


class ModelSplitter:
    """Splitter of checkpoints of any architecture.

    Args:
        file_format: One `.pth` state dict, or safetensors, in the shard's folder.
    """

    def __init__(self, *, file_format: FileFormat = FileFormat.PTH) -> None:
        self._file_format = file_format

    async def split_model(self, config: SplitConfig, node_id: str) -> SplitResult:
        """Run `split_model_sync` in a thread."""
        return await asyncio.to_thread(self.split_model_sync, config, node_id)

    def split_model_sync(self, config: SplitConfig, node_id: str) -> SplitResult:
        """Write a node's shard, or find the same shard there already, equal byte for byte.

        Block scales go with their weights even if the plan does not name them. Only this node's names are checked:
        the plan may leave out the rest of the model (see `validate_split_plan`).

        Raises:
            UsageError: There is no such node, it has unknown or repeated names, or the shard's folder holds
                something else.
            CheckpointError: The checkpoint cannot be read, or the shard cannot be written.
        """
        cut = self.cut_shard(config, node_id)
        folder = DEFAULT_FOLDER if config.output_dir is None else Path(config.output_dir)
        written = write_slice(cut, folder / node_id)
        is_pth = self._file_format is FileFormat.PTH
        return SplitResult(
            node_id=node_id,
            shard_path=written.files[0] if is_pth else written.folder,
            layer_names=tuple(cut.description.tensors),
            total_params=sum(
                math.prod(entry.shape) for entry in cut.entries if not entry.name.endswith(SCALE_SUFFIX)
            ),
            shard_size_mb=cut.size_bytes / 1e6,
        )

    def cut_shard(
        self, config: SplitConfig, node_id: str, *, shard_size_bytes: int | None = None
    ) -> SliceCut:
        """Return a node's shard before it is written; `shard_size_bytes` is as for `SliceCut.of`.

        Raises:
            UsageError: There is no such node, or it has unknown or repeated names.
            CheckpointError: The checkpoint cannot be read.
        """
        if node_id not in config.split_plan:
            raise UsageError(
                f"the split plan has no node {node_id!r}", expected="one of " + ", ".join(config.split_plan)
            )
        plan = config.split_plan[node_id]
        if plan.node_id != node_id:
            raise _faulty([f"the plan of {node_id} names node {plan.node_id}"])
        logger.info("Splitting %s: the tensors of %s", config.model_name, node_id)
        source = StoredWeights.of(str(config.model_path))
        # Also tensors whose shard is not here (`absent`): `SliceCut.of` says which shard it is.
        stored_names = {*source.headers.names, *source.headers.absent}
        faults = _find_name_faults(plan.layer_names, stored_names, node_id)
        if faults:
            raise _faulty(faults)
        shard_names = sorted({*plan.layer_names, *_scales_of(plan.layer_names, stored_names)})
        description = SliceDescription(
            node=node_id,
            layers=None,  # the tensors were chosen by name
            has_embedding=None,
            has_head=None,
            source=source.model,
            tensors=dict.fromkeys(shard_names),  # without digests
        )
        return SliceCut.of(
            source, description, file_format=self._file_format, shard_size_bytes=shard_size_bytes
        )

    @staticmethod
    def validate_split_plan(all_layers: Collection[str], split_plan: Mapping[str, SplitPlan]) -> None:
        """Raise unless every tensor goes to exactly one node.

        Block scales go with their weights and need not be named; if named, they must be with them.

        Args:
            all_layers: Names of all tensors of the checkpoint.
            split_plan: Tensors of each node, by node.

        Raises:
            UsageError: A tensor has no node, two nodes or an unknown name, or is repeated; scales lack their weight;
                or a node's plan has another node's name. All faults are listed.
        """
        stored_names = set(all_layers)
        faults: list[str] = []
        holders: dict[str, list[str]] = {}
        for node_id, plan in split_plan.items():
            if plan.node_id != node_id:
                faults.append(f"the plan of {node_id} names node {plan.node_id}")
            faults += _find_name_faults(plan.layer_names, stored_names, node_id)
            for name in {*plan.layer_names, *_scales_of(plan.layer_names, stored_names)}:
                holders.setdefault(name, []).append(node_id)
        faults += [f"{name} is not assigned" for name in all_layers if name not in holders]
        faults += [
            f"{name} is assigned to {' and '.join(nodes)}"
            for name, nodes in sorted(holders.items())
            if len(nodes) > 1
        ]
        if faults:
            raise _faulty(faults)


def read_split_plans(path: Path) -> dict[str, SplitPlan]:
    """Read split plans from a JSON file, by node.

    The file is an object by node. A node has a list of tensor names, or an object with `layer_names` and, if known,
    `node_id`, `total_compute` and `compute_utilization`.

    Raises:
        UsageError: The file is of another form, or a plan in it is invalid.
    """
    try:
        nodes = read_own_json(path)
        return {node: _parse_split_plan(node, value) for node, value in nodes.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path} is no plan of names",
            expected='{"node_001": {"layer_names": ["model.norm.weight", …]}}',
            found=f"{type(error).__name__}: {error}",
            next_step="List each node's tensors by their names in the checkpoint.",
        ) from error


def _parse_split_plan(node: str, value: object) -> SplitPlan:
    fields = {"layer_names": value} if isinstance(value, list) else value
    if not isinstance(fields, dict) or not isinstance(fields["layer_names"], list):
        raise TypeError(f"{node} has no list of layer_names")
    if not all(isinstance(name, str) for name in fields["layer_names"]):
        raise TypeError(f"layer_names of {node} are not all names")
    return SplitPlan(**{"node_id": node, "total_compute": 0.0, "compute_utilization": 0.0, **fields})


def _scales_of(names: Collection[str], stored_names: Set[str]) -> Set[str]:
    """Return the block scales of these weights that the checkpoint has."""
    return stored_names & {scale_name(name) for name in names if name.endswith(".weight")}


def _find_name_faults(names: Sequence[str], stored_names: Set[str], node_id: str) -> list[str]:
    """Describe the names that a node gets twice, that the checkpoint lacks, and scales without their weight."""
    if not names:
        return [f"{node_id} gets nothing"]
    counts = Counter(names)
    faults = [f"{node_id} gets {name} twice" for name, count in sorted(counts.items()) if count > 1]
    for name in sorted(counts):
        weight = name.removesuffix(SCALE_SUFFIX) + ".weight"
        if name not in stored_names:
            faults.append(f"{node_id} gets {name}, which the checkpoint lacks")
        elif name.endswith(SCALE_SUFFIX) and weight not in counts:
            faults.append(f"{node_id} gets {name} without its weight")
    return faults


def _faulty(faults: list[str]) -> UsageError:
    return UsageError(
        f"the split plan has {format_count(len(faults), 'fault')}",
        found=list_faults(faults),
        next_step="Use the exact names of the checkpoint's tensors.",
    )


def stage_cuts(
    path: Path,
    nodes: Sequence[str],
    *,
    model: str | None,
    file_format: FileFormat,
    shard_size_bytes: int | None,
) -> Iterator[SliceCut]:
    """Yield the slices of nodes along a plan that `mm2-split plan` wrote; without nodes, of all that hold something.

    All slices are cut only if together they make up the checkpoint.
    """
    whole = None if nodes else PartitionPlan.read(path)
    if whole is not None:
        source = open_source(model or whole.model)
        whole.validate(source.entries, source.architecture, folder=source.folder)
        nodes = [slice_.node.name for slice_ in whole.used]
    for node in nodes:
        # The tensor lists of all slices take a hundred megabytes, so of a single node only its own is read.
        plan = whole or PartitionPlan.read(path, tensors_of=node)
        weights = StoredWeights.of_slice(model or plan.model, plan.slice_of(node))
        yield cut_slice(plan, node, weights, file_format=file_format, shard_size_bytes=shard_size_bytes)


def named_cuts(
    path: Path,
    nodes: Sequence[str],
    *,
    model: str | None,
    file_format: FileFormat,
    shard_size_bytes: int | None,
) -> Iterator[SliceCut]:
    """Yield the slices of nodes along a plan of tensor names, as `stage_cuts` does; it does not name its checkpoint."""
    if model is None:
        raise UsageError("a plan of names does not say of which checkpoint it is", expected="--model FOLDER")
    config = SplitConfig(model_name=model, model_path=model, split_plan=read_split_plans(path))
    if not nodes:
        headers = StoredWeights.of(model).headers
        ModelSplitter.validate_split_plan({*headers.names, *headers.absent}, config.split_plan)
    for node in nodes or config.split_plan:
        splitter = ModelSplitter(file_format=file_format)
        yield splitter.cut_shard(config, node, shard_size_bytes=shard_size_bytes)
