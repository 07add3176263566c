"""Ranks that write one capture: threads of this process, over one store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.pipeline.shared_capture import CaptureProposal, merge_proposals, open_shared_capture
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.ranks.rank_group import BackgroundCall, RankGroup, RankPlace
from minimax_tools.slices.source import open_source

CPU = torch.device("cpu")


def plan_of(folder: Path, middle: int) -> PartitionPlan:
    spans = {"a": Span(0, middle), "b": Span(middle, 4)}
    nodes = [Node(name=name, memory_bytes=10**12, layers=span) for name, span in spans.items()]
    workload = Workload(context_length=24, batch_size=2)
    return open_source(str(folder)).divide(planner="manual", nodes=nodes, workload=workload)


def rank_of(store: Any, rank: int) -> RankGroup:
    ranks = RankGroup(RankPlace(rank=rank, num_ranks=2, local_rank=rank, num_local=2), store)
    ranks.nonce = "attempt"
    ranks.assign(["a", "b"])
    return ranks


@pytest.fixture(scope="module")
def goldens(toy: Path, ask: Any) -> Iterator[tuple[Golden, Golden]]:
    """The goldens of the two slices."""
    first, second = (
        ask(streaming=Streaming(device=CPU, prefetch=False, part=part, holds_part=False))
        for part in plan_of(toy, 2).used
    )
    with open_golden(first) as one, open_golden(second) as other:
        yield one, other


@pytest.fixture(scope="module")
def proposals(goldens: tuple[Golden, Golden], toy: Path) -> list[CaptureProposal]:
    return [CaptureProposal.of(golden, plan_of(toy, 2)) for golden in goldens]


def made_elsewhere(proposal: CaptureProposal, **changes: Any) -> CaptureProposal:
    """The proposal of a rank whose provenance is another one."""
    description = proposal.description
    provenance = replace(description.provenance, **changes)
    return replace(proposal, description=replace(description, provenance=provenance))


def test_checkpoint_may_lie_elsewhere_on_each_machine(proposals: list[CaptureProposal]) -> None:
    other = [proposals[0], made_elsewhere(proposals[1], model_source="/elsewhere")]
    merged = merge_proposals(rank_of(HashStore(), 0), other)
    assert merged.provenance.model_source == proposals[0].description.provenance.model_source


@pytest.mark.parametrize(("field", "value"), [("device", "1 × NVIDIA A100"), ("backend", "cuda")])
def test_mix_of_devices_is_refused(proposals: list[CaptureProposal], field: str, value: str) -> None:
    other = [proposals[0], made_elsewhere(proposals[1], **{field: value})]
    with pytest.raises(
        CannotRunError, match=rf"rank 1 \(node b\) would make another .*: found other {field}"
    ):
        merge_proposals(rank_of(HashStore(), 0), other)


def test_rank_with_another_plan_is_named(proposals: list[CaptureProposal], toy: Path) -> None:
    plan = plan_of(toy, 2)
    assert plan.digest == replace(plan, model="elsewhere").digest
    assert plan.digest != plan_of(toy, 1).digest
    other = [proposals[0], replace(proposals[1], plan="f" * 64)]
    with pytest.raises(
        CannotRunError, match=r"rank 1 \(node b\) goes by another plan than rank 0: .*f{12}\."
    ):
        merge_proposals(rank_of(HashStore(), 0), other)


def open_both(
    goldens: tuple[Golden, Golden], proposals: list[CaptureProposal], *directories: Path
) -> list[BackgroundCall]:
    store = HashStore()
    has_looked = threading.Event()

    def open_one(rank: int) -> tuple[int, ...]:
        ranks = rank_of(store, rank)
        try:
            with open_shared_capture(
                ranks, proposals[rank], goldens[rank], directories[rank], patience_s=0.5
            ) as writer:
                # Rank 0 must not leave before the other one has looked.
                assert rank == 1 or has_looked.wait(20)
                return writer.complete_layers
        finally:
            if rank == 1:
                has_looked.set()

    calls = [BackgroundCall(lambda rank=rank: open_one(rank)) for rank in range(2)]
    assert all(call.is_over(20) for call in calls)
    return calls


@pytest.mark.parametrize(("left", "found"), [(None, "found none"), ("", "found that of another")])
def test_directory_that_is_another_one_is_refused_whatever_lies_there(
    goldens: tuple[Golden, Golden],
    proposals: list[CaptureProposal],
    tmp_path: Path,
    left: str | None,
    found: str,
) -> None:
    (tmp_path / "other").mkdir()
    if left is not None:
        (tmp_path / "other/.lock").write_text(left)
    _, second = open_both(goldens, proposals, tmp_path / "one", tmp_path / "other")
    assert isinstance(second.error, CaptureError)
    assert "rank 1 (node b) does not see the capture that rank 0 opened" in str(second.error)
    assert found in str(second.error)
