"""Verdicts over a divided model: what must hold of all nodes together, each with everything that contradicts it.

| verdict | it holds where |
|---|---|
| `plan_is_whole` | the plan contradicts neither itself nor the checkpoint's headers |
| `nodes_differ` | no two nodes hold the same tensors |
| `cover_everything` | every tensor of the checkpoint is on some node |
| `overlap_nowhere` | no tensor is on two nodes, but for those the plan shares |
| `memory_in_proportion` | each slice fits its node; divided by memory, layers go with it, within one |
| `nobody_holds_the_whole` | no node of several holds every tensor |
| `downloads_complete` | the files of the nodes asked for are here in their sizes |
| `slices_as_planned` | each folder holds the plan's tensors, no other, and can be read |
| `digests_match` | each tensor of a folder has its source's bytes, and those that slice.json notes |
| `reads_match` | each node opened its own tensors, and read as many bytes as they have, to the hundredth |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from minimax_tools.checkpoint.architecture import Architecture
from minimax_tools.partition.download import Download
from minimax_tools.partition.holding import Holding
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.read_record import ReadRecord
from minimax_tools.size import word_size

_PLANNER_BY_MEMORY = "memory"
# A share is seldom a whole number of layers: rounded, and one more.
_MOST_LAYERS_ASIDE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A claim, and whether it holds.

    Args:
        name: The claim's.
        claim: It in words.
        holds: None where it was not judged.
        found: What contradicts it; or why it was not judged.
    """

    name: str
    claim: str
    holds: bool | None
    found: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, claim: str, faults: Iterable[str]) -> Verdict:
        """The verdict that there are no faults."""
        found = tuple(faults)
        return cls(name=name, claim=claim, holds=not found, found=found)

    @classmethod
    def open(cls, name: str, claim: str, reason: str) -> Verdict:
        """The claim is not judged, for a reason."""
        return cls(name=name, claim=claim, holds=None, found=(reason,))


def judge_difference(holdings: Sequence[Holding]) -> Verdict:
    """Whether all nodes that hold something hold different things."""
    used = [holding for holding in holdings if holding.sizes]
    return Verdict.of(
        "nodes_differ",
        "all nodes hold different tensors",
        (
            f"{first.node} and {second.node} hold the same {len(first.sizes)} tensors"
            for first, second in combinations(used, 2)
            if first.sizes.keys() == second.sizes.keys()
        ),
    )


def judge_coverage(holdings: Sequence[Holding], sizes: Mapping[str, int]) -> Verdict:
    """Whether the nodes together hold every tensor of the checkpoint, of which `sizes` has the bytes."""
    held = {name for holding in holdings for name in holding.sizes}
    return Verdict.of(
        "cover_everything",
        "all nodes together hold the whole model",
        (f"no node holds {name}" for name in sorted(sizes.keys() - held)),
    )


def judge_overlap(holdings: Sequence[Holding], shared: Mapping[str, str]) -> Verdict:
    """Whether no tensor lies on two nodes, but for `shared` ones."""
    holders: dict[str, list[str]] = {}
    for holding in holdings:
        for name in holding.sizes:
            holders.setdefault(name, []).append(holding.node)
    return Verdict.of(
        "overlap_nowhere",
        "no tensor is on two nodes" + (f", but {len(shared)} shared on purpose" if shared else ""),
        (
            f"{name} is on {' and '.join(nodes)}"
            for name, nodes in sorted(holders.items())
            if len(nodes) > 1 and name not in shared
        ),
    )


def judge_whole(holdings: Sequence[Holding], sizes: Mapping[str, int]) -> Verdict:
    """Whether no node of several holds the whole model."""
    return Verdict.of(
        "nobody_holds_the_whole",
        "no node holds the whole model" + ("; there is one node" if len(holdings) == 1 else ""),
        (
            f"{holding.node} holds all {len(sizes)} tensors"
            for holding in holdings
            if len(holdings) > 1 and sizes.keys() <= holding.sizes.keys()
        ),
    )


def judge_proportion(
    plan: PartitionPlan, holdings: Sequence[Holding], architecture: Architecture, sizes: Mapping[str, int]
) -> Verdict:
    """Whether what the nodes hold goes with their memory.

    Every slice must fit. Where the plan divides by memory, it is a fault that a node has over a layer more than its
    share, rounded, while another with room has over a layer less: nothing forced it then, as one layer for each node
    and a full memory may. Other planners do not divide by memory.
    """
    claim = "each slice fits its node's memory"
    faults = [
        f"{slice_.node.name} has {word_size(slice_.node.memory_bytes)} and needs "
        f"{word_size(slice_.cost.memory_bytes)}"
        for slice_ in plan.used
        if slice_.cost.memory_bytes > slice_.node.memory_bytes
    ]
    if plan.planner == _PLANNER_BY_MEMORY:
        claim += ", and layers go with memory, within one"
        faults += _disproportions(plan, holdings, architecture, sizes)
    return Verdict.of("memory_in_proportion", claim, faults)


def judge_downloads(downloads: Mapping[str, Download]) -> Verdict:
    """Whether all files of these nodes are here."""
    return Verdict.of(
        "downloads_complete",
        "every file of the nodes' slices is here, in its size",
        (
            f"{file.name} of {node}: "
            + ("not here" if file.actual_bytes is None else f"{file.actual_bytes} bytes")
            + (f" of {file.expected_bytes}" if file.expected_bytes is not None else "")
            for node, download in downloads.items()
            for file in download.files
            if not file.is_complete
        ),
    )


