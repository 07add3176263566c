from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    FLOAT32_NAMES,
    GATE,
    INPUT_NORM,
    Q_PROJ,
    expected_layer_shapes,
    expert_weight,
    layer_prefix,
    scale_name,
)

Tensors = dict[str, torch.Tensor]
Writer = Callable[..., Path]

LAYER = 1
PREFIX = layer_prefix(LAYER)
EXPERT = expert_weight(3, "w1")


@pytest.fixture
def reader(fp8_tensors: Tensors, write: Writer) -> Iterator[CheckpointReader]:
    with CheckpointReader(write(fp8_tensors)) as opened:
        yield opened


@pytest.fixture
def layer(reader: CheckpointReader, spec: ModelSpec) -> LayerTensors:
    return LayerTensors.open(reader, spec, LAYER, torch.bfloat16)


def _fault(tensors: Tensors, write: Writer, spec: ModelSpec) -> str:
    with CheckpointReader(write(tensors)) as opened, pytest.raises(CheckpointError) as caught:
        LayerTensors.open(opened, spec, LAYER, torch.bfloat16)
    return str(caught.value)


def test_every_value_is_the_layers_own(
    reader: CheckpointReader, spec: ModelSpec, bf16_tensors: Tensors, float32_products: Tensors
) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        layer = LayerTensors.open(reader, spec, LAYER, dtype)
        assert tuple(layer) == tuple(expected_layer_shapes(spec, LAYER))
        for name, tensor in layer.items():
            expected = float32_products.get(PREFIX + name, bf16_tensors[PREFIX + name])
            wanted = torch.float32 if name in FLOAT32_NAMES else dtype
            assert tensor.dtype == wanted == layer.given_dtype(name)
            assert torch.equal(tensor, expected.to(wanted)), name
    with pytest.raises(ValueError, match=r"expected torch\.bfloat16 or torch\.float32"):
        LayerTensors.open(reader, spec, LAYER, torch.float16)


def test_gate_and_bias_stored_as_bf16_come_as_float32_and_say_so(
    spec: ModelSpec, fp8_tensors: Tensors, write: Writer
) -> None:
    for name in FLOAT32_NAMES:
        fp8_tensors[PREFIX + name] = fp8_tensors[PREFIX + name].to(torch.bfloat16)
    with CheckpointReader(write(fp8_tensors)) as reader:
        layer = LayerTensors.open(reader, spec, LAYER, torch.bfloat16)
        for name in FLOAT32_NAMES:
            assert layer[name].dtype == torch.float32
            assert layer.stored_dtype(name) == torch.bfloat16
            assert torch.equal(layer[name], fp8_tensors[PREFIX + name].float())


def test_stored_dtype_is_what_the_checkpoint_holds(layer: LayerTensors) -> None:
    layer[GATE] = torch.zeros(4, 160, dtype=torch.bfloat16)
    stored = [layer.stored_dtype(name) for name in (Q_PROJ, INPUT_NORM, GATE)]
    assert stored == [torch.float8_e4m3fn, torch.bfloat16, torch.float32]
    with pytest.raises(KeyError, match="no tensor 'nobody'"):
        layer.stored_dtype("nobody")


def test_a_set_tensor_is_kept_as_it_is_and_a_read_one_is_not(layer: LayerTensors) -> None:
    layer[Q_PROJ].zero_()
    assert layer[Q_PROJ].count_nonzero() > 0
    value = torch.full((3,), 2.0, dtype=torch.float16)
    layer[Q_PROJ] = value
    layer["self_attn.sinks"] = value
    assert layer[Q_PROJ] is value
    assert layer["self_attn.sinks"] is value
    assert layer.given_dtype(Q_PROJ) == torch.float16
    assert list(layer)[-1] == "self_attn.sinks"


def test_it_converts_as_a_dict_would(layer: LayerTensors) -> None:
    num_tensors = len(layer)
    w1, w3 = layer.pop(expert_weight(0, "w1")), layer.pop(expert_weight(0, "w3"))
    layer["experts.0.gate_up.weight"] = torch.cat([w1, w3])
    layer.update({"norm.weight": layer.pop(INPUT_NORM)})
    del layer[Q_PROJ]
    assert layer.pop("nobody", None) is None
    assert len(layer) == num_tensors - 2
    assert Q_PROJ not in layer
    state = {name: value for name, value in layer.items() if "experts" not in name}
    assert state["norm.weight"].shape == (160,)
    assert layer["experts.0.gate_up.weight"].shape == (144, 160)


@pytest.mark.parametrize("access", [LayerTensors.__getitem__, LayerTensors.__delitem__, LayerTensors.pop])
def test_an_unknown_name_is_a_key_error(
    access: Callable[[LayerTensors, str], object], layer: LayerTensors
) -> None:
    with pytest.raises(KeyError, match=r"no tensor 'model\.layers\.1\.x' \(names are relative"):
        access(layer, "model.layers.1.x")


