"""Opening: how the ranks of a run come to write one capture together, before any of them reads a weight.

Each rank introduces itself: the plan it goes by, and what it would write. Rank 0 compares, opens the directory, and
tells all what lies there already. What is to be done follows from that one answer, never from a file that rank 0 may
be writing meanwhile; and each rank makes sure that it sees the very directory that rank 0 opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_reference.golden.golden import Golden
from gpu_reference.ranks.ranks import RankGroup
from minimax_tools.capture.manifest import Description, Manifest
from minimax_tools.capture.parts import part_name
from minimax_tools.capture.sharing import SETTLING_S, require_shared
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.index import digest_shapes
from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.weight_names import layer_of
from minimax_tools.partition.plan import PartitionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a rank tells of itself.

    Args:
        plan: Digest of its plan.
        description: Of the capture that it would write, of its slice's layers.
        shapes: Those of its tensors outside the layers, by name.
    """

    plan: str
    description: Description
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, golden: Golden, plan: PartitionPlan) -> Introduction:
        """What a rank tells that opened this golden."""
        entries = golden.reader.index.entries
        return cls(
            plan=plan.digest,
            description=golden.describe(),
            shapes={name: entry.shape for name, entry in entries.items() if layer_of(name) is None},
        )


@contextmanager
def open_together(
    ranks: RankGroup,
    introduction: Introduction,
    golden: Golden,
    directory: Path,
    *,
    patience_s: float = SETTLING_S,
) -> Iterator[CaptureWriter]:
    """The capture directory, opened by rank 0; all ranks write into it.

    Args:
        ranks: All of them.
        introduction: This one's.
        golden: This one's.
        directory: The capture directory, which all ranks see.
        patience_s: How long it may take until another machine sees it.

    Raises:
        CaptureError: The directory is in use or not shared, holds something else, or the disk is full.
        CannotRunError: The ranks go by different plans, or would make different captures.
    """
    ranks.say(f"introduction/{ranks.rank}", encode(introduction))
    if ranks.rank > 0:
        manifest = decode(Manifest, ranks.ask("opening"))
        _require_shared(ranks, directory, patience_s)
        yield CaptureWriter(directory, manifest, manifest_name=part_name(ranks.rank))
        return
    told = [ranks.ask(f"introduction/{rank}") for rank in range(ranks.num_ranks)]
    merged = merge_introductions(ranks, decode(list[Introduction], told))
    with open_capture(directory, merged, inputs=golden.request.inputs, owner=ranks.nonce) as writer:
        ranks.say("opening", encode(writer.manifest))
        yield writer


def merge_introductions(ranks: RankGroup, introductions: list[Introduction]) -> Description:
    """The description of what all ranks make together.

    Raises:
        CannotRunError: One of them goes by another plan, or would make another capture.
    """
    first = introductions[0]
    own = first.description.provenance
    layers: dict[int, str] = {}
    layer_tensors: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, introduction in enumerate(introductions):
        if introduction.plan != first.plan:
            raise CannotRunError(
                f"{ranks.name(rank)} goes by another plan than rank 0",
                expected=first.plan[:12],
                found=introduction.plan[:12],
                next_step="Copy one plan file to all machines, and run the same command again.",
            )
        theirs = introduction.description.provenance.model
        differing = first.description.differences(_as_of(introduction.description, first.description))
        if differing:
            raise CannotRunError(
                f"{ranks.name(rank)} would make another capture than rank 0",
                found=f"other {', '.join(differing)}",
                next_step="Start all ranks with the same options, checkpoint, libraries, environment and devices.",
            )
        layers |= theirs.layers
        layer_tensors |= theirs.layer_tensors
        shapes |= introduction.shapes
    merged = replace(
        own.model,
        layers=dict(sorted(layers.items())),
        layer_tensors=dict(sorted(layer_tensors.items())),
        tensors_digest=digest_shapes(shapes),
    )
    return replace(first.description, provenance=replace(own, model=merged))


def _as_of(other: Description, first: Description) -> Description:
    """Another rank's description with rank 0's slice, and its name for the checkpoint: these may differ."""
    own = first.provenance
    model = replace(
        other.provenance.model,
        layers=own.model.layers,
        layer_tensors=own.model.layer_tensors,
        tensors_digest=own.model.tensors_digest,
    )
    return replace(other, provenance=replace(other.provenance, model=model, model_source=own.model_source))


def _require_shared(ranks: RankGroup, directory: Path, patience_s: float) -> None:
    try:
        require_shared(directory, ranks.nonce, patience_s=patience_s)
    except CaptureError as error:
        raise CaptureError(
            f"{ranks.name(ranks.rank)} does not see the capture that rank 0 opened: {error.what}",
            expected=error.expected,
            found=error.found,
            next_step=error.next_step,
        ) from error
