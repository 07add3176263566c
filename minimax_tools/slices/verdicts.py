"""Verdicts over a divided model: claims about all nodes together, each with its contradictions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from minimax_tools.capture.read_record import ReadRecord
from minimax_tools.errors import CannotRunError, CheckpointError, UsageError
from minimax_tools.machine.size import format_size
from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.node import Planner
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.planners import plan_stages
from minimax_tools.slices.description import SliceDescription, describe_shape, digest_tensors
from minimax_tools.slices.download import Download, DownloadedFile
from minimax_tools.slices.folder import read_slice_folder
from minimax_tools.slices.source import are_two_commits

_REMEDY = "divide them otherwise, or cut slices where the model is: mm2-split extract"
_NO_FOLDER = "no folder of slices was given"


_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pth", ".pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The tensors of a node, by name."""

    node: str  # name of the node
    # Folder of its slice; None if the tensors are only planned. Then the fields below, except `sizes`, are empty.
    folder: Path | None = None
    source: str | None = None  # the checkpoint that the slice was cut from, by its slice.json
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)  # bytes of each tensor
    # Dtype and shape of each tensor, in words.
    shapes: Mapping[str, str] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)  # sha256 of each tensor
    # sha256 of each tensor as slice.json notes it; None for a tensor without one there.
    noted: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    faults: tuple[str, ...] = ()  # reasons why the folder cannot be read, or is not the node's

    @classmethod
    def planned(cls, slice_: Slice, sizes: Mapping[str, int]) -> Holding:
        """Build the holding of a node's slice as planned, with the sizes of its tensors in bytes."""
        return cls(node=slice_.node.name, sizes={name: sizes.get(name, 0) for name in slice_.names})

    @classmethod
    def found(cls, slice_: Slice, folder: Path) -> Holding:
        """Read every byte of a node's folder; if it cannot be read, that is a fault of the holding."""
        node = slice_.node.name
        if not folder.is_dir():
            # An idle node needs no folder.
            return cls(node=node, folder=folder, faults=(f"{folder} is not there",) if slice_.tensors else ())
        try:
            return _read_folder(slice_, folder)
        except CheckpointError as error:
            return cls(node=node, folder=folder, faults=(str(error),))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes.values())

    @property
    def digest(self) -> str:
        """sha256 over the names and digests of all tensors that were found."""
        lines = (f"{name} {digest}\n" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read_folder(slice_: Slice, folder: Path) -> Holding:
    description = SliceDescription.read(folder)
    index = read_slice_folder(folder)
    files = {file.name for file in index.files}
    # Weight files that the slice's index does not name.
    stray = sorted(
        path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.name not in files
    )
    return Holding(
        node=slice_.node.name,
        folder=folder,
        source=description.source,
        sizes={name: entry.size_bytes for name, entry in index.entries.items()},
        shapes={name: describe_shape(entry) for name, entry in index.entries.items()},
        digests=digest_tensors(index.entries.values()),
        noted=description.tensors,
        faults=(
            *_find_contradictions(slice_, description),
            *(f"{name} lies in {folder}, but belongs to no slice" for name in stray),
        ),
    )


def _find_contradictions(slice_: Slice, description: SliceDescription) -> list[str]:
    """Describe the contradictions between a folder's slice.json and the plan."""
    stage = slice_.stage
    parts = (
        ("node", slice_.node.name, description.node),
        ("layers", stage.layers, description.layers),
        ("embedding", stage.has_embedding, description.has_embedding),
        ("head", stage.has_head, description.has_head),
    )
    return [
        f"slice.json says of its {part}: {found}, the plan: {planned}"
        for part, planned, found in parts
        # A slice of tensors chosen by name has no layers in its slice.json.
        if found is not None and planned != found
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerification:
    """The evidence about one node: its plan, files, tensors and reads."""

    slice: Slice  # its part of the plan
    download: Download  # its files
    holding: Holding  # its tensors: those found in its folder if one was given, else the planned ones
    record: ReadRecord | None  # its reads in a run; None if there is no record
    # Layers of which the run opened tensors, ascending; None if there is no record.
    layers: tuple[int, ...] | None
    slice_bytes: int  # size of its planned tensors; `holding` knows the size of those found in its folder

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.slice.node.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceVerdict:
    """A claim with its judgement."""

    name: str  # name of the verdict
    claim: str  # the claim in words
    holds: bool | None  # True or False, or None if it was not judged
    found: tuple[str, ...] = ()  # contradictions, or the reason why it was not judged

    @classmethod
    def of(cls, name: str, claim: str, faults: Iterable[str]) -> SliceVerdict:
        """Build the verdict of a claim that holds if there are no faults."""
        found = tuple(faults)
        return cls(name=name, claim=claim, holds=not found, found=found)

    @classmethod
    def not_judged(cls, name: str, claim: str, reason: str) -> SliceVerdict:
        """Build the verdict of a claim that was not judged, with the reason."""
        return cls(name=name, claim=claim, holds=None, found=(reason,))


def judge_nodes_differ(nodes: Iterable[NodeVerification]) -> SliceVerdict:
    """Decide whether no two nodes have the same layers, or hold the same tensors."""
    faults = []
    for first, second in combinations([node for node in nodes if node.holding.sizes], 2):
        pair = f"{first.name} and {second.name}"
        layers, tensors = first.slice.stage.layers, first.holding.sizes.keys()
        if layers and layers == second.slice.stage.layers:
            faults.append(f"{pair} have the same {len(layers)} layers")
        if tensors == second.holding.sizes.keys():
            faults.append(f"{pair} hold the same {len(tensors)} tensors")
    return SliceVerdict.of("nodes_differ", "all nodes hold different layers and tensors", faults)


def judge_downloads_differ(fetching: Sequence[NodeVerification]) -> SliceVerdict:
    """Decide whether no two of the nodes that download whole files download the same weight files."""
    claim = "all nodes download different weight files"
    if not fetching:
        return SliceVerdict.not_judged("downloads_differ", claim, "no node downloads whole files")
    faults = (
        f"{first.name} and {second.name} download the same {len(first.download.weights)} weight files: {_REMEDY}"
        for first, second in combinations(fetching, 2)
        if first.download.weights and first.download.weights == second.download.weights
    )
    return SliceVerdict.of("downloads_differ", claim, faults)


def judge_cover_everything(nodes: Iterable[NodeVerification], names: Set[str] | None) -> SliceVerdict:
    """Decide whether the nodes together hold all tensors of the checkpoint; `names` is None if unknown."""
    claim = "all nodes together hold the whole model"
    if names is None:
        reason = "neither headers nor an index file list the checkpoint's tensors here"
        return SliceVerdict.not_judged("cover_everything", claim, reason)
    missing = names - {name for node in nodes for name in node.holding.sizes}
    return SliceVerdict.of("cover_everything", claim, (f"no node holds {name}" for name in sorted(missing)))


def judge_overlap_nowhere(nodes: Iterable[NodeVerification], shared: Mapping[str, str]) -> SliceVerdict:
    """Decide whether no tensor is on two nodes, except those in `shared`: the reason by name."""
    holders: dict[str, list[str]] = {}
    for node in nodes:
        for name in node.holding.sizes:
            holders.setdefault(name, []).append(node.name)
    claim = "no tensor is on two nodes" + (f", except {len(shared)} shared on purpose" if shared else "")
    faults = (
        f"{name} is on {' and '.join(node_names)}"
        for name, node_names in sorted(holders.items())
        if len(node_names) > 1 and name not in shared
    )
    return SliceVerdict.of("overlap_nowhere", claim, faults)


def judge_nobody_holds_the_whole(
    nodes: Sequence[NodeVerification], names: Set[str] | None, fetching: Sequence[NodeVerification]
) -> SliceVerdict:
    """Decide whether no node of several holds or downloads the whole model.

    `names` are all tensors of the checkpoint, or None if only the plan's are known. `fetching` are the nodes that
    download whole files.
    """
    # The plan decides who is used: a node whose folder is missing counts too, though it holds nothing.
    used = [node for node in nodes if node.slice.tensors]
    if len(used) == 1:
        return SliceVerdict.of(
            "nobody_holds_the_whole", "one node is used, which may hold the whole model", ()
        )
    everything = names or {name for node in used for name in node.slice.names}
    faults = [
        f"{node.name} holds all {len(everything)} tensors"
        for node in nodes
        if node.holding.sizes and everything <= node.holding.sizes.keys()
    ]
    faults += [
        f"{node.name} downloads every weight file, {len(node.download.weights)} in all: {_REMEDY}"
        for node in fetching
        if node.download.weights and node.download.repository.weights <= set(node.download.names)
    ]
    return SliceVerdict.of("nobody_holds_the_whole", "no node holds or downloads the whole model", faults)


def judge_memory_in_proportion(plan: PartitionPlan, cost: ModelCost | None) -> SliceVerdict:
    """Decide whether each slice fits its node and, for a plan by memory, whether all nodes are equally full.

    A plan by memory is made again, and no node may have over a layer more than there. Without the cost of the model's
    parts, the plan's own figures are used, and fullness is not judged.
    """
    claim = "each slice fits its node's memory" + (", by the plan's own figures" if cost is None else "")
    costs = [slice_.cost if cost is None else _recount(slice_, cost) for slice_ in plan.slices]
    faults = [
        f"{slice_.node.name} has {format_size(slice_.node.memory_bytes)} and needs {format_size(part.memory_bytes)}"
        for slice_, part in zip(plan.slices, costs, strict=True)
        if part.memory_bytes > slice_.node.memory_bytes
    ]
    if plan.planner == Planner.MEMORY and cost is not None:
        claim += ", and all nodes are equally full, within a layer"
        fair = _count_fair_layers(plan, cost)
        faults += [
            f"{slice_.node.name} has {len(slice_.stage.layers)} layers, by memory it would have "
            f"{fair[slice_.node.name]}"
            for slice_ in plan.slices
            if len(slice_.stage.layers) > fair.get(slice_.node.name, len(cost.layers)) + 1
        ]
    return SliceVerdict.of("memory_in_proportion", claim, faults)


def _recount(slice_: Slice, cost: ModelCost) -> PartCost:
    """Return the cost of a slice by the model's parts; layers that the model lacks cost nothing."""
    stage = slice_.stage
    layers = range(max(stage.layers.start, 0), min(stage.layers.stop, len(cost.layers)))
    return cost.of_slice(layers, has_embedding=stage.has_embedding, has_head=stage.has_head)


def _count_fair_layers(plan: PartitionPlan, cost: ModelCost) -> dict[str, int]:
    """Return the number of layers that the planner gives each node; empty if it cannot plan."""
    try:
        stages = plan_stages(Planner.MEMORY, cost, [slice_.node for slice_ in plan.slices])
    except (UsageError, CannotRunError):
        return {}
    return {stage.node.name: len(stage.layers) for stage in stages}


def judge_downloads_complete(nodes: Sequence[NodeVerification], *, must_be_here: bool) -> SliceVerdict:
    """Decide whether all files of the nodes are here; if they need not be, missing files are no fault."""
    name, claim = "downloads_complete", "every file of the nodes' slices is here, with its size"
    faults = [
        f"{file.name} of {node.name}: {_describe_size(file)}"
        for node in nodes
        for file in node.download.files
        if not file.is_complete
    ]
    if faults and not must_be_here:
        complete = ", ".join(node.name for node in nodes if node.download.is_complete) or "none"
        reason = f"name nodes with --node and leave out --slices; complete here: {complete}"
        return SliceVerdict.not_judged(name, claim, reason)
    return SliceVerdict.of(name, claim, faults)


def judge_slices_as_planned(
    nodes: Iterable[NodeVerification], model: str, *, has_folders: bool
) -> SliceVerdict:
    """Decide whether the nodes' folders hold the planned tensors of the model, and no others."""
    name, claim = "slices_as_planned", "each slice holds the plan's tensors, and no other"
    if not has_folders:
        return SliceVerdict.not_judged(name, claim, _NO_FOLDER)
    faults = []
    for node in nodes:
        holding = node.holding
        faults += [f"{node.name}: {fault}" for fault in holding.faults]
        if holding.source is not None and are_two_commits(holding.source, model):
            faults.append(f"{node.name} was cut from {holding.source}, not from {model}")
        # A folder that holds nothing has faults already.
        if holding.sizes:
            planned, held = set(node.slice.names), holding.sizes.keys()
            faults += [f"{node.name} lacks {tensor}" for tensor in sorted(planned - held)]
            faults += [
                f"{node.name} holds {tensor}, which belongs to another node"
                for tensor in sorted(held - planned)
            ]
    return SliceVerdict.of(name, claim, faults)


def judge_digests_match(
    nodes: Iterable[NodeVerification],
    *,
    shapes: Mapping[str, str],
    digests: Mapping[str, str],
    has_folders: bool,
) -> SliceVerdict:
    """Decide whether the tensors in the nodes' folders equal their source, byte for byte.

    `shapes` has dtype and shape in words of the source's tensors whose headers are known, by name. `digests` has the
    sha256 of those whose bytes are here.
    """
    if not has_folders:
        return SliceVerdict.not_judged("digests_match", "each tensor has the bytes of its source", _NO_FOLDER)
    faults: list[str] = []
    num_held = num_compared = num_noted = num_unknown = 0
    for node in nodes:
        for name in node.holding.digests:
            source_digest, noted_digest = digests.get(name), node.holding.noted.get(name)
            num_held += 1
            num_compared += source_digest is not None
            num_noted += noted_digest is not None
            num_unknown += source_digest is None and noted_digest is None
            faults += _find_other_bytes(name, node.holding, shapes.get(name), source_digest)
    claim = (
        f"the bytes of {num_held} tensors are right: {num_compared} compared with their source, {num_noted} with "
        "slice.json"
    )
    if not faults and num_unknown:
        reason = f"for {num_unknown} tensors there is neither the source nor a digest in slice.json"
        return SliceVerdict.not_judged("digests_match", claim, reason)
    return SliceVerdict.of("digests_match", claim, faults)


def judge_reads_match(
    plan: PartitionPlan, nodes: Iterable[NodeVerification], *, has_records: bool
) -> SliceVerdict:
    """Decide whether the nodes ran by this plan, and read exactly their tensors, once."""
    claim = "each node read exactly its slice's tensors, each byte once"
    if not has_records:
        return SliceVerdict.not_judged("reads_match", claim, "no records of a run were given")
    faults, plan_digest = [], plan.digest
    for node in nodes:
        name, record = node.name, node.record
        if record is None:
            if node.slice.tensors:
                faults.append(f"{name} wrote no record of its reads")
            continue
        # A record without a plan's digest names none.
        if record.plan not in ("", plan_digest):
            faults.append(f"{name} read by another plan, {record.plan[:12]}, not {plan_digest[:12]}")
        planned, opened = set(node.slice.names), set(record.tensors)
        faults += [
            f"{name} opened {tensor}, which belongs to another node" for tensor in sorted(opened - planned)
        ]
        faults += [f"{name} never opened {tensor}" for tensor in sorted(planned - opened)]
        ratio = read_over_slice(record, node.slice_bytes)
        if round(ratio, 2) != 1:
            faults.append(f"{name} read {record.bytes_read} bytes, {ratio:.2f} times its {node.slice_bytes}")
    return SliceVerdict.of("reads_match", claim, faults)


def read_over_slice(record: ReadRecord, slice_bytes: int) -> float:
    """Return the bytes read over the slice's bytes; 1 if both are 0."""
    if slice_bytes:
        return record.bytes_read / slice_bytes
    return float("inf") if record.bytes_read else 1.0


def _describe_size(file: DownloadedFile) -> str:
    found = "not here" if file.actual_bytes is None else f"{file.actual_bytes} bytes"
    return found if file.expected_bytes is None else f"{found} of {file.expected_bytes}"


def _find_other_bytes(
    name: str, holding: Holding, source_shape: str | None, source_digest: str | None
) -> Iterator[str]:
    """Describe what differs between a tensor in a folder, its source, and the digest in slice.json."""
    tensor, shape, digest = f"{name} of {holding.node}", holding.shapes[name], holding.digests[name]
    noted_digest = holding.noted.get(name)
    if source_shape not in (None, shape):
        yield f"{tensor} is {shape}, its source {source_shape}"
    if source_digest is not None and source_digest != digest:
        yield f"{tensor} has sha256 {digest[:12]}, its source {source_digest[:12]}"
    if noted_digest is not None and noted_digest != digest:
        yield f"{tensor} has sha256 {digest[:12]}, slice.json notes {noted_digest[:12]}"
