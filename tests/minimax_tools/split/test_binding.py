from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.errors import CheckpointError
from minimax_tools.split.binding import Binding, plan_binding
from minimax_tools.split.module_names import ModuleNames, ParameterPlace, Slot
from minimax_tools.stored_dtype import BFLOAT16, FLOAT32, StoredDtype

EXPERTS = "model.layers.1.mlp.experts"
HUB_EXPERTS = "model.layers.1.block_sparse_moe.experts"
# Eleven experts: as text, 10 comes before 2.
SLOTS = {
    slot.name: slot
    for slot in (
        Slot(name="model.layers.1.norm.weight", shape=(4,), dtype=BFLOAT16),
        Slot(name="model.layers.1.mlp.gate.weight", shape=(11, 4), dtype=FLOAT32),
        Slot(name=f"{EXPERTS}.gate_up_proj", shape=(11, 6, 4), dtype=BFLOAT16),
        Slot(name=f"{EXPERTS}.down_proj", shape=(11, 4, 3), dtype=BFLOAT16),
        Slot(name="lm_head.weight", shape=(8, 4), dtype=BFLOAT16),
    )
}
NAMES = ModuleNames(
    known=frozenset({*SLOTS, "model.embed_tokens.weight", "model.layers.0.norm.weight"}),
    prefix="model",
    layers="model.layers",
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=(r"rotary_emb\.inv_freq$",),
)


class MappedTensors:
    """A source of tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._tensors[name])

    def read_weight_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._tensors[name])


def tensors() -> dict[str, torch.Tensor]:
    """A checkpoint that fills all slots, under the hub's names."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    found = {
        "model.layers.1.norm.weight": make(4),
        "model.layers.1.block_sparse_moe.gate.weight": make(11, 4).float() + 1e-4,
        "model.embed_tokens.weight": make(8, 4),
    }
    for expert in range(11):
        found[f"{HUB_EXPERTS}.{expert}.w1.weight"] = make(3, 4)
        found[f"{HUB_EXPERTS}.{expert}.w2.weight"] = make(4, 3)
        found[f"{HUB_EXPERTS}.{expert}.w3.weight"] = make(3, 4)
    return dict(sorted(found.items()))


def facts(stored: Mapping[str, torch.Tensor]) -> dict[str, TensorSize]:
    return {name: TensorSize.of(name, tensor) for name, tensor in stored.items()}


def plan(stored: Mapping[str, torch.Tensor], slots: Mapping[str, Slot] = SLOTS) -> Binding:
    return plan_binding(slots, facts(stored), NAMES, layers=range(1, 2), where=Path("here"))


def fault(stored: Mapping[str, torch.Tensor]) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan(stored)
    return str(caught.value)


def test_experts_go_to_their_own_index_gate_rows_before_up_rows() -> None:
    stored = tensors()
    filled = plan(stored).fill(MappedTensors(stored), device=torch.device("cpu"))
    for expert in range(11):
        gate, up = filled[f"{EXPERTS}.gate_up_proj"][expert].split(3)
        assert torch.equal(gate, stored[f"{HUB_EXPERTS}.{expert}.w1.weight"])
        assert torch.equal(up, stored[f"{HUB_EXPERTS}.{expert}.w3.weight"])
        assert torch.equal(
            filled[f"{EXPERTS}.down_proj"][expert], stored[f"{HUB_EXPERTS}.{expert}.w2.weight"]
        )


def test_projections_named_as_in_qwen_go_to_the_same_places() -> None:
    as_qwen = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    stored = {}
    for name, tensor in tensors().items():
        for letter, projection in as_qwen.items():
            name = name.replace(f".{letter}.", f".{projection}.")
        stored[name.replace("block_sparse_moe", "mlp")] = tensor
    hub = tensors()
    expected = plan(hub).fill(MappedTensors(hub), device=torch.device("cpu"))
    filled = plan(stored).fill(MappedTensors(stored), device=torch.device("cpu"))
    assert all(torch.equal(filled[name], expected[name]) for name in SLOTS)


