"""Verification: who loads which slice of a model, what of it is here, and whether all of it adds up.

A plan alone is held against the checkpoint's headers. With the slices' folders every byte of them is read and held
against the source; with the records of a run (see `read_record`), what was read is held against the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minimax_tools.capture.read_record import ReadRecord, read_records
from minimax_tools.errors import UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import is_on_hub
from minimax_tools.model.architecture import Architecture
from minimax_tools.partition.cost import ModelCost, measure_costs
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.digest import digest_tensor, word_shape
from minimax_tools.slices.download import Download, Repository
from minimax_tools.slices.holding import Holding
from minimax_tools.slices.source import SliceSource, open_source
from minimax_tools.slices.verdicts import (
    SliceVerdict,
    judge_coverage,
    judge_difference,
    judge_digests,
    judge_downloads,
    judge_files,
    judge_overlap,
    judge_proportion,
    judge_reads,
    judge_slices,
    judge_whole,
    read_over_slice,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerification:
    """One node: what it is to load, and what was found of it.

    Args:
        slice: Its part of the plan.
        download: Its files.
        holding: What it holds: its folder where one was given, else as planned.
        record: What it read in a run; None where nobody noted it.
        layers: The layers that it loaded, as the record has it; None where there is none.
        slice_bytes: Of its tensors.
    """

    slice: Slice
    download: Download
    holding: Holding
    record: ReadRecord | None
    layers: tuple[int, ...] | None
    slice_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found of a plan.

    Args:
        plan: The plan.
        model: Where the checkpoint was looked for.
        nodes: Those asked for, in the plan's order.
        verdicts: Over all nodes.
    """

    plan: PartitionPlan
    model: str
    nodes: tuple[NodeVerification, ...]
    verdicts: tuple[SliceVerdict, ...]

    @property
    def holds(self) -> bool:
        """Whether no verdict fails."""
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
                    "layers": [slice_.stage.layers.start, slice_.stage.layers.stop],
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
    """Verify a plan, and what was made along it.

    Args:
        plan: Who holds what.
        nodes: The nodes whose files, folders and records are looked at; none for all. Their downloads are judged
            where they are named and no folders are given: this machine need not have the others' files, and who has
            a slice needs none.
        model: Where the checkpoint is, if not where the plan says. A node's machine may have the node's files alone:
            what is not here is judged by the index file and the plan.
        slices: The folder that holds `{node}/` as `mm2-split extract` writes them.
        records: The folder that holds `{node}.json`, or a capture directory (see `read_record`).
        access: The hub; None for the one that the environment names.

    Raises:
        UsageError: The plan has no such node, or a folder is not there.
        CheckpointError: The checkpoint is not there or damaged, or the hub does not answer.
        CannotRunError: A record cannot be read.
    """
    chosen = _choose(plan, nodes)
    for folder in (slices, records):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"{folder} is no folder", next_step="Name the folder that holds one per node.")
    source = open_source(model or plan.model, headers=True, access=access)
    sizes = source.measure_tensors(plan)
    holdings = {slice_.node.name: Holding.planned(slice_, sizes) for slice_ in plan.slices}
    if slices is not None:
        holdings |= {slice_.node.name: Holding.found(slice_, slices / slice_.node.name) for slice_ in chosen}
    run = read_records(records, [slice_.node.name for slice_ in chosen]) if records is not None else {}
    repository = Repository.of(source, plan, access=access)
    downloads = {slice_.node.name: Download.of(slice_, source, repository) for slice_ in plan.slices}
    fetched = downloads if slices is None and is_on_hub(source.model) else {}
    found = tuple(
        NodeVerification(
            slice=slice_,
            download=downloads[slice_.node.name],
            holding=holdings[slice_.node.name],
            record=run.get(slice_.node.name),
            layers=layers_read(run.get(slice_.node.name), source.architecture),
            slice_bytes=sum(sizes.get(name, 0) for name in slice_.names),
        )
        for slice_ in chosen
    )
    names = source.names or frozenset(tensor.name for tensor in source.find_tensors() or ()) or None
    verdicts = [
        _judge_plan(plan, source),
        judge_difference(plan.slices, holdings),
        judge_files(fetched),
        judge_coverage(holdings, names),
        judge_overlap(holdings, plan.shared),
        judge_proportion(plan, _measure_costs(plan, source)),
        judge_whole(holdings, names, fetched),
        _judge_downloads(
            {node.slice.node.name: node.download for node in found}, is_here=bool(nodes) and slices is None
        ),
        *_judge_folders(chosen, holdings, source, slices=slices),
        judge_reads(plan, chosen, None if records is None else run, sizes),
    ]
    return Verification(plan=plan, model=source.model, nodes=found, verdicts=tuple(verdicts))


def layers_read(record: ReadRecord | None, architecture: Architecture) -> tuple[int, ...] | None:
    """The layers of which a run opened tensors, ascending; None where nobody noted what it read."""
    if record is None:
        return None
    found = {architecture.layer_of(name) for name in record.tensors}
    return tuple(sorted(layer for layer in found if layer is not None))


def _choose(plan: PartitionPlan, nodes: Sequence[str]) -> tuple[Slice, ...]:
    for node in nodes:
        plan.slice_of(node)
    return tuple(slice_ for slice_ in plan.slices if not nodes or slice_.node.name in nodes)


def _judge_plan(plan: PartitionPlan, source: SliceSource) -> SliceVerdict:
    """Whether the plan is the checkpoint's, as far as headers and index file tell here."""
    names = source.names
    entries = None if names is None else source.headers_known
    faults = plan.find_faults(entries, source.architecture, folder=source.folder, names=names)
    return SliceVerdict.of("plan_is_whole", "the plan agrees with itself and the checkpoint", faults)


def _measure_costs(plan: PartitionPlan, source: SliceSource) -> ModelCost | None:
    """What the parts of the model take, whatever the plan says of it; None where its tensors are not known."""
    tensors = source.find_tensors()
    if tensors is None:
        return None
    return measure_costs(tensors, source.architecture, source.config, plan.workload)


def _judge_downloads(downloads: Mapping[str, Download], *, is_here: bool) -> SliceVerdict:
    verdict = judge_downloads(downloads)
    if is_here or verdict.holds:
        return verdict
    here = ", ".join(node for node, download in downloads.items() if download.is_complete) or "none"
    reason = f"only of nodes asked for by name, and without --slices; complete here: {here}"
    return SliceVerdict.open(verdict.name, verdict.claim, reason)


def _judge_folders(
    chosen: Sequence[Slice], holdings: Mapping[str, Holding], source: SliceSource, *, slices: Path | None
) -> tuple[SliceVerdict, SliceVerdict]:
    as_planned = judge_slices(chosen, holdings, source.model)
    if slices is None:
        reason = "no folder of slices was given"
        return (
            SliceVerdict.open(as_planned.name, as_planned.claim, reason),
            SliceVerdict.open("digests_match", "each tensor has its source's bytes", reason),
        )
    names = {name for slice_ in chosen for name in holdings[slice_.node.name].digests}
    shapes = {name: word_shape(entry) for name, entry in source.headers_known.items()}
    digests = _source_digests(source, names)
    return as_planned, judge_digests(chosen, holdings, shapes=shapes, digests=digests)


def _source_digests(source: SliceSource, names: set[str]) -> dict[str, str]:
    """sha256 of those of the source's tensors that are here."""
    if source.index is None:
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
        "node": node.slice.node.name,
        "partition_index": plan.slices.index(node.slice),
        "layers": [node.slice.stage.layers.start, node.slice.stage.layers.stop],
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
