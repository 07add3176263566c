"""The one capture that all ranks of a run write together, opened before any of them reads a weight.

1. Each rank publishes a proposal: the digest of its plan, and the capture that it would write.
2. Rank 0 compares the proposals, opens the directory, and publishes the manifest of what lies there already.
3. The other ranks check that they see the directory that rank 0 opened.

Every rank decides its work from that manifest alone, never from a file that rank 0 may be writing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_reference.golden.golden import Golden
from minimax_tools.capture.manifest import Description, Manifest
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.resumption import holds_same, part_name, refuse_other_run
from minimax_tools.capture.writer import SETTLING_S, CaptureWriter, open_capture, tidy_capture, wait_for_lock
from minimax_tools.checkpoint.index import digest_shapes
from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.weight_names import layer_of
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.ranks.rank_group import RankGroup

# What may differ between ranks: the slice, and the name of the checkpoint.
_OWN_OF_A_RANK = ("model.layers", "model.layer_tensors", "model.tensors_digest", "model_source")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureProposal:
    """The capture that one rank would write."""

    plan: str  # digest of the rank's plan
    description: Description  # description of the capture, with the layers of the rank's slice only
    # Shapes of the slice's tensors outside the layers, by name; those of all slices give the capture's digest of them.
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, golden: Golden, plan: PartitionPlan) -> CaptureProposal:
        """Build the proposal of a rank that opened this golden."""
        entries = golden.reader.index.entries
        return cls(
            plan=plan.digest,
            description=golden.describe(),
            shapes={name: entry.shape for name, entry in entries.items() if layer_of(name) is None},
        )


@contextmanager
def open_shared_capture(
    ranks: RankGroup,
    proposal: CaptureProposal,
    golden: Golden,
    directory: Path,
    *,
    overwrites: bool = False,
    patience_s: float = SETTLING_S,
) -> Iterator[CaptureWriter]:
    """Open the capture directory on rank 0, and a writer into it on every rank.

    Wait at most `patience_s` seconds until this machine sees the directory that rank 0 opened. The directory's lock
    holds `ranks.nonce`, a name that no other run has. With `overwrites`, another finished golden there is replaced.

    Raises:
        CaptureError: The directory is in use or not shared, holds something else, or the disk is full.
        CannotRunError: The ranks have different plans, or would write different captures.
    """
    ranks.publish(f"proposal/{ranks.rank}", encode(proposal))
    if ranks.rank > 0:
        manifest = decode(Manifest, ranks.wait_for("manifest"))
        _require_shared(ranks, directory, patience_s)
        yield CaptureWriter(
            directory, manifest, inputs=golden.request.inputs, manifest_name=part_name(ranks.rank)
        )
        return
    records = [ranks.wait_for(f"proposal/{rank}") for rank in range(ranks.num_ranks)]
    merged = merge_proposals(ranks, [decode(CaptureProposal, record) for record in records])
    if not overwrites:
        _refuse_to_replace(directory, merged)
    with open_capture(directory, merged, inputs=golden.request.inputs, owner=ranks.nonce) as writer:
        ranks.publish("manifest", encode(writer.manifest))
        yield writer


def _refuse_to_replace(directory: Path, description: Description) -> None:
    refuse_other_run(directory, description)
    if holds_same(directory, description):
        tidy_capture(directory)
        raise CaptureError(
            f"{address_of(directory)} holds the same golden, finished",
            next_step="Nothing is left to do; --overwrite makes it again.",
        )


def merge_proposals(ranks: RankGroup, proposals: list[CaptureProposal]) -> Description:
    """Build the description of the capture that all ranks write together.

    Raises:
        CannotRunError: A rank has another plan than rank 0, or would write another capture.
    """
    first = proposals[0]
    layers: dict[int, str] = {}
    layer_tensors: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, proposal in enumerate(proposals):
        if proposal.plan != first.plan:
            raise CannotRunError(
                f"{ranks.name(rank)} goes by another plan than rank 0",
                expected=first.plan[:12],
                found=proposal.plan[:12],
                next_step="Copy one plan file to all machines, and run the same command again.",
            )
        names = first.description.differences(proposal.description)
        differing = [name for name in names if not name.startswith(_OWN_OF_A_RANK)]
        if differing:
            raise CannotRunError(
                f"{ranks.name(rank)} would make another capture than rank 0",
                found=f"other {', '.join(differing)}",
                next_step="Start all ranks with the same options, checkpoint, libraries, environment and devices.",
            )
        layers |= proposal.description.provenance.model.layers
        layer_tensors |= proposal.description.provenance.model.layer_tensors
        shapes |= proposal.shapes
    provenance = first.description.provenance
    model = replace(
        provenance.model,
        layers=dict(sorted(layers.items())),
        layer_tensors=dict(sorted(layer_tensors.items())),
        tensors_digest=digest_shapes(shapes),
    )
    return replace(first.description, provenance=replace(provenance, model=model))


def _require_shared(ranks: RankGroup, directory: Path, patience_s: float) -> None:
    try:
        wait_for_lock(directory, ranks.nonce, patience_s=patience_s)
    except CaptureError as error:
        raise CaptureError(
            f"{ranks.name(ranks.rank)} does not see the capture that rank 0 opened: {error.what}",
            expected=error.expected,
            found=error.found,
            next_step=error.next_step,
        ) from error
