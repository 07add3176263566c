"""A stream's choice, reads, end, proofs and memory; `test_streamed_captures` holds its bytes."""

from __future__ import annotations

import logging
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import CPU as ON_CPU
from goldens import FEW, StoppedError, capture, in_use_and, streams

from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.model.footprint import Footprint
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.stream_choice import (
    MemoryRoom,
    choose_part_streaming,
    choose_streaming,
    is_whole,
)
from gpu_reference.streaming.streaming import OnceReader, Streaming
from gpu_reference.streaming.streaming_request import StreamingRequest
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import GoldenRefusedError, UsageError
from minimax_tools.machine.memory import MemoryBudget, MemoryBudgetError
from minimax_tools.partition.cost import PartCost
from minimax_tools.partition.node import Node, Stage
from minimax_tools.partition.plan import Slice
from minimax_tools.ranks.rank_group import RankPlace
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest

CPU = torch.device("cpu")
ALONE, PREFETCHING = streams("cpu").values()
PACKED = Streaming(device=CPU, prefetch=False, packed=True)
GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.fixture
def once(toy: Path) -> OnceReader:
    return OnceReader(toy, index=TensorIndex.from_folder(toy))


def size(once: OnceReader, *names: str) -> int:
    return sum(once.index[name].size_bytes for name in names)


def test_announced_tensor_is_read_once_and_given_twice(once: OnceReader, toy: Path) -> None:
    with CheckpointReader(toy) as plain:
        expected = plain.read_weight(EXPERT, torch.bfloat16)
    once.expect_again([EXPERT, EXPERT + "_scale_inv", "no.such.tensor"])
    for _ in range(2):
        assert torch.equal(once.read_weight(EXPERT, torch.bfloat16), expected)
    assert once.num_bytes_read == size(once, EXPERT, EXPERT + "_scale_inv")


def test_what_was_not_announced_is_read_again_and_counts_again(once: OnceReader) -> None:
    once.expect_again([GATE])
    for _ in range(3):
        once.read(GATE)
    assert once.num_bytes_read == 2 * size(once, GATE)
    assert once.sizes_read == {GATE: size(once, GATE)}


def test_rows_of_an_announced_tensor_are_not_taken_for_the_whole(once: OnceReader, toy: Path) -> None:
    with CheckpointReader(toy) as plain:
        expected = plain.read_weight(GATE, torch.float32)
    once.expect_again([GATE])
    halves = [torch.empty(2, expected.shape[1]) for _ in range(2)]
    for half, start in zip(halves, (0, 2), strict=True):
        once.read_weight_into(GATE, half, rows=range(start, start + 2))
    assert torch.equal(torch.cat(halves), expected[:4])
    assert torch.equal(once.read_weight(GATE, torch.float32), expected)
    assert once.sizes_read == {GATE: size(once, GATE)}


def reading_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mm2-")]


def bound_weights(golden: Golden) -> list[str]:
    return [name for name, weight in golden.model.named_parameters() if not weight.is_meta]


