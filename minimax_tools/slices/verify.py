"""Verification: the check of a plan, and of the files, slices and runs that were made by it.

| given | checked |
|---|---|
| a plan | the plan against the checkpoint's headers |
| the slices' folders | every byte of them against the source |
| the records of a run (see `read_record`) | what was read against the plan |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minimax_tools.capture.read_record import ReadRecord, read_records
from minimax_tools.errors import UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import is_on_hub
from minimax_tools.json_codec import encode
from minimax_tools.model.architecture import Architecture
from minimax_tools.partition.cost import measure_costs
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices import verdicts
from minimax_tools.slices.description import describe_shape, digest_tensors
from minimax_tools.slices.download import Download, Repository, SharedFile, find_shared_files
from minimax_tools.slices.source import SliceSource, open_source
from minimax_tools.slices.verdicts import Holding, NodeVerification, SliceVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of verifying a plan."""

    plan: PartitionPlan
    model: str  # the checkpoint: a folder or a hub id
    nodes: tuple[NodeVerification, ...]  # evidence about the nodes asked for, in the plan's order
    verdicts: tuple[SliceVerdict, ...]  # on all nodes; on files, folders and records of `nodes` alone
    # Weight files that several nodes of the plan fetch whole; () if the nodes have slices of their own.
    shared_files: tuple[SharedFile, ...] = ()

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
            "nodes": [_node_to_json(node, plan) for node in self.nodes],
            "shared_files": [asdict(file) for file in self.shared_files],
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
    records_read = {} if records is None else read_records(records, sorted(chosen))
    all_nodes = _gather_evidence(plan, source, chosen, slices, records_read, access)
    chosen_nodes = tuple(node for node in all_nodes if node.name in chosen)
    # Without folders of slices, the nodes of a hub's model download whole files.
    fetching = all_nodes if slices is None and is_on_hub(source.model) else ()
    tensors = source.find_tensors()
    # Without headers and index file, config.json may tell the names; None if nothing does.
    names = source.names or frozenset(tensor.name for tensor in tensors or ()) or None
    cost = None
    if tensors is not None:
        cost = measure_costs(tensors, source.architecture, source.config, plan.workload)
    has_folders = slices is not None
    judged = (
        _judge_plan(plan, source),
        verdicts.judge_nodes_differ(all_nodes),
        verdicts.judge_downloads_differ(fetching),
        verdicts.judge_cover_everything(all_nodes, names),
        verdicts.judge_overlap_nowhere(all_nodes, plan.shared),
        verdicts.judge_memory_in_proportion(plan, cost),
        verdicts.judge_nobody_holds_the_whole(all_nodes, names, fetching),
        verdicts.judge_downloads_complete(chosen_nodes, must_be_here=bool(nodes) and not has_folders),
        verdicts.judge_slices_as_planned(chosen_nodes, source.model, has_folders=has_folders),
        verdicts.judge_digests_match(
            chosen_nodes,
            shapes={name: describe_shape(entry) for name, entry in source.headers_known.items()},
            digests=_digest_source(source, {name for node in chosen_nodes for name in node.holding.digests}),
            has_folders=has_folders,
        ),
        verdicts.judge_reads_match(plan, chosen_nodes, has_records=records is not None),
    )
    # A node with a slice of its own fetches no whole file.
    downloads = {} if has_folders else {node.name: node.download for node in all_nodes}
    return Verification(
        plan=plan,
        model=source.model,
        nodes=chosen_nodes,
        verdicts=judged,
        shared_files=find_shared_files(downloads),
    )


def layers_read(record: ReadRecord | None, architecture: Architecture) -> tuple[int, ...] | None:
    """Return the layers of which a run opened tensors, ascending; None without a record."""
    if record is None:
        return None
    layers = {architecture.layer_of(name) for name in record.tensors}
    return tuple(sorted(layer for layer in layers if layer is not None))


def _gather_evidence(
    plan: PartitionPlan,
    source: SliceSource,
    chosen: Set[str],
    slices: Path | None,
    records: Mapping[str, ReadRecord],
    access: HubAccess | None,
) -> tuple[NodeVerification, ...]:
    """Return the evidence about all nodes; folders of slices are read for chosen nodes only."""
    sizes = source.measure_tensors(plan)
    repository = Repository.of(source, plan, access=access)
    gathered = []
    for slice_ in plan.slices:
        name = slice_.node.name
        if slices is None or name not in chosen:
            holding = Holding.planned(slice_, sizes)
        else:
            holding = Holding.found(slice_, slices / name)
        gathered.append(
            NodeVerification(
                slice=slice_,
                download=Download.of(slice_, source, repository),
                holding=holding,
                record=records.get(name),
                layers=layers_read(records.get(name), source.architecture),
                slice_bytes=sum(sizes.get(tensor, 0) for tensor in slice_.names),
            )
        )
    return tuple(gathered)


def _judge_plan(plan: PartitionPlan, source: SliceSource) -> SliceVerdict:
    """Decide whether the plan is whole and the checkpoint's, as far as headers and index file are known."""
    names = source.names
    # If not even the names are known, no header is: None, as an empty mapping would mean a checkpoint without tensors.
    entries = None if names is None else source.headers_known
    faults = plan.find_faults(entries, source.architecture, folder=source.folder, names=names)
    return SliceVerdict.of("plan_is_whole", "the plan agrees with itself and the checkpoint", faults)


def _digest_source(source: SliceSource, names: set[str]) -> dict[str, str]:
    """Compute the sha256 of the named tensors that the source has here."""
    if source.index is None or not names:
        return {}
    return digest_tensors(entry for name, entry in source.index.entries.items() if name in names)


def _node_to_json(node: NodeVerification, plan: PartitionPlan) -> dict[str, Any]:
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
            "bytes_read_over_slice": verdicts.read_over_slice(record, node.slice_bytes)
            if node.slice_bytes
            else None,
        },
    }
