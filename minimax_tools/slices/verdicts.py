"""Verdicts over a divided model: what must hold of all nodes together, each with everything that contradicts it.

| verdict | it holds where |
|---|---|
| `plan_is_whole` | the plan contradicts neither itself nor what is known of the checkpoint |
| `nodes_differ` | no two nodes have the same layers, or hold the same tensors |
| `downloads_differ` | no two nodes download the same weight files |
| `cover_everything` | every tensor of the checkpoint is on some node |
| `overlap_nowhere` | no tensor is on two nodes, but for those the plan shares |
| `memory_in_proportion` | each slice fits its node; divided by memory, all are equally full, within a layer |
| `nobody_holds_the_whole` | no node of several holds every tensor, or downloads every weight file |
| `downloads_complete` | the files of the nodes asked for are here in their sizes |
| `slices_as_planned` | each folder holds the plan's tensors, no other, and can be read |
| `digests_match` | each tensor of a folder has its source's bytes, and those that slice.json notes |
| `reads_match` | each node opened its own tensors, and read as many bytes as they have, to the hundredth |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations

from minimax_tools.capture.read_record import ReadRecord
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.machine.size import word_size
from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.planners import plan_stages
from minimax_tools.slices.download import Download
from minimax_tools.slices.holding import Holding
from minimax_tools.slices.source import are_two_commits

_PLANNER_BY_MEMORY = "memory"
# A share is seldom a whole number of layers: rounded, and one more.
_MOST_LAYERS_ASIDE = 1.5
_BY_RANGES = "mm2-split fetch --byte-ranges fetches its tensors alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceVerdict:
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
    def of(cls, name: str, claim: str, faults: Iterable[str]) -> SliceVerdict:
        """The verdict that there are no faults."""
        found = tuple(faults)
        return cls(name=name, claim=claim, holds=not found, found=found)

    @classmethod
    def open(cls, name: str, claim: str, reason: str) -> SliceVerdict:
        """The claim is not judged, for a reason."""
        return cls(name=name, claim=claim, holds=None, found=(reason,))


def judge_difference(slices: Sequence[Slice], holdings: Mapping[str, Holding]) -> SliceVerdict:
    """Whether all nodes that hold something hold different things, of different layers."""
    faults = []
    for first, second in combinations([slice_ for slice_ in slices if holdings[slice_.node.name].sizes], 2):
        names = f"{first.node.name} and {second.node.name}"
        held = holdings[first.node.name].sizes.keys()
        if first.stage.layers and first.stage.layers == second.stage.layers:
            faults.append(f"{names} have the same {len(first.stage.layers)} layers")
        if held == holdings[second.node.name].sizes.keys():
            faults.append(f"{names} hold the same {len(held)} tensors")
    return SliceVerdict.of("nodes_differ", "all nodes hold different layers and tensors", faults)


def judge_files(downloads: Mapping[str, Download]) -> SliceVerdict:
    """Whether no two nodes download the same weight files.

    Args:
        downloads: Of each node; none where nothing is downloaded as whole files.
    """
    claim = "all nodes download different weight files"
    if not downloads:
        return SliceVerdict.open("downloads_differ", claim, "no node downloads whole files")
    weights = {node: {file.name for file in download.weights} for node, download in downloads.items()}
    return SliceVerdict.of(
        "downloads_differ",
        claim,
        (
            f"{first} and {second} download the same {len(weights[first])} weight files: {_BY_RANGES}"
            for first, second in combinations(weights, 2)
            if weights[first] and weights[first] == weights[second]
        ),
    )


def judge_coverage(holdings: Mapping[str, Holding], names: Set[str] | None) -> SliceVerdict:
    """Whether the nodes together hold every tensor of the checkpoint, of which `names` are all that there are."""
    claim = "all nodes together hold the whole model"
    if names is None:
        reason = "neither headers nor an index file tell here what the checkpoint holds"
        return SliceVerdict.open("cover_everything", claim, reason)
    held = {name for holding in holdings.values() for name in holding.sizes}
    return SliceVerdict.of(
        "cover_everything", claim, (f"no node holds {name}" for name in sorted(names - held))
    )


def judge_overlap(holdings: Mapping[str, Holding], shared: Mapping[str, str]) -> SliceVerdict:
    """Whether no tensor lies on two nodes, but for `shared` ones."""
    holders: dict[str, list[str]] = {}
    for holding in holdings.values():
        for name in holding.sizes:
            holders.setdefault(name, []).append(holding.node)
    return SliceVerdict.of(
        "overlap_nowhere",
        "no tensor is on two nodes" + (f", but {len(shared)} shared on purpose" if shared else ""),
        (
            f"{name} is on {' and '.join(nodes)}"
            for name, nodes in sorted(holders.items())
            if len(nodes) > 1 and name not in shared
        ),
    )


def judge_whole(
    holdings: Mapping[str, Holding], names: Set[str] | None, downloads: Mapping[str, Download]
) -> SliceVerdict:
    """Whether no node of several that are used holds or downloads the whole model.

    Args:
        holdings: Of each node.
        names: All the checkpoint's tensors; None where only the nodes' are known.
        downloads: As for `judge_files`.
    """
    used = [holding for holding in holdings.values() if holding.sizes]
    if len(used) == 1:
        return SliceVerdict.of("nobody_holds_the_whole", "one node is used, which holds the whole model", ())
    everything = names or {name for holding in used for name in holding.sizes}
    faults = [
        f"{holding.node} holds all {len(everything)} tensors"
        for holding in used
        if everything <= holding.sizes.keys()
    ]
    faults += [
        f"{node} downloads every weight file, {len(download.weights)} in all: {_BY_RANGES}"
        for node, download in downloads.items()
        if download.weights and download.repository.weights <= set(download.names)
    ]
    return SliceVerdict.of("nobody_holds_the_whole", "no node holds or downloads the whole model", faults)


def judge_proportion(plan: PartitionPlan, cost: ModelCost | None) -> SliceVerdict:
    """Whether what the nodes hold goes with their memory.

    Every slice must fit. Where the plan divides by memory, all nodes must be equally full of all that they hold:
    it is a fault that a node has over a layer more than its share, rounded, while another has over a layer less and
    room for one. Where the planner itself does no better, something forces it: a large embedding, a layer for each
    node. Other planners do not divide by memory.

    Args:
        plan: The plan.
        cost: Of the model's parts as its tensors tell it; None where they are not known: the plan's own figures must
            do, and how full nodes are to be is not known.
    """
    costs = {
        slice_.node.name: slice_.cost if cost is None else _recount(slice_, cost) for slice_ in plan.slices
    }
    claim = "each slice fits its node's memory" + (", by the plan's own figures" if cost is None else "")
    faults = [
        f"{slice_.node.name} has {word_size(slice_.node.memory_bytes)} and needs {word_size(needed)}"
        for slice_ in plan.slices
        if (needed := costs[slice_.node.name].memory_bytes) > slice_.node.memory_bytes
    ]
    if plan.planner == _PLANNER_BY_MEMORY and cost is not None:
        claim += ", and all nodes are equally full, within a layer"
        faults += _disproportions(plan, costs, cost)
    return SliceVerdict.of("memory_in_proportion", claim, faults)


def judge_downloads(downloads: Mapping[str, Download]) -> SliceVerdict:
    """Whether all files of these nodes are here."""
    return SliceVerdict.of(
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


def judge_slices(slices: Sequence[Slice], holdings: Mapping[str, Holding], model: str) -> SliceVerdict:
    """Whether the folders hold what is planned for these slices of a model, and nothing else."""
    faults = []
    for slice_ in slices:
        node, held = slice_.node.name, holdings[slice_.node.name]
        faults += [f"{node}: {fault}" for fault in held.faults]
        if held.source is not None and are_two_commits(held.source, model):
            faults.append(f"{node} was cut from {held.source}, and not from {model}")
        if held.sizes:
            planned = set(slice_.names)
            faults += [f"{node} lacks {name}" for name in sorted(planned - held.sizes.keys())]
            faults += [
                f"{node} holds {name}, which is not its" for name in sorted(held.sizes.keys() - planned)
            ]
    return SliceVerdict.of("slices_as_planned", "each slice holds the plan's tensors, and no other", faults)


def judge_digests(
    slices: Sequence[Slice],
    holdings: Mapping[str, Holding],
    *,
    shapes: Mapping[str, str],
    digests: Mapping[str, str],
) -> SliceVerdict:
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
    claim = (
        f"the bytes of {num_held} tensors are right: {num_sourced} held against their source, {num_noted} against "
        "what slice.json notes"
    )
    if not faults and num_unknown:
        reason = f"of {num_unknown} tensors neither the source is here nor a digest in slice.json"
        return SliceVerdict.open("digests_match", claim, reason)
    return SliceVerdict.of("digests_match", claim, faults)


def judge_reads(
    plan: PartitionPlan,
    slices: Sequence[Slice],
    records: Mapping[str, ReadRecord] | None,
    sizes: Mapping[str, int],
) -> SliceVerdict:
    """Whether these slices' nodes went by this plan, and read what is theirs, once.

    Args:
        plan: The plan.
        slices: Those to judge.
        records: Of a run, by node; None where there was none.
        sizes: Bytes of the slices' tensors.
    """
    claim = "each node read its slice's tensors, 1.00 times"
    if records is None:
        return SliceVerdict.open("reads_match", claim, "no records of a run were given")
    faults, digest = [], plan.digest
    for slice_ in slices:
        node, record = slice_.node.name, records.get(slice_.node.name)
        if record is None:
            faults += [f"{node} wrote no record of what it read"] if slice_.tensors else []
            continue
        if record.plan not in ("", digest):
            faults.append(f"{node} read along another plan, {record.plan[:12]} and not {digest[:12]}")
        planned = set(slice_.names)
        faults += [
            f"{node} opened {name}, which is not its" for name in sorted(set(record.tensors) - planned)
        ]
        faults += [f"{node} never opened {name}" for name in sorted(planned - set(record.tensors))]
        slice_bytes = sum(sizes.get(name, 0) for name in planned)
        ratio = read_over_slice(record, slice_bytes)
        if round(ratio, 2) != 1:
            faults.append(f"{node} read {record.bytes_read} bytes, {ratio:.2f} times its {slice_bytes}")
    return SliceVerdict.of("reads_match", claim, faults)


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


def _recount(slice_: Slice, cost: ModelCost) -> PartCost:
    """What a slice takes; layers that the model has not take nothing."""
    stage = slice_.stage
    layers = range(max(stage.layers.start, 0), min(stage.layers.stop, len(cost.layers)))
    return cost.of_slice(layers, has_embedding=stage.has_embedding, has_head=stage.has_head)


def _disproportions(plan: PartitionPlan, costs: Mapping[str, PartCost], cost: ModelCost) -> list[str]:
    layer = max(cost.layers, key=lambda part: part.held_bytes)
    # As the planner sees it: a node is charged a layer's activations, and the logits come and go.
    full = {
        slice_.node.name: costs[slice_.node.name].held_bytes
        + (layer.activation_bytes if slice_.stage.is_used else 0)
        for slice_ in plan.slices
    }
    memory = sum(slice_.node.memory_bytes for slice_ in plan.slices)
    # Of each node, how many layers it has above its share.
    above = {
        slice_.node.name: (full[slice_.node.name] - sum(full.values()) * slice_.node.memory_bytes / memory)
        / max(layer.held_bytes, 1)
        for slice_ in plan.slices
    }
    takers = [
        slice_.node.name
        for slice_ in plan.slices
        if above[slice_.node.name] < -_MOST_LAYERS_ASIDE
        and (costs[slice_.node.name] + layer).memory_bytes <= slice_.node.memory_bytes
    ]
    givers = [slice_ for slice_ in plan.used if above[slice_.node.name] > _MOST_LAYERS_ASIDE]
    forced = _plan_anew(plan, cost) if takers and givers else {}
    return [
        f"{slice_.node.name} has {above[slice_.node.name]:.1f} layers more than its share of the memory, while "
        f"{takers[0]} has {-above[takers[0]]:.1f} less and room for one"
        for slice_ in givers
        if takers and len(slice_.stage.layers) > forced.get(slice_.node.name, 0)
    ]


def _plan_anew(plan: PartitionPlan, cost: ModelCost) -> dict[str, int]:
    """How many layers the planner gives each node; none where it cannot plan for them."""
    try:
        stages = plan_stages(plan.planner, cost, [slice_.node for slice_ in plan.slices])
    except (UsageError, CannotRunError):
        return {}
    return {stage.node.name: len(stage.layers) for stage in stages}