def test_grouped_tensors_are_taken_as_they_are() -> None:
    stored = {name: tensor for name, tensor in tensors().items() if ".experts." not in name}
    stored[f"{EXPERTS}.gate_up_proj"] = torch.ones(11, 6, 4)
    stored[f"{EXPERTS}.down_proj"] = torch.ones(11, 4, 3)
    assert plan(stored).sources[ParameterPlace(slot=f"{EXPERTS}.down_proj")] == f"{EXPERTS}.down_proj"


@pytest.mark.parametrize("change", [lambda name: name.removeprefix("model."), lambda name: name])
def test_prefix_may_be_left_out(change: object) -> None:
    assert callable(change)
    stored = {change(name): tensor for name, tensor in tensors().items()}
    assert plan(stored).num_tensors == len(stored)


def test_prefix_that_the_model_lacks_is_dropped() -> None:
    names = ModuleNames(known=frozenset({"h.0.ln.weight"}), prefix="transformer", layers="h")
    assert names.place_of("transformer.h.0.ln.weight") == ParameterPlace(slot="h.0.ln.weight")
    assert names.layer_of("transformer.h.0.ln.weight") == 0


def test_absent_head_takes_the_embedding_and_a_present_one_its_own() -> None:
    stored = tensors()
    head = ParameterPlace(slot="lm_head.weight")
    assert plan(stored).sources[head] == "model.embed_tokens.weight"
    stored["lm_head.weight"] = torch.zeros(8, 4, dtype=torch.bfloat16)
    assert plan(stored).sources[head] == "lm_head.weight"


def test_head_that_is_not_tied_is_missing() -> None:
    names = ModuleNames(known=NAMES.known, prefix="model", layers="model.layers")
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[8, 4\]: found nothing"):
        plan_binding(SLOTS, facts(tensors()), names, layers=range(1, 2), where=Path("here"))


def test_slot_keeps_its_own_dtype() -> None:
    stored = tensors()
    filled = plan(stored).fill(MappedTensors(stored), device=torch.device("cpu"))
    gate = filled["model.layers.1.mlp.gate.weight"]
    assert gate.dtype == torch.float32
    assert torch.equal(gate, stored["model.layers.1.block_sparse_moe.gate.weight"])


def test_tensors_are_read_in_the_order_given() -> None:
    stored = dict(reversed(tensors().items()))
    order = list(plan(stored).sources.values())
    assert order == [name for name in stored if name in order]


def test_report_counts_every_byte_of_the_slots() -> None:
    stored, counted = tensors(), []
    binding = plan(stored)
    binding.fill(MappedTensors(stored), device=torch.device("cpu"), report=counted.append)
    assert sum(counted) == binding.size_bytes == sum(slot.size_bytes for slot in SLOTS.values())


def test_all_faults_are_listed_at_once() -> None:
    stored = tensors()
    del stored[f"{HUB_EXPERTS}.7.w3.weight"]
    stored[f"{HUB_EXPERTS}.2.w2.weight"] = torch.zeros(3, 4)
    stored["model.layers.1.surprise.weight"] = torch.zeros(1)
    stored["model.layers.1.norm.weight"] = torch.zeros(4, dtype=torch.int64)
    text = fault(stored)
    assert f"{EXPERTS}.gate_up_proj, expert 7, up rows: found nothing" in text
    assert f"{HUB_EXPERTS}.2.w2.weight: expected [4, 3], found [3, 4]" in text
    assert "model.layers.1.surprise.weight: the model has no place for it" in text
    assert "model.layers.1.norm.weight: found dtype torch.int64" in text


def test_missing_experts_of_a_whole_layer_are_one_fault() -> None:
    stored = {name: tensor for name, tensor in tensors().items() if ".experts." not in name}
    assert f"{EXPERTS}.down_proj [11, 4, 3]: found nothing" in fault(stored)


def test_expert_beyond_the_last_is_a_fault() -> None:
    stored = {**tensors(), f"{HUB_EXPERTS}.11.w1.weight": torch.zeros(3, 4)}
    assert "has no such expert" in fault(stored)


def test_tensor_under_two_spellings_is_a_fault() -> None:
    stored = {**tensors(), "layers.1.norm.weight": torch.zeros(4)}
    assert "are the same tensor of the model" in fault(stored)


