from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize, expected_tensors
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.model.architecture import Architecture, part_of
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.cost import ModelCost, PartCost, Workload, measure_costs
from minimax_tools.stored_dtype import BFLOAT16, FLOAT8_E4M3FN, FLOAT32, StoredDtype
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds

FP8 = torch.float8_e4m3fn
M2 = Architecture.of("minimax_m2")
IDS = TokenIds(bos_token_id=0, eos_token_id=0)


def costs_of(model: SyntheticModel, workload: Workload, *, dtype: torch.dtype = FP8) -> ModelCost:
    config = model.config(dtype=dtype, token_ids=IDS)
    return measure_costs(expected_tensors(ModelSpec.from_config(config)), M2, config, workload)


def test_minimax_m2_costs_what_its_sizes_say() -> None:
    # Worked out by hand from its config.json: hidden 3072, 48 heads and 8 kv heads of 128, 256 experts of 1536.
    attention = 2 * 6144 * 3072 + 2 * 1024 * 3072
    expert = 3 * 1536 * 3072
    norms = 6144 + 1024 + 2 * 3072
    gate_and_bias = 256 * 3072 + 256
    layer = attention + 256 * expert + norms + gate_and_bias
    vocabulary = 200064 * 3072
    tokens = 4096 * 2

    cost = costs_of(SyntheticModel.m2(), Workload(context_length=4096, batch_size=2))

    assert layer == 3_668_718_848
    assert cost.whole.num_parameters == 62 * layer + 2 * vocabulary + 3072 == 228_689_764_864
    scales = 4 * (2 * 48 * 24 + 2 * 8 * 24 + 256 * 3 * 12 * 24)
    stored = attention + 256 * expert + scales + 2 * norms + 4 * gate_and_bias
    loaded = 2 * (attention + 256 * expert + norms) + 4 * gate_and_bias
    assert set(cost.layers) == {
        PartCost(
            stored_bytes=stored,
            loaded_bytes=loaded,
            num_parameters=layer,
            flops_per_token=2 * (attention + 8 * expert + 256 * 3072) + 4 * 6144 * 4096,
            kv_bytes=2 * 1024 * tokens * 2,
            activation_bytes=cost.layers[0].activation_bytes,
        )
    }
    assert cost.embedding == PartCost(
        stored_bytes=2 * vocabulary,
        loaded_bytes=2 * vocabulary,
        num_parameters=vocabulary,
        activation_bytes=tokens * 3072 * 2,
    )
    assert cost.lm_head == PartCost(
        stored_bytes=2 * vocabulary,
        loaded_bytes=2 * vocabulary,
        num_parameters=vocabulary,
        flops_per_token=2 * vocabulary,
        activation_bytes=tokens * 200064 * 2,
    )
    assert cost.final_norm == PartCost(stored_bytes=6144, loaded_bytes=6144, num_parameters=3072)
    assert cost.whole.stored_bytes == 62 * stored + 4 * vocabulary + 6144
    assert cost.whole.stored_bytes / 1e9 == pytest.approx(230.1, abs=0.05)
    assert cost.whole.activation_bytes == cost.lm_head.activation_bytes


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
def test_config_alone_tells_what_a_synthetic_checkpoint_stores(dtype: torch.dtype) -> None:
    config = SyntheticModel().config(dtype=dtype, token_ids=IDS)

    def kinds(tensors: Iterable[TensorSize]) -> dict[str, tuple[StoredDtype, tuple[int, ...]]]:
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}

    stored = plan_tensors(SyntheticModel(), dtype=dtype)
    assert kinds(expected_tensors(ModelSpec.from_config(config))) == kinds(stored)


def test_costs_from_headers_are_those_from_config_alone(toy: Path) -> None:
    spec = ModelSpec.from_folder(toy)
    workload = Workload(context_length=100)
    entries = TensorIndex.from_folder(toy).entries.values()
    from_headers = measure_costs(entries, M2, spec.raw, workload)
    assert from_headers == measure_costs(expected_tensors(spec), M2, spec.raw, workload)
    assert from_headers.whole.stored_bytes == sum(entry.size_bytes for entry in entries)
    # null says that the weights are not FP8.
    unquantised = ModelSpec.from_config({**spec.raw, "quantization_config": None})
    assert FLOAT8_E4M3FN not in {tensor.dtype for tensor in expected_tensors(unquantised)}


def test_longer_contexts_and_wider_dtypes_take_more() -> None:
    short, long = (costs_of(SyntheticModel(), Workload(context_length=length)) for length in (100, 200))
    wide = costs_of(SyntheticModel(), Workload(context_length=100, dtype=FLOAT32))
    assert long.layers[0].kv_bytes == 2 * short.layers[0].kv_bytes
    assert long.layers[0].loaded_bytes == short.layers[0].loaded_bytes
    assert long.layers[0].flops_per_token > short.layers[0].flops_per_token
    assert wide.layers[0].kv_bytes == 2 * short.layers[0].kv_bytes
    assert wide.embedding.loaded_bytes == 2 * short.embedding.loaded_bytes
    assert wide.whole.stored_bytes == short.whole.stored_bytes


