"""A stream's end, its proofs and its memory; `test_streamed_captures` holds its bytes."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import StoppedError, capture, in_use_and

from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import GoldenRefusedError, UsageError
from minimax_tools.machine.memory import MemoryBudgetError
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest

CPU = torch.device("cpu")
ALONE, PREFETCHING = (Streaming(device=CPU, prefetch=prefetch) for prefetch in (False, True))
PACKED = Streaming(device=CPU, prefetch=False, packed=True)
FEW = InputRequest(seq_lens=(3, 2))


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
    ("streaming", "options", "message"),
    [
        (ALONE, {}, "streaming one layer at a time would break the memory budget"),
        (PREFETCHING, {}, "streaming two layers at a time would break the memory budget"),
        (PACKED, {"experts_implementation": "eager"}, "streaming one layer at a time would break"),
        (None, {}, "loading the model whole would break the memory budget"),
    ],
)
def test_budget_that_is_too_small_is_told_before_anything_is_read(
    ask: Any, streaming: Streaming | None, options: dict[str, Any], message: str
) -> None:
    request = replace(ask(streaming=streaming, **options), budget=in_use_and(1e6))
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
