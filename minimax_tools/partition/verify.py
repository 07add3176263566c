"""Verification: who loads which slice of a model, what of it is here, and whether all of it adds up.

A plan alone is held against the checkpoint's headers. With the slices' folders every byte of them is read and held
against the source; with the records of a run (see `read_record`), what was read is held against the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minimax_tools.errors import UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.partition.download import Download, Repository
from minimax_tools.partition.holding import Holding
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.read_record import ReadRecord, read_records
from minimax_tools.partition.source import Source, open_source
from minimax_tools.partition.tensor_digest import digest_tensor
from minimax_tools.partition.verdicts import (
    Verdict,
    judge_coverage,
    judge_difference,
    judge_digests,
    judge_downloads,
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
        rank: Its place in the plan, from 0.
        memory_weight: Where its memory begins and ends among all nodes' memory, 0 to 1.
        download: Its files.
        holding: What it holds: its folder where one was given, else as planned.
        record: What it read: in a run, else when its folder was verified; None where nothing was.
        layers: The layers that it loads: of the record's tensors, or, where there is none, of the plan.
        slice_bytes: Of its tensors.
    """

    slice: Slice
    rank: int
    memory_weight: tuple[float, float]
    download: Download
    holding: Holding
    record: ReadRecord | None
    layers: tuple[int, ...]
    slice_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was found of a plan.

    Args:
        plan: The plan.
        model: Where the checkpoint was looked for.
        nodes: Those asked for, in the plan's order.
        map: Every node's slice with its memory weight, in the plan's order.
        verdicts: Over all nodes.
    """

    plan: PartitionPlan
    model: str
    nodes: tuple[NodeVerification, ...]
    map: tuple[tuple[Slice, tuple[float, float]], ...] = field(repr=False)
    verdicts: tuple[Verdict, ...]

    @property
    def holds(self) -> bool:
        """Whether no verdict fails."""
        return all(verdict.holds is not False for verdict in self.verdicts)

    def to_values(self) -> dict[str, Any]:
        """The verification as JSON holds it."""
        return {
            "model": self.model,
            "planner": self.plan.planner,
            "num_hidden_layers": self.plan.num_hidden_layers,
            "active_nodes": len(self.plan.used),
            "total_layers_assigned": sum(len(slice_.stage.layers) for slice_, _ in self.map),
            "partition_map": [
                {
                    "node": slice_.node.name,
                    "layers": [slice_.stage.layers.start, slice_.stage.layers.stop],
                    "num_layers": len(slice_.stage.layers),
                    "share": self.share(slice_),
                    "memory_weight": list(weight),
                    "has_embedding": slice_.stage.has_embedding,
                    "has_head": slice_.stage.has_head,
                }
                for slice_, weight in self.map
            ],
            "nodes": [_node_values(node, self.share(node.slice)) for node in self.nodes],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "holds": self.holds,
        }

    def share(self, slice_: Slice) -> float:
        """How much of the model's layers a slice has, 0 to 1."""
        return len(slice_.stage.layers) / self.plan.num_hidden_layers


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
        model: Where the checkpoint is, if not where the plan says.
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
    sizes = {tensor.name: tensor.size_bytes for tensor in source.tensors}
    holdings = {slice_.node.name: Holding.planned(slice_, sizes) for slice_ in plan.slices}
    if slices is not None:
        holdings |= {slice_.node.name: Holding.found(slice_, slices / slice_.node.name) for slice_ in chosen}
    names = [slice_.node.name for slice_ in chosen]
    run = read_records(records, names) if records is not None else {}
    repository = Repository.of(source, access=access)
    downloads = {slice_.node.name: Download.check(slice_, plan, source, repository) for slice_ in chosen}
    weights = _memory_weights(plan)
    found = tuple(
        _verify_node(
            slice_,
            plan,
            memory_weight=weights[slice_.node.name],
            download=downloads[slice_.node.name],
            holding=holdings[slice_.node.name],
            record=run.get(slice_.node.name, holdings[slice_.node.name].record),
            source=source,
            sizes=sizes,
        )
        for slice_ in chosen
    )
    verdicts = [
        Verdict.of(
            "plan_is_whole",
            "the plan agrees with itself and the checkpoint",
            plan.find_faults(source.entries, source.architecture, folder=source.folder),
        ),
        judge_difference([*holdings.values()]),
        judge_coverage([*holdings.values()], sizes),
        judge_overlap([*holdings.values()], plan.shared),
        judge_proportion(plan, [*holdings.values()], source.architecture, sizes),
        judge_whole([*holdings.values()], sizes),
        _judge_downloads(downloads, is_here=bool(nodes) and slices is None),
        *_judge_folders(chosen, holdings, source, slices=slices),
        _judge_reads(chosen, found, sizes, is_run=records is not None),
    ]
    return Verification(
        plan=plan,
        model=source.model,
        nodes=found,
        map=tuple((slice_, weights[slice_.node.name]) for slice_ in plan.slices),
        verdicts=tuple(verdicts),
    )


