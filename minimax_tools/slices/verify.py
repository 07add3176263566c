"""Verification: the check of a plan, and of the files, slices and runs that were made by it.

| given | checked |
|---|---|
| a plan | the plan against the checkpoint's headers |
| the slices' folders | every byte of them against the source |
| the records of a run (see `read_record`) | what was read against the plan |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minimax_tools.capture.read_record import ReadRecord, read_records
from minimax_tools.errors import UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import is_on_hub
from minimax_tools.json_codec import encode
from minimax_tools.model.architecture import Architecture
from minimax_tools.partition.cost import ModelCost
from minimax_tools.partition.cost_measurement import measure_costs
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.digest import digest_tensor, word_shape
from minimax_tools.slices.download import Download, Repository
from minimax_tools.slices.holding import Holding
from minimax_tools.slices.source import SliceSource, open_source
from minimax_tools.slices.verdicts import (
    NodeVerification,
    SliceVerdict,
    judge_cover_everything,
    judge_digests_match,
    judge_downloads_complete,
    judge_downloads_differ,
    judge_memory_in_proportion,
    judge_nobody_holds_the_whole,
    judge_nodes_differ,
    judge_overlap_nowhere,
    judge_reads_match,
    judge_slices_as_planned,
    read_over_slice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of verifying a plan.

    Args:
        plan: The plan.
        model: The checkpoint: a folder or a hub id.
        nodes: Evidence about the nodes asked for, in the plan's order.
        verdicts: Verdicts over all nodes.
    """

    plan: PartitionPlan
    model: str
    nodes: tuple[NodeVerification, ...]
    verdicts: tuple[SliceVerdict, ...]

    @property
    def holds(self) -> bool:
        """True if no verdict fails."""
        return all(verdict.holds is not False for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """Return the verification as `mm2-split verify --json` prints it."""
        plan = self.plan
        return {
            "model": self.model,
            "planner": plan.planner,
            "num_hidden_layers": plan.num_hidden_layers,
            "active_nodes": len(plan.used),
            "total_layers_assigned": sum(len(slice_.stage.layers) for slice_ in plan.slices),
            "partition_map": [
                {
                    "node": slice_.node.name,
                    "layers": encode(slice_.stage.layers),
                    "num_layers": len(slice_.stage.layers),
                    "share": plan.share(slice_),
                    "memory_weight": list(plan.memory_weight(slice_)),
                    "has_embedding": slice_.stage.has_embedding,
                    "has_head": slice_.stage.has_head,
                }
                for slice_ in plan.slices
            ],
            "nodes": [_node_values(node, plan) for node in self.nodes],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "holds": self.holds,
        }


def verify(
    plan: PartitionPlan,
    *,
    nodes: Sequence[str] = (),
    model: str | None = None,
    slices: Path | None = None,
    records: Path | None = None,
    access: HubAccess | None = None,
) -> Verification:
    """Verify a plan, and the files, slices and runs made by it.

    Args:
        plan: The plan.
        nodes: Names of nodes whose files, folders and records are checked; empty for all. Missing files are a fault
            only for nodes named here and without `slices`: this machine need not have the files of other nodes, and
            a node with a slice needs no files.
        model: Folder or hub id of the checkpoint; None for the plan's. Files that are not here are judged by the
            index file and the plan.
        slices: The folder that holds `{node}/` for each node, as `mm2-split extract` writes them.
        records: The folder that holds `{node}.json` for each node, or a capture directory (see `read_record`).
        access: The hub; None for the one that the environment names.

    Raises:
        UsageError: The plan has no such node, or a folder is not there.
        CheckpointError: The checkpoint is not there or damaged, or the hub does not answer.
        CannotRunError: A record cannot be read.
    """
    chosen = {plan.slice_of(node).node.name for node in nodes or [slice_.node.name for slice_ in plan.slices]}
    for folder in (slices, records):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{folder} is no folder", next_step="Name the folder that holds one per node.")
    source = open_source(model or plan.model, headers=True, access=access)
    sizes = source.measure_tensors(plan)
    run = {} if records is None else read_records(records, sorted(chosen))
    repository = Repository.of(source, plan, access=access)
    every = [
        NodeVerification(
            slice=slice_,
            download=Download.of(slice_, source, repository),
            holding=Holding.planned(slice_, sizes)
            if slices is None or slice_.node.name not in chosen
            else Holding.found(slice_, slices / slice_.node.name),
            record=run.get(slice_.node.name),
            layers=layers_read(run.get(slice_.node.name), source.architecture),
            slice_bytes=sum(sizes.get(name, 0) for name in slice_.names),
        )
        for slice_ in plan.slices
    ]
    found = tuple(node for node in every if node.name in chosen)
    fetching = every if slices is None and is_on_hub(source.model) else []
    names = source.names or frozenset(tensor.name for tensor in source.find_tensors() or ()) or None
    has_folders = slices is not None
    verdicts = (
        _judge_plan(plan, source),
        judge_nodes_differ(every),
        judge_downloads_differ(fetching),
        judge_cover_everything(every, names),
        judge_overlap_nowhere(every, plan.shared),
        judge_memory_in_proportion(plan, _measure_costs(plan, source)),
        judge_nobody_holds_the_whole(every, names, fetching),
        judge_downloads_complete(found, must_be_here=bool(nodes) and not has_folders),
        judge_slices_as_planned(found, source.model, has_folders=has_folders),
        judge_digests_match(
            found,
            shapes={name: word_shape(entry) for name, entry in source.headers_known.items()},
            digests=_source_digests(source, {name for node in found for name in node.holding.digests}),
            has_folders=has_folders,
        ),
        judge_reads_match(plan, found, has_records=records is not None),
    )
    return Verification(plan=plan, model=source.model, nodes=found, verdicts=verdicts)


def layers_read(record: ReadRecord | None, architecture: Architecture) -> tuple[int, ...] | None:
    """Return the layers of which a run opened tensors, ascending; None without a record."""
    if record is None:
        return None
    found = {architecture.layer_of(name) for name in record.tensors}
    return tuple(sorted(layer for layer in found if layer is not None))


def _judge_plan(plan: PartitionPlan, source: SliceSource) -> SliceVerdict:
    """Decide whether the plan is whole and the checkpoint's, as far as headers and index file are known."""
    names = source.names
    entries = None if names is None else source.headers_known
    faults = plan.find_faults(entries, source.architecture, folder=source.folder, names=names)
    return SliceVerdict.of("plan_is_whole", "the plan agrees with itself and the checkpoint", faults)


def _measure_costs(plan: PartitionPlan, source: SliceSource) -> ModelCost | None:
    """Return the cost of the model's parts by its own tensors; None if they are not known."""
    tensors = source.find_tensors()
    if tensors is None:
        return None
    return measure_costs(tensors, source.architecture, source.config, plan.workload)


def _source_digests(source: SliceSource, names: set[str]) -> dict[str, str]:
    """Compute the sha256 of the named tensors that the source has here."""
    if source.index is None or not names:
        return {}
    with source.open() as reader:
        return {
            name: digest_tensor(reader, entry)
            for name, entry in source.index.entries.items()
            if name in names
        }


def _node_values(node: NodeVerification, plan: PartitionPlan) -> dict[str, Any]:
    download, record, holding = node.download, node.record, node.holding
    share = plan.share(node.slice)
    return {
        "node": node.name,
        "partition_index": plan.slices.index(node.slice),
        "layers": encode(node.slice.stage.layers),
        "share": share,
        "memory_reduction": 1 - share,
        "num_tensors": len(node.slice.tensors),
        "slice_bytes": node.slice_bytes,
        "allow_patterns": list(download.patterns),
        "download": {
            "num_repository_files": len(download.repository.sizes),
            "repository_bytes": download.repository.size_bytes,
            "is_repository_known": download.repository.is_known,
            "num_files": len(download.files),
            "expected_bytes": download.size_bytes,
            "actual_bytes": download.actual_bytes,
            "reduction": download.reduction,
            "is_complete": download.is_complete,
            "files": [{**asdict(file), "is_complete": file.is_complete} for file in download.files],
        },
        "folder": None if holding.folder is None else str(holding.folder),
        "source": holding.source,
        "digest": holding.digest if holding.digests else None,
        "digests": dict(holding.digests),
        "runtime": {
            "is_seen": record is not None,
            "loaded_layers": None if node.layers is None else list(node.layers),
        },
        "reads": None
        if record is None
        else {
            "num_tensors": len(record.tensors),
            "bytes_asked": record.bytes_asked,
            "bytes_read": record.bytes_read,
            "bytes_read_again": record.bytes_read_again,
            "bytes_read_over_slice": read_over_slice(record, node.slice_bytes) if node.slice_bytes else None,
        },
    }