def test_other_layers_and_what_the_model_ignores_are_let_be() -> None:
    stored = {
        **tensors(),
        "model.layers.0.surprise.weight": torch.zeros(1),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(1),
    }
    assert plan(stored).num_tensors == len(tensors())


def test_unknown_tensor_outside_the_layers_is_a_fault() -> None:
    assert "model.adapter.weight: the model has no place" in fault(
        {**tensors(), "model.adapter.weight": torch.zeros(1)}
    )


def quantised() -> dict[str, torch.Tensor]:
    name = f"{HUB_EXPERTS}.0.w1.weight"
    stored = tensors()
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = torch.ones(1, 1)
    return stored


def test_scales_belong_to_their_weight() -> None:
    assert plan(quantised()).num_tensors == len(tensors())


def test_fp8_without_scales_or_with_others_is_a_fault() -> None:
    stored = quantised()
    scale = f"{HUB_EXPERTS}.0.w1.weight_scale_inv"
    stored[scale] = torch.ones(2, 1)
    assert f"{scale}: expected [1, 1], found [2, 1]" in fault(stored)
    del stored[scale]
    assert f"FP8 without its scales {scale}" in fault(stored)


def test_scales_of_a_weight_that_is_not_fp8_are_left_over() -> None:
    stored = {**tensors(), f"{HUB_EXPERTS}.0.w1.weight_scale_inv": torch.ones(1, 1)}
    assert "w1.weight_scale_inv: the model has no place for it" in fault(stored)


def test_integers_are_copied_and_need_the_same_dtype() -> None:
    slot = Slot(name="model.layers.1.count", shape=(2,), dtype=StoredDtype.of(torch.int64))
    names = ModuleNames(known=frozenset({slot.name}), prefix="model", layers="model.layers")
    slots = {slot.name: slot}
    stored = {slot.name: torch.tensor([2**40, 3])}
    binding = plan_binding(slots, facts(stored), names, layers=range(2), where=Path("here"))
    assert torch.equal(
        binding.fill(MappedTensors(stored), device=torch.device("cpu"))[slot.name], stored[slot.name]
    )
    stored = {slot.name: torch.ones(2)}
    with pytest.raises(CheckpointError, match="expected dtype torch.int64, found torch.float32"):
        plan_binding(slots, facts(stored), names, layers=range(2), where=Path("here"))


def test_failed_read_is_raised() -> None:
    stored = tensors()
    binding = plan(stored)
    del stored["model.layers.1.norm.weight"]
    with pytest.raises(KeyError, match=r"norm\.weight"):
        binding.fill(MappedTensors(stored), device=torch.device("cpu"))


def test_threads_that_begin_later_compute_with_as_many_as_before() -> None:
    before, found = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    try:
        stored = tensors()
        plan(stored).fill(MappedTensors(stored), device=torch.device("cpu"))
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [torch.get_num_threads(), *found] == [2, 2]
    finally:
        torch.set_num_threads(before)


def test_selection_holds_what_fills_the_slots_and_what_may_be_left_over() -> None:
    scale = f"{HUB_EXPERTS}.0.w1.weight_scale_inv"
    stored = {
        *tensors(),
        scale,
        "model.layers.1.surprise",
        "model.layers.0.norm.weight",
        "model.layers.0.other",
    }
    chosen = NAMES.select(stored, SLOTS, layers=range(1, 2))
    assert chosen == stored - {"model.layers.0.norm.weight", "model.layers.0.other"}


def test_selection_leaves_the_embedding_where_the_head_is_stored() -> None:
    chosen = NAMES.select({*tensors(), "lm_head.weight"}, SLOTS, layers=range(1, 2))
    assert "lm_head.weight" in chosen
    assert "model.embed_tokens.weight" not in chosen


def test_layer_number_is_shifted_in_place() -> None:
    assert NAMES.shift_layer("layers.1.layers.1.weight", 10) == "layers.11.layers.1.weight"
    assert NAMES.shift_layer("model.layers.10.mlp.weight", 2) == "model.layers.12.mlp.weight"
    assert NAMES.shift_layer("lm_head.weight", 2) == "lm_head.weight"
