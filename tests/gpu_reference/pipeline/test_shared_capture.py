"""Ranks that write one capture: threads of this process, over one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.pipeline.shared_capture import CaptureProposal, merge_proposals, open_shared_capture
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.manifest import Description
from minimax_tools.errors import CannotRunError, CaptureError
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.ranks.rank_group import BackgroundCall, RankGroup, RankPlace
from minimax_tools.slices.source import open_source


def plan_of(folder: Path, middle: int) -> PartitionPlan:
    source = open_source(str(folder))
    spans = (Span(0, middle), Span(middle, 4))
    return source.divide(
        planner="manual",
        nodes=[
            Node(name=name, memory_bytes=10**12, layers=span) for name, span in zip("ab", spans, strict=True)
        ],
        workload=Workload(context_length=24, batch_size=2),
    )


def rank_of(store: Any, rank: int) -> RankGroup:
    place = RankPlace(rank=rank, num_ranks=2, local_rank=rank, num_local=2)
    ranks = RankGroup(place, store)
    ranks.nonce = "attempt"
    ranks.assign(["a", "b"])
    return ranks


@pytest.fixture(scope="module")
def goldens(toy: Path, ask: Any) -> Iterator[tuple[Golden, Golden]]:
    """The goldens of the two slices."""
    first, second = (
        ask(streaming=Streaming(device=torch.device("cpu"), prefetch=False, part=part, holds_part=False))
        for part in plan_of(toy, 2).used
    )
    with open_golden(first) as one, open_golden(second) as other:
        yield one, other


@pytest.fixture(scope="module")
def proposals(goldens: tuple[Golden, Golden], toy: Path) -> list[CaptureProposal]:
    return [CaptureProposal.of(golden, plan_of(toy, 2)) for golden in goldens]


def changed(proposal: CaptureProposal, change: Callable[[Description], Description]) -> CaptureProposal:
    return replace(proposal, description=change(proposal.description))


def test_what_ranks_make_together_is_what_one_process_makes(
    proposals: list[CaptureProposal], ask: Any
) -> None:
    merged = merge_proposals(rank_of(HashStore(), 0), proposals)
    with open_golden(ask(streaming=Streaming(device=torch.device("cpu"), prefetch=False))) as golden:
        assert merged.differences(golden.describe()) == []


def test_plan_is_told_apart_by_what_it_gives_to_whom(toy: Path) -> None:
    plan = plan_of(toy, 2)
    assert plan.digest == replace(plan, model="elsewhere").digest
    assert plan.digest != plan_of(toy, 1).digest


def test_rank_with_another_plan_is_named(proposals: list[CaptureProposal]) -> None:
    other = [proposals[0], replace(proposals[1], plan="f" * 64)]
    with pytest.raises(
        CannotRunError, match=r"rank 1 \(node b\) goes by another plan than rank 0: .*f{12}\."
    ):
        merge_proposals(rank_of(HashStore(), 0), other)


@pytest.mark.parametrize(("field", "value"), [("device", "1 × NVIDIA A100"), ("backend", "cuda")])
def test_mix_of_devices_is_refused(proposals: list[CaptureProposal], field: str, value: str) -> None:
    def change(description: Description) -> Description:
        return replace(description, provenance=replace(description.provenance, **{field: value}))

    other = [proposals[0], changed(proposals[1], change)]
    with pytest.raises(
        CannotRunError, match=rf"rank 1 \(node b\) would make another .*: found other {field}"
    ):
        merge_proposals(rank_of(HashStore(), 0), other)


def test_checkpoint_may_lie_elsewhere_on_each_machine(proposals: list[CaptureProposal]) -> None:
    def change(description: Description) -> Description:
        return replace(description, provenance=replace(description.provenance, model_source="/elsewhere"))

    other = [proposals[0], changed(proposals[1], change)]
    merged = merge_proposals(rank_of(HashStore(), 0), other)
    assert merged.provenance.model_source == proposals[0].description.provenance.model_source


def open_both(
    goldens: tuple[Golden, Golden], proposals: list[CaptureProposal], *directories: Path
) -> list[BackgroundCall]:
    store = HashStore()

    def open_one(rank: int) -> tuple[int, ...]:
        with open_shared_capture(
            rank_of(store, rank), proposals[rank], goldens[rank], directories[rank], patience_s=0.5
        ) as writer:
            other = rank_of(store, rank)
            other.publish(f"in/{rank}", True)
            if rank == 0:
                # It must not leave before the other one has looked.
                for _ in range(75):
                    if other.is_published("in/1"):
                        break
                    time.sleep(0.02)
            return writer.complete_layers

    calls = [BackgroundCall(lambda rank=rank: open_one(rank)) for rank in range(2)]
    assert all(call.is_over(20) for call in calls)
    return calls


def test_ranks_that_share_a_directory_open_it(
    goldens: tuple[Golden, Golden], proposals: list[CaptureProposal], tmp_path: Path
) -> None:
    calls = open_both(goldens, proposals, tmp_path / "one", tmp_path / "one")
    assert [(call.result, call.error) for call in calls] == [((), None)] * 2


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