def _choose(plan: PartitionPlan, nodes: Sequence[str]) -> tuple[Slice, ...]:
    for node in nodes:
        plan.slice_of(node)
    return tuple(slice_ for slice_ in plan.slices if not nodes or slice_.node.name in nodes)


def _memory_weights(plan: PartitionPlan) -> dict[str, tuple[float, float]]:
    whole = sum(slice_.node.memory_bytes for slice_ in plan.slices)
    weights, before = {}, 0
    for slice_ in plan.slices:
        after = before + slice_.node.memory_bytes
        weights[slice_.node.name] = (before / whole, after / whole)
        before = after
    return weights


def _verify_node(
    slice_: Slice,
    plan: PartitionPlan,
    *,
    memory_weight: tuple[float, float],
    download: Download,
    holding: Holding,
    record: ReadRecord | None,
    source: Source,
    sizes: Mapping[str, int],
) -> NodeVerification:
    layers: set[int] = set(slice_.stage.layers)
    if record is not None:
        opened = {source.architecture.layer_of(name) for name in record.tensors}
        layers = {layer for layer in opened if layer is not None}
    return NodeVerification(
        slice=slice_,
        rank=plan.slices.index(slice_),
        memory_weight=memory_weight,
        download=download,
        holding=holding,
        record=record,
        layers=tuple(sorted(layers)),
        slice_bytes=sum(sizes.get(name, 0) for name in slice_.names),
    )


def _judge_downloads(downloads: Mapping[str, Download], *, is_here: bool) -> Verdict:
    verdict = judge_downloads(downloads)
    if is_here or verdict.holds:
        return verdict
    here = ", ".join(node for node, download in downloads.items() if download.is_complete) or "none"
    reason = f"only of nodes asked for by name, and without --slices; complete here: {here}"
    return Verdict.open(verdict.name, verdict.claim, reason)


def _judge_folders(
    chosen: Sequence[Slice], holdings: Mapping[str, Holding], source: Source, *, slices: Path | None
) -> tuple[Verdict, Verdict]:
    as_planned = judge_slices(chosen, holdings)
    if slices is None:
        reason = "no folder of slices was given"
        return (
            Verdict.open(as_planned.name, as_planned.claim, reason),
            Verdict.open("digests_match", "each tensor has its source's bytes", reason),
        )
    names = {name for slice_ in chosen for name in holdings[slice_.node.name].digests}
    entries = {} if source.entries is None else source.entries
    shapes = {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in entries.items()}
    digests = _source_digests(source, names)
    return as_planned, judge_digests(chosen, holdings, shapes=shapes, digests=digests)


def _source_digests(source: Source, names: set[str]) -> dict[str, str]:
    """sha256 of those of the source's tensors that are here."""
    if source.index is None:
        return {}
    with source.open() as reader:
        return {
            name: digest_tensor(reader, entry)
            for name, entry in source.index.entries.items()
            if name in names
        }


def _judge_reads(
    chosen: Sequence[Slice], found: Sequence[NodeVerification], sizes: Mapping[str, int], *, is_run: bool
) -> Verdict:
    records = {node.slice.node.name: node.record for node in found if node.record is not None}
    if not is_run and not records:
        claim = "each node read its slice's tensors, 1.00 times"
        return Verdict.open("reads_match", claim, "no records of a run were given")
    return judge_reads(chosen, records, sizes)


def _node_values(node: NodeVerification, share: float) -> dict[str, Any]:
    download, record = node.download, node.record
    return {
        "node": node.slice.node.name,
        "partition_index": node.rank,
        "layers": [node.slice.stage.layers.start, node.slice.stage.layers.stop],
        "share": share,
        "memory_reduction": 1 - share,
        "num_tensors": len(node.slice.tensors),
        "slice_bytes": node.slice_bytes,
        "allow_patterns": list(download.patterns),
        "download": {
            "num_repository_files": download.num_repository_files,
            "repository_bytes": download.repository_bytes,
            "num_files": len(download.files),
            "expected_bytes": download.size_bytes,
            "actual_bytes": download.actual_bytes,
            "reduction": download.reduction,
            "is_complete": download.is_complete,
            "files": [{**asdict(file), "is_complete": file.is_complete} for file in download.files],
        },
        "runtime": {"loaded_layers": list(node.layers), "is_seen": record is not None},
        "reads": None
        if record is None
        else {
            "num_tensors": len(record.tensors),
            "bytes_asked": record.bytes_asked,
            "bytes_read": record.bytes_read,
            "bytes_read_over_slice": read_over_slice(record, node.slice_bytes) if node.slice_bytes else None,
            "files": dict(record.files),
        },
        "digest": node.holding.digest if node.holding.folder is not None else None,
        "digests": dict(node.holding.digests),
    }