class Interrupting:
    """Presses Ctrl-C when a layer is written."""

    def advance(self, layer: int, *, num_bytes: int) -> None:
        if layer == 1:
            signal.raise_signal(signal.SIGINT)

    def skip(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("streaming", [ALONE, PREFETCHING], ids=["alone", "prefetching"])
def test_interrupt_ends_the_stream_and_its_threads_and_leaves_a_capture_to_resume(
    ask: Any, tmp_path: Path, streaming: Streaming, request: pytest.FixtureRequest
) -> None:
    # Who is started in the background by a shell is born deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt):
        capture(ask(streaming=streaming, noise_floor="full"), tmp_path, Interrupting())
    assert reading_threads() == []
    assert Capture.open(tmp_path).layers == (0, 1)


def test_model_stands_bare_but_for_the_part_that_runs(ask: Any) -> None:
    seen: list[set[str]] = []
    with open_golden(ask(streaming=PREFETCHING)) as golden:
        assert bound_weights(golden) == []
        for layer in range(4):
            golden.model.get_submodule(f"model.layers.{layer}.mlp").register_forward_hook(
                lambda *_: seen.append({".".join(name.split(".")[:3]) for name in bound_weights(golden)})
            )
        golden.run()
    assert seen == [{f"model.layers.{layer}"} for layer in range(4)]
    assert reading_threads() == []


@pytest.mark.parametrize(
    ("inputs", "before"), [(FEW, "mlp.gate"), (FEW, "self_attn"), (None, "")], ids=["gate", "attn", "many"]
)
def test_first_layer_is_proved_with_few_tokens_too(ask: Any, inputs: Any, before: str) -> None:
    """A weight that is spoilt between its reading and the proof is refused."""
    with open_golden(ask(streaming=ALONE, inputs=inputs)) as golden:
        layer = golden.model.get_submodule("model.layers.0")

        def spoil(*_: object) -> None:
            weight = layer.get_submodule("self_attn.q_norm").get_parameter("weight")
            if not weight.is_meta:
                weight.data.add_(1)

        if before:
            layer.get_submodule(before).register_forward_pre_hook(spoil)
            with pytest.raises(GoldenRefusedError, match=r"layer 0: self_attn\.q_norm\.weight differs"):
                golden.run()
        else:
            # With many tokens the proof comes before any part of the layer runs: nothing can be spoilt before it.
            layer.register_forward_pre_hook(spoil, prepend=True)
            golden.run()


def test_experts_of_few_tokens_are_proved(ask: Any) -> None:
    request = ask(streaming=ALONE, inputs=FEW)
    with open_golden(request) as golden:
        read_before = golden.reader.num_bytes_read
        golden.model.get_submodule("model.layers.1").register_forward_pre_hook(stop)
        with pytest.raises(StoppedError):
            golden.run()
        index, again = golden.reader.index, golden.reader.num_bytes_read - read_before
        layer = {name: index[name].size_bytes for name in index.layer_names(0)}
    others = sum(size for name, size in layer.items() if ".experts." not in name)
    expert = sum(size for name, size in layer.items() if ".experts.0." in name)
    rows = len(request.inputs.input_ids.unique())
    embedding = rows * index["model.embed_tokens.weight"].narrow_rows(0, 1).size_bytes
    # Attention of both layers, and the experts that the tokens go to: what the proof compares is not read again.
    experts, rest = divmod(again - embedding - 2 * others, expert)
    assert rest == 0
    assert 4 <= experts <= 24


def stop(*_: object) -> None:
    raise StoppedError


@pytest.mark.parametrize(
    ("streaming", "experts", "message"),
    [
        (ALONE, "grouped_mm", "streaming one layer at a time would break the memory budget"),
        (PREFETCHING, "grouped_mm", "streaming two layers at a time would break the memory budget"),
        (PACKED, "eager", "streaming one layer at a time would break the memory budget"),
        (None, "grouped_mm", "loading the model whole would break the memory budget"),
    ],
)
def test_budget_that_is_too_small_is_told_before_anything_is_read(
    ask: Any, streaming: Streaming | None, experts: str, message: str
) -> None:
    request = ask(streaming=streaming, experts_implementation=experts, budget=in_use_and(1e6))
    with pytest.raises(MemoryBudgetError, match=message) as caught, open_golden(request):
        raise AssertionError("the golden opened")
    assert caught.value.needed_bytes > 1e6


def test_budget_that_allows_one_layer_and_not_two(ask: Any, tmp_path: Path) -> None:
    request = ask(inputs=InputRequest(seq_lens=(8,)))
    footprint = request.footprint
    needed = footprint.layer_bytes + footprint.activation_bytes
    # Room for what libraries set up at the first run, too.
    budget = in_use_and(needed + 5e6)
    with (
        pytest.raises(MemoryBudgetError),
        open_golden(replace(request, streaming=PREFETCHING, budget=budget)),
    ):
        raise AssertionError("the golden opened")
    made = capture(replace(request, streaming=ALONE, budget=in_use_and(needed + 60e6)), tmp_path)
    assert made.manifest.is_complete


def test_packed_experts_are_refused_where_one_is_not_fp8(tmp_path: Path, ask: Any, toy: Path) -> None:
    mixed = tmp_path / "mixed"
    synthesize(mixed, model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    # A config that promises FP8 over shards that are not.
    (mixed / "config.json").write_bytes((toy / "config.json").read_bytes())
    request = ask(folder=mixed, experts_implementation="eager", streaming=PACKED)
    message = r"need every expert in FP8, and model\.layers\.0\..*experts\.0\.w1\.weight is not"
    with pytest.raises(UsageError, match=message), open_golden(request):
        raise AssertionError("the golden opened")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of six layers of 60 MB in FP8."""
    folder = tmp_path_factory.mktemp("checkpoint") / "wide"
    model = SyntheticModel(
        num_hidden_layers=6, hidden_size=1024, num_local_experts=36, intermediate_size=512, vocab_size=2048
    )
    synthesize(folder, model=model, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=0)
    return folder


@pytest.mark.slow
def test_stream_takes_one_layer_or_two_and_gives_them_back(wide: Path, measure: Any) -> None:
    tokens = {"lens": [64], "experts": "eager"}
    alone, prefetching, packed, refused = measure(
        wide,
        {**tokens, "noise_floor": "full"},
        {**tokens, "noise_floor": "full", "prefetch": True},
        {**tokens, "noise_floor": "full", "packed": True},
        {**tokens, "budget": 100_000_000},
    )
    # What libraries keep for every shape they met is the same for layers of any size.
    layer, beside = alone["layer"], alone["activations"] + 30e6
    assert layer <= alone["peak"] <= layer + beside
    assert 2 * layer <= prefetching["peak"] <= 2 * layer + beside
    assert alone["packed_layer"] <= packed["peak"] <= alone["packed_layer"] + beside
    for measured in (alone, prefetching, packed):
        assert measured["left"] < 0.25 * layer
    assert "streaming one layer at a time would break the memory budget" in refused["error"]
    assert refused["peak"] < 0.1 * layer


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


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def choose(
    footprint: Footprint,
    mode: str = "auto",
    placement: Placement = ON_CPU,
    *,
    budget: MemoryBudget | None = None,
    absent_shards: tuple[str, ...] = (),
    **options: Any,
) -> Streaming | None:
    room = MemoryRoom(footprint=footprint, placement=placement, budget=budget or MemoryBudget.unlimited())
    asked = StreamingRequest(stream=mode, **options)
    return choose_streaming(asked, room, absent_shards=absent_shards)


def limited(num_bytes: float) -> Placement:
    return Placement(device_map="auto", max_memory={"cpu": int(num_bytes)})


def test_model_that_fits_is_loaded_whole_without_a_word(
    footprint: Footprint, told: pytest.LogCaptureFixture
) -> None:
    assert choose(footprint) is None
    assert choose(footprint, placement=limited(10e9)) is None
    assert told.text == ""


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_prefetching_is_chosen_where_two_layers_fit(footprint: Footprint, mode: str) -> None:
    room = 2 * footprint.layer_bytes + footprint.activation_bytes
    assert choose(footprint, mode, limited(room + 1)) == Streaming(device=CPU, prefetch=True)
    assert choose(footprint, mode, limited(room - 1)) == Streaming(device=CPU, prefetch=False)


def test_reason_names_what_it_takes_and_what_is_free(
    footprint: Footprint, told: pytest.LogCaptureFixture
) -> None:
    assert choose(footprint, placement=limited(9e6)) is not None
    assert re.search(r"the whole model takes [\d.]+ MB, 9\.0 MB are free", told.text)
    assert "--stream off loads it all the same" in told.text
    assert "No layer is read ahead: two take" in told.text


def test_missing_shards_and_packed_experts_are_reasons(
    footprint: Footprint, told: pytest.LogCaptureFixture
) -> None:
    assert choose(footprint, absent_shards=("a", "b")) is not None
    assert "not here are 2 shards of other layers" in told.text
    packed = choose(footprint, packed_experts=True)
    assert packed == Streaming(device=CPU, prefetch=True, packed=True)
    assert "--packed-experts needs it" in told.text


@pytest.mark.parametrize("placement", BY_HAND)
def test_model_placed_by_hand_is_loaded_whole_or_refused(footprint: Footprint, placement: Placement) -> None:
    assert is_whole("auto", placement)
    assert choose(footprint, placement=placement, budget=in_use_and(1e6)) is None
    assert choose(footprint, "off", placement) is None
    with pytest.raises(UsageError, match="--stream on runs every layer on one device"):
        choose(footprint, "on", placement)
    with pytest.raises(UsageError, match="--packed-experts runs every layer on one device"):
        choose(footprint, "auto", placement, packed_experts=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packed_experts": True}, "--packed-experts is a way of streaming"),
        ({"prefetch": True}, "--prefetch has no effect"),
        ({"prefetch": False}, "--no-prefetch has no effect"),
    ],
)
def test_options_of_a_stream_are_refused_with_off(
    footprint: Footprint, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose(footprint, "off", **options)


@pytest.mark.parametrize(
    ("limit", "options"), [(6e6, {}), (10e6, {"prefetch": True}), (3e6, {"packed_experts": True})]
)
def test_limit_below_the_layers_in_memory_is_refused(
    footprint: Footprint, limit: float, options: dict[str, Any]
) -> None:
    message = r"--max-memory does not allow the layers that are in memory at once: expected at least .* MB"
    with pytest.raises(UsageError, match=message):
        choose(footprint, "on", limited(limit), **options)


def part_of(layers: range, *, has_head: bool = False) -> Slice:
    node = Node(name="x", memory_bytes=1)
    stage = Stage(node=node, layers=layers, has_embedding=layers.start == 0, has_head=has_head)
    nothing = dict.fromkeys(PartCost.__dataclass_fields__, 0)
    return Slice(stage=stage, cost=PartCost(**nothing), tensors=())


def is_held(
    footprint: Footprint, part: Slice, *, room: float = 1e15, mode: str = "auto", num_local: int = 1
) -> bool:
    place = RankPlace(rank=0, num_ranks=num_local, local_rank=0, num_local=num_local)
    memory = MemoryRoom(footprint=footprint, placement=ON_CPU, budget=in_use_and(room))
    return choose_part_streaming(StreamingRequest(stream=mode), memory, part, place=place).holds_part


def test_slice_that_fits_is_held_and_one_that_does_not_is_streamed(
    footprint: Footprint, told: pytest.LogCaptureFixture
) -> None:
    part = part_of(range(4))
    assert is_held(footprint, part)
    assert is_held(footprint, part, room=1, mode="off")
    assert not is_held(footprint, part, mode="on")
    assert not told.text
    assert not is_held(footprint, part, room=20e6)
    assert "the slice of node x takes" in told.text


def test_ranks_of_one_machine_share_its_memory(footprint: Footprint) -> None:
    part = part_of(range(2))
    needed = footprint.held_bytes(part.stage, packed=False) + footprint.activation_bytes
    # Nine tenths of what is free are planned with.
    assert is_held(footprint, part, room=1.5 * needed)
    assert not is_held(footprint, part, room=1.5 * needed, num_local=2)


def test_slice_with_the_head_needs_room_for_its_logits(footprint: Footprint) -> None:
    part = part_of(range(2, 4), has_head=True)
    without = footprint.held_bytes(part.stage, packed=False) + footprint.activation_bytes
    assert footprint.logits_bytes > 1e5
    assert not is_held(footprint, part, room=(without + footprint.logits_bytes / 2) / 0.9)
    assert is_held(footprint, part, room=(without + footprint.logits_bytes) / 0.9 + 3e5)
