from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import in_use_and

from gpu_reference.model.footprint import Footprint
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.stream_choice import (
    MemoryRoom,
    choose_part_streaming,
    choose_streaming,
    is_whole,
)
from gpu_reference.streaming.streaming import Streaming
from gpu_reference.streaming.streaming_request import StreamingRequest
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.partition.cost import PartCost
from minimax_tools.partition.node import Node, Stage
from minimax_tools.partition.plan import Slice
from minimax_tools.ranks.rank_group import RankPlace

CPU = torch.device("cpu")
ON_CPU = Placement(device_map={"": "cpu"})
BY_HAND = (
    Placement(device_map={"model": "cpu", "lm_head": "cpu"}),
    Placement(device_map={"": "disk"}),
    Placement(device_map={"": "cpu"}, offload_folder=Path("offload")),
)


@pytest.fixture(scope="module")
def footprint(ask: Any) -> Footprint:
    """The toy's: four layers of 6.8 MB."""
    found: Footprint = ask().footprint
    return found


def choose(
    footprint: Footprint,
    mode: str = "auto",
    placement: Placement = ON_CPU,
    *,
    prefetch: bool | None = None,
    packed: bool = False,
    budget: MemoryBudget | None = None,
    absent_shards: tuple[str, ...] = (),
) -> Streaming | None:
    asked = StreamingRequest(stream=mode, prefetch=prefetch, packed_experts=packed)
    room = MemoryRoom(footprint=footprint, placement=placement, budget=budget or MemoryBudget.unlimited())
    return choose_streaming(asked, room, absent_shards=absent_shards)


def limited(num_bytes: float) -> Placement:
    return Placement(device_map="auto", max_memory={"cpu": int(num_bytes)})


def test_model_that_fits_is_loaded_whole_without_a_word(
    footprint: Footprint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(footprint) is None
    assert choose(footprint, placement=limited(10e9)) is None
    assert caplog.text == ""


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_prefetching_is_chosen_where_two_layers_fit(footprint: Footprint, mode: str) -> None:
    room = 2 * footprint.layer_bytes + footprint.activation_bytes
    assert choose(footprint, mode, limited(room + 1)) == Streaming(device=CPU, prefetch=True)
    assert choose(footprint, mode, limited(room - 1)) == Streaming(device=CPU, prefetch=False)


def test_reason_names_what_it_takes_and_what_is_free(
    footprint: Footprint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(footprint, placement=limited(9e6)) is not None
    assert re.search(r"the whole model takes [\d.]+ MB, 9\.0 MB are free", caplog.text)
    assert "--stream off loads it all the same" in caplog.text
    assert "No layer is read ahead: two take" in caplog.text


def test_missing_shards_of_other_layers_are_a_reason(
    footprint: Footprint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert choose(footprint, absent_shards=("a", "b")) is not None
    assert "not here are 2 shards of other layers" in caplog.text


def test_packed_experts_stream_and_say_so(footprint: Footprint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose(footprint, packed=True) == Streaming(device=CPU, prefetch=True, packed=True)
    assert "--packed-experts needs it" in caplog.text


@pytest.mark.parametrize("placement", BY_HAND)
def test_model_placed_by_hand_is_loaded_whole(footprint: Footprint, placement: Placement) -> None:
    assert is_whole("auto", placement)
    assert choose(footprint, placement=placement, budget=in_use_and(1e6)) is None
    assert choose(footprint, "off", placement) is None


@pytest.mark.parametrize("placement", BY_HAND)
@pytest.mark.parametrize(
    ("mode", "packed", "what"), [("on", False, "--stream on"), ("auto", True, "--packed-experts")]
)
def test_stream_of_a_model_placed_by_hand_is_refused(
    footprint: Footprint, placement: Placement, mode: str, packed: bool, what: str
) -> None:
    with pytest.raises(UsageError, match=f"{what} runs every layer on one device"):
        choose(footprint, mode, placement, packed=packed)


def test_options_of_a_stream_are_refused_with_off(footprint: Footprint) -> None:
    with pytest.raises(UsageError, match="--packed-experts is a way of streaming"):
        choose(footprint, "off", packed=True)
    with pytest.raises(UsageError, match="--prefetch has no effect"):
        choose(footprint, "off", prefetch=True)
    with pytest.raises(UsageError, match="--no-prefetch has no effect"):
        choose(footprint, "off", prefetch=False)


@pytest.mark.parametrize(
    ("limit", "options"), [(6e6, {}), (10e6, {"prefetch": True}), (3e6, {"packed": True})]
)
def test_limit_below_the_layers_in_memory_is_refused(
    footprint: Footprint, limit: float, options: dict[str, Any]
) -> None:
    message = r"--max-memory does not allow the layers that are in memory at once: expected at least .* MB"
    with pytest.raises(UsageError, match=message):
        choose(footprint, "on", limited(limit), **options)


def part_of(layers: range, *, has_head: bool = False) -> Slice:
    stage = Stage(
        node=Node(name="x", memory_bytes=1), layers=layers, has_embedding=layers.start == 0, has_head=has_head
    )
    nothing = dict.fromkeys(PartCost.__dataclass_fields__, 0)
    return Slice(stage=stage, cost=PartCost(**nothing), tensors=())


def choose_part(
    footprint: Footprint, part: Slice, *, room: float = 1e15, mode: str = "auto", num_local: int = 1
) -> Streaming:
    return choose_part_streaming(
        StreamingRequest(stream=mode),
        MemoryRoom(footprint=footprint, placement=ON_CPU, budget=in_use_and(room)),
        part,
        place=RankPlace(rank=0, num_ranks=num_local, local_rank=0, num_local=num_local),
    )


def test_slice_that_fits_is_held_and_one_that_does_not_is_streamed(
    footprint: Footprint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    part = part_of(range(4))
    assert choose_part(footprint, part).holds_part
    assert choose_part(footprint, part, room=1, mode="off").holds_part
    assert not choose_part(footprint, part, mode="on").holds_part
    assert not caplog.text
    assert not choose_part(footprint, part, room=20e6).holds_part
    assert "the slice of node x takes" in caplog.text


def test_ranks_of_one_machine_share_its_memory(footprint: Footprint) -> None:
    part = part_of(range(2))
    needed = footprint.held_bytes(part.stage, packed=False) + footprint.activation_bytes
    # Nine tenths of what is free are planned with.
    assert choose_part(footprint, part, room=1.5 * needed).holds_part
    assert not choose_part(footprint, part, room=1.5 * needed, num_local=2).holds_part


def test_slice_with_the_head_needs_room_for_its_logits(footprint: Footprint) -> None:
    part = part_of(range(2, 4), has_head=True)
    without = footprint.held_bytes(part.stage, packed=False) + footprint.activation_bytes
    assert footprint.logits_bytes > 1e5
    assert not choose_part(footprint, part, room=(without + footprint.logits_bytes / 2) / 0.9).holds_part
    assert choose_part(footprint, part, room=(without + footprint.logits_bytes) / 0.9 + 3e5).holds_part