def test_tied_head_is_counted_on_each_node_that_holds_it_and_once_where_one_holds_both() -> None:
    config = SyntheticModel().config(dtype=FP8, token_ids=IDS)
    costs = []
    for values in (config, {**config, "tie_word_embeddings": True}):
        tensors = expected_tensors(ModelSpec.from_config(values))
        costs.append(measure_costs(tensors, M2, values, Workload(context_length=10)))
    own, tied = costs
    assert tied.is_tied
    assert not own.is_tied
    assert tied.lm_head == own.lm_head
    vocabulary = 512 * 256
    assert own.whole.num_parameters - tied.whole.num_parameters == vocabulary
    assert own.whole.loaded_bytes - tied.whole.loaded_bytes == 2 * vocabulary
    assert own.whole.stored_bytes - tied.whole.stored_bytes == 2 * vocabulary
    assert own.whole.flops_per_token == tied.whole.flops_per_token
    for ends in ((True, False), (False, True)):
        slices = [cost.of_slice(range(2), has_embedding=ends[0], has_head=ends[1]) for cost in (tied, own)]
        assert slices[0] == slices[1]


def test_slices_add_up_to_the_whole() -> None:
    cost = costs_of(SyntheticModel(), Workload(context_length=64))
    parts = [
        cost.of_slice(range(1), has_embedding=True, has_head=False),
        cost.of_slice(range(1, 3), has_embedding=False, has_head=False),
        cost.of_slice(range(3, 4), has_embedding=False, has_head=True),
    ]
    assert sum(parts, PartCost()) == cost.whole
    # Parts run one after the other, so their activations do not add up.
    assert parts[1].memory_bytes == (2 * cost.layers[0].held_bytes + cost.layers[0].activation_bytes)


def test_checkpoint_that_lacks_parts_is_refused_and_all_are_named() -> None:
    config = SyntheticModel().config(dtype=FP8, token_ids=IDS)
    tensors = [
        tensor
        for tensor in expected_tensors(ModelSpec.from_config(config))
        if part_of(tensor.name, M2) not in {1, 3, "embedding"}
    ]
    architecture = replace(M2, num_layers=4)
    with pytest.raises(CheckpointError, match="no tensor of layer 1; layer 3; the embedding"):
        measure_costs(tensors, architecture, config, Workload(context_length=1))
    with pytest.raises(CheckpointError, match="no tensor of any layer; the embedding; the final norm"):
        measure_costs([], M2, config, Workload(context_length=1))


def test_modules_behind_the_last_layer_go_with_the_head() -> None:
    config = SyntheticModel().config(dtype=FP8, token_ids=IDS)
    further = TensorSize(name="model.layers.4.eh_proj.weight", dtype=BFLOAT16, shape=(10, 10))
    architecture = replace(M2, num_layers=4)
    tensors = [*expected_tensors(ModelSpec.from_config(config)), further]
    cost = measure_costs(tensors, architecture, config, Workload(context_length=1))
    assert len(cost.layers) == 4
    assert cost.rest == PartCost(stored_bytes=200, loaded_bytes=200, num_parameters=100)
    assert cost.head == cost.final_norm + cost.lm_head + cost.rest


def test_gpt2_has_its_positions_with_the_embedding_and_a_tied_head() -> None:
    tensors = [
        TensorSize(name="wte.weight", dtype=FLOAT32, shape=(50, 8)),
        TensorSize(name="wpe.weight", dtype=FLOAT32, shape=(20, 8)),
        TensorSize(name="h.0.attn.c_attn.weight", dtype=FLOAT32, shape=(8, 24)),
        TensorSize(name="h.0.attn.c_attn.bias", dtype=FLOAT32, shape=(24,)),
        TensorSize(name="ln_f.weight", dtype=FLOAT32, shape=(8,)),
    ]
    config = {"n_embd": 8, "n_head": 2, "vocab_size": 50}
    cost = measure_costs(tensors, Architecture.of("gpt2"), config, Workload(context_length=10))
    assert cost.embedding.num_parameters == 70 * 8
    assert cost.is_tied
    assert cost.lm_head.num_parameters == 50 * 8
    assert cost.layers[0].kv_bytes == 2 * 8 * 10 * 2
    assert cost.layers[0].flops_per_token == 2 * 8 * 24 + 4 * 8 * 10
    assert cost.whole.num_parameters == 70 * 8 + 8 * 24 + 24 + 8