def judge_slices(slices: Sequence[Slice], holdings: Mapping[str, Holding]) -> Verdict:
    """Whether the folders hold what is planned for these slices, and nothing else."""
    faults = []
    for slice_ in slices:
        node, held = slice_.node.name, holdings[slice_.node.name]
        faults += [f"{node}: {fault}" for fault in held.faults]
        if held.sizes:
            planned = set(slice_.names)
            faults += [f"{node} lacks {name}" for name in sorted(planned - held.sizes.keys())]
            faults += [
                f"{node} holds {name}, which is not its" for name in sorted(held.sizes.keys() - planned)
            ]
    return Verdict.of("slices_as_planned", "each slice holds the plan's tensors, and no other", faults)


def judge_digests(
    slices: Sequence[Slice],
    holdings: Mapping[str, Holding],
    *,
    shapes: Mapping[str, str],
    digests: Mapping[str, str],
) -> Verdict:
    """Whether the slices' tensors are their source's, byte for byte.

    Args:
        slices: Those to judge.
        holdings: What was found of them, by node.
        shapes: Dtype and shape of the source's tensors, in words; of those whose headers are known.
        digests: sha256 of the source's tensors; of those that are here.
    """
    faults: list[str] = []
    num_held = num_sourced = num_noted = num_unknown = 0
    for slice_ in slices:
        held = holdings[slice_.node.name]
        for name in held.digests:
            expected, noted = digests.get(name), held.noted.get(name)
            num_held += 1
            num_sourced += expected is not None
            num_noted += noted is not None
            num_unknown += expected is None and noted is None
            faults += _byte_faults(name, held, shapes.get(name), expected, noted)
    claim = f"of {num_held} tensors {num_sourced} have their source's bytes, {num_noted} those that slice.json notes"
    if not faults and num_unknown:
        reason = f"of {num_unknown} tensors neither the source is here nor a digest in slice.json"
        return Verdict.open("digests_match", claim, reason)
    return Verdict.of("digests_match", claim, faults)


def judge_reads(
    slices: Sequence[Slice], records: Mapping[str, ReadRecord], sizes: Mapping[str, int]
) -> Verdict:
    """Whether these slices' nodes read what is theirs, once."""
    faults = []
    for slice_ in slices:
        node, record = slice_.node.name, records.get(slice_.node.name)
        if record is None:
            faults += [f"{node} wrote no record of what it read"] if slice_.tensors else []
            continue
        planned = set(slice_.names)
        faults += [
            f"{node} opened {name}, which is not its" for name in sorted(set(record.tensors) - planned)
        ]
        faults += [f"{node} never opened {name}" for name in sorted(planned - set(record.tensors))]
        slice_bytes = sum(sizes.get(name, 0) for name in planned)
        ratio = read_over_slice(record, slice_bytes)
        if round(ratio, 2) != 1:
            faults.append(f"{node} read {record.bytes_read} bytes, {ratio:.2f} times its {slice_bytes}")
    return Verdict.of("reads_match", "each node read its slice's tensors, 1.00 times", faults)


def read_over_slice(record: ReadRecord, slice_bytes: int) -> float:
    """How often the slice was read; 1 where there was nothing to read, and nothing was."""
    if slice_bytes:
        return record.bytes_read / slice_bytes
    return float("inf") if record.bytes_read else 1.0


def _byte_faults(
    name: str, held: Holding, shape: str | None, expected: str | None, noted: str | None
) -> Iterator[str]:
    found, where = held.digests[name], f"{name} of {held.node}"
    if shape is not None and shape != held.shapes[name]:
        yield f"{where} is {held.shapes[name]}, its source {shape}"
    if expected is not None and expected != found:
        yield f"{where} has sha256 {found[:12]}, its source {expected[:12]}"
    if noted is not None and noted != found:
        yield f"{where} has sha256 {found[:12]}, slice.json notes {noted[:12]}"


def _disproportions(
    plan: PartitionPlan, holdings: Sequence[Holding], architecture: Architecture, sizes: Mapping[str, int]
) -> list[str]:
    layers: dict[int, int] = {}
    for name, size in sizes.items():
        layer = architecture.layer_of(name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + size
    whole, unit = sum(layers.values()), max(layers.values(), default=0)
    memory = sum(slice_.node.memory_bytes for slice_ in plan.slices)
    held = {
        holding.node: sum(
            size for name, size in holding.sizes.items() if architecture.layer_of(name) is not None
        )
        for holding in holdings
    }
    # Of each node, how many layers it has above its share.
    above = {
        slice_.node.name: (held[slice_.node.name] - whole * slice_.node.memory_bytes / memory) / max(unit, 1)
        for slice_ in plan.slices
    }
    room_for = _layer_memory(plan)
    takers = [
        slice_.node.name
        for slice_ in plan.slices
        if above[slice_.node.name] < -_MOST_LAYERS_ASIDE and _room(slice_, plan) >= room_for
    ]
    return [
        f"{slice_.node.name} has {above[slice_.node.name]:.1f} layers more than its share of the memory, while "
        f"{takers[0]} has {-above[takers[0]]:.1f} less and room for one"
        for slice_ in plan.used
        if takers and above[slice_.node.name] > _MOST_LAYERS_ASIDE and held[slice_.node.name] > unit
    ]


def _layer_memory(plan: PartitionPlan) -> int:
    """What a layer takes in memory, rather too much: where a slice has embedding or head they are in it."""
    return max(
        (
            (slice_.cost.loaded_bytes + slice_.cost.kv_bytes) // len(slice_.stage.layers)
            for slice_ in plan.used
            if slice_.stage.layers
        ),
        default=0,
    )


def _room(slice_: Slice, plan: PartitionPlan) -> int:
    """Memory that a node has left while it runs."""
    activations = max(other.cost.activation_bytes for other in plan.slices)
    return slice_.node.memory_bytes - slice_.cost.loaded_bytes - slice_.cost.kv_bytes - activations