def test_a_copy_and_its_original_do_not_meet(layer: LayerTensors) -> None:
    layer["a"] = torch.ones(1)
    copy = layer.copy()
    del copy[Q_PROJ]
    copy["b"] = torch.ones(1)
    del layer["a"]
    assert Q_PROJ in layer
    assert "b" not in layer
    assert copy["a"].item() == 1
    assert copy.dtype == layer.dtype


def test_shape_of_what_is_given_is_told_without_reading(
    layer: LayerTensors, reader: CheckpointReader
) -> None:
    assert layer.given_shape(EXPERT) == (72, 160)
    assert layer.is_stored(EXPERT)
    layer[EXPERT] = torch.ones(160, 72)
    assert layer.given_shape(EXPERT) == (160, 72)
    assert not layer.is_stored(EXPERT)
    assert not layer.is_stored("unknown")
    assert reader.num_bytes_read == 0
    with pytest.raises(KeyError, match="unknown"):
        layer.given_shape("unknown")


def test_reading_into_storage_casts_to_it(
    layer: LayerTensors, float32_products: Tensors, fp8_tensors: Tensors
) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        weight, bias = torch.empty(72, 160, dtype=dtype), torch.empty(4, dtype=dtype)
        layer.read_into(EXPERT, weight)
        layer.read_into(CORRECTION_BIAS, bias)
        assert torch.equal(weight, float32_products[PREFIX + EXPERT].to(dtype))
        assert torch.equal(bias, fp8_tensors[PREFIX + CORRECTION_BIAS].to(dtype))
    layer[EXPERT] = torch.full((72, 160), 1.5)
    layer.read_into(EXPERT, weight)
    assert (weight == 1.5).all()


@pytest.mark.parametrize("rows", [range(70, 74), range(-3, -1), range(0, 72, 2)])
@pytest.mark.parametrize("is_set", [False, True])
def test_rows_that_a_tensor_does_not_have_are_refused(rows: range, is_set: bool, layer: LayerTensors) -> None:
    if is_set:
        layer[EXPERT] = torch.ones(72, 160)
    with pytest.raises(ValueError, match="has 72 rows"):
        layer.read_into(EXPERT, torch.empty(len(rows), 160), rows=rows)


@pytest.mark.parametrize(
    "value", [torch.ones(160), torch.ones(72, 160).to(torch.float8_e4m3fn)], ids=["shape", "fp8"]
)
def test_reading_a_set_tensor_that_does_not_fit_is_refused(value: torch.Tensor, layer: LayerTensors) -> None:
    layer[EXPERT] = value
    with pytest.raises(ValueError, match=EXPERT):
        layer.read_into(EXPERT, torch.empty(72, 160, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        # Its scales are left beside it.
        (Q_PROJ, torch.zeros(192, 160).bfloat16(), f"{scale_name(Q_PROJ)}: no MiniMax-M2 layer has it"),
        ("self_attn.q_proj.bias", torch.zeros(192), "self_attn.q_proj.bias: no MiniMax-M2 layer has it"),
        (Q_PROJ, torch.zeros(192, 160, dtype=torch.int8), f"{Q_PROJ}: found dtype torch.int8"),
    ],
)
def test_a_tensor_that_does_not_belong_is_a_fault(
    name: str, value: torch.Tensor, fault: str, fp8_tensors: Tensors, write: Writer, spec: ModelSpec
) -> None:
    fp8_tensors[PREFIX + name] = value
    assert PREFIX + fault in _fault(fp8_tensors, write, spec)


def test_all_faults_of_a_layer_are_listed_at_once(
    fp8_tensors: Tensors, write: Writer, spec: ModelSpec
) -> None:
    del fp8_tensors[PREFIX + GATE]
    del fp8_tensors[PREFIX + scale_name(EXPERT)]
    fp8_tensors[PREFIX + INPUT_NORM] = torch.ones(80, dtype=torch.bfloat16)
    message = _fault(fp8_tensors, write, spec)
    assert f"{PREFIX}{GATE}: expected [4, 160], found nothing" in message
    assert f"expected a tensor {PREFIX}{scale_name(EXPERT)}, found none" in message
    assert f"{PREFIX}{INPUT_NORM}: expected [160], found [80]" in message


def test_a_layer_that_is_not_there_is_counted_not_poured_out(
    reader: CheckpointReader, spec: ModelSpec
) -> None:
    fault = r"layer 2 of the checkpoint.*of 3 more experts.*and 1 more"
    with pytest.raises(CheckpointError, match=fault) as caught:
        LayerTensors.open(reader, spec, 2, torch.bfloat16)
    assert caught.value.next_step


def test_faults_of_other_layers_do_not_matter(fp8_tensors: Tensors, write: Writer, spec: ModelSpec) -> None:
    del fp8_tensors[layer_prefix(0) + GATE]
    with CheckpointReader(write(fp8_tensors)) as reader:
        assert LayerTensors.open(reader, spec, LAYER, torch.bfloat16)[GATE].shape == (4, 160)
