from __future__ import annotations

import hashlib
import json
import math
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import Family
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EMBEDDING,
    FINAL_NORM,
    FLOAT32_NAMES,
    GATE,
    LM_HEAD,
    SCALE_SUFFIX,
    expected_layer_shapes,
    expert_weight,
    layer_prefix,
    scale_name,
)
from minimax_tools.synthetic.checkpoint import plan_tensors, synthesize
from minimax_tools.synthetic.toy_model import PRESETS, SyntheticModel

FP8 = torch.float8_e4m3fn
MODEL = SyntheticModel(num_hidden_layers=2, num_local_experts=12)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """The model, once in each dtype."""
    folder = tmp_path_factory.mktemp("copies")
    return {dtype: write(folder / str(dtype), dtype=dtype) for dtype in (FP8, torch.bfloat16, torch.float32)}


@pytest.fixture(scope="module")
def fp8_copy(copies: dict[torch.dtype, Path]) -> Path:
    return copies[FP8]


def write(folder: Path, **options: Any) -> Path:
    usual: dict[str, Any] = {"model": MODEL, "dtype": FP8, "shard_size_bytes": None, "seed": 0}
    return synthesize(folder, **{**usual, **options}).folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def entries(shard: Path) -> dict:
    """The tensors of a shard's header."""
    with shard.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        assert size_bytes % 8 == 0
        header = json.loads(file.read(size_bytes))
    del header["__metadata__"]
    return header


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_every_tensor_has_the_hubs_name_and_shape(fp8_copy: Path) -> None:
    shapes = {EMBEDDING: (512, 256), LM_HEAD: (512, 256), FINAL_NORM: (256,)}
    for layer in range(MODEL.num_hidden_layers):
        for name, shape in expected_layer_shapes(MODEL.spec(), layer).items():
            shapes[layer_prefix(layer) + name] = shape
            if len(shape) == 2 and name != GATE:
                scales = tuple(math.ceil(size / 128) for size in shape)
                shapes[layer_prefix(layer) + scale_name(name)] = scales
    assert {name: tuple(tensor.shape) for name, tensor in read(fp8_copy).items()} == shapes


def test_linear_layers_are_fp8_with_float32_scales_and_norms_bfloat16(fp8_copy: Path) -> None:
    for name, tensor in read(fp8_copy).items():
        if name.endswith((*FLOAT32_NAMES, SCALE_SUFFIX)):
            assert tensor.dtype == torch.float32, name
        elif tensor.dim() == 2 and name not in (EMBEDDING, LM_HEAD):
            assert tensor.dtype == FP8, name
            # Finite, and up to the top of the range.
            assert 256 < tensor.float().abs().max() <= 448, name
        else:
            assert tensor.dtype == torch.bfloat16, name


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_no_family_has_its_router_in_fp8(tmp_path: Path, family: Family) -> None:
    model = SyntheticModel.toy(family).resized(num_local_experts=8)
    copy = read(write(tmp_path / "toy", model=model))
    dtypes = {copy[name].dtype for name in copy if name.endswith(family.stored_names.stored(GATE))}
    assert dtypes == {torch.float32 if model.spec().graph.has_float32_router else torch.bfloat16}


def test_other_copies_hold_the_dequantised_fp8_values_and_the_same_router(
    copies: dict[torch.dtype, Path],
) -> None:
    stored, rounded, exact = (read(folder) for folder in copies.values())
    for name in (layer_prefix(1) + kind for kind in FLOAT32_NAMES):
        for tensors in (stored, rounded, exact):
            assert tensors[name].dtype == torch.float32
            assert torch.equal(tensors[name], stored[name])
        assert not torch.equal(stored[name], stored[name].bfloat16().float())
    assert set(rounded) == set(exact) == {name for name in stored if not name.endswith(SCALE_SUFFIX)}
    linear = [name for name, tensor in stored.items() if tensor.dtype == FP8]
    assert len(linear) == MODEL.num_hidden_layers * (4 + 3 * MODEL.num_local_experts)
    for name in linear:
        scales = stored[scale_name(name)]
        assert torch.equal(rounded[name], dequantise(stored[name], scales, dtype=torch.bfloat16)), name
        assert torch.equal(exact[name], dequantise(stored[name], scales, dtype=torch.float32)), name
    for name in (EMBEDDING, LM_HEAD, FINAL_NORM):
        assert torch.equal(rounded[name], stored[name])
        assert torch.equal(exact[name].bfloat16(), stored[name])


def test_index_points_every_tensor_to_its_shard(fp8_copy: Path) -> None:
    index = read_json(fp8_copy / "model.safetensors.index.json")
    weight_map, total_bytes = {}, 0
    for shard in fp8_copy.glob("*.safetensors"):
        for name, entry in entries(shard).items():
            start, stop = entry["data_offsets"]
            weight_map[name], total_bytes = shard.name, total_bytes + stop - start
    assert index["weight_map"] == weight_map
    assert index["metadata"]["total_size"] == total_bytes


def test_shards_are_numbered_from_zero_and_names_run_on_alphabetically(fp8_copy: Path) -> None:
    shards = sorted(fp8_copy.glob("*.safetensors"))
    assert len(shards) >= 4
    numbers = range(len(shards))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in numbers]
    assert [shard.name for shard in shards] == names
    order = [name for shard in shards for name in entries(shard)]
    assert order == sorted(order)
    tenth, second = (layer_prefix(0) + expert_weight(expert, "w1") for expert in (10, 2))
    assert order.index(tenth) < order.index(second)


def test_no_shard_exceeds_its_size_unless_one_tensor_does(tmp_path: Path) -> None:
    folder = write(tmp_path / "small", shard_size_bytes=100_000)
    sizes = []
    for shard in folder.glob("*.safetensors"):
        held = entries(shard)
        size_bytes = max(entry["data_offsets"][1] for entry in held.values())
        assert size_bytes <= 100_000 or len(held) == 1
        sizes.append(size_bytes)
    assert max(sizes) == 512 * 256 * 2


def test_same_seed_gives_the_same_bytes_and_another_changes_every_shard(
    fp8_copy: Path, tmp_path: Path
) -> None:
    before = digests(fp8_copy)
    assert digests(write(tmp_path / "again")) == before
    after = digests(write(tmp_path / "other", seed=1))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.endswith(".safetensors")}


def test_shard_size_moves_tensors_but_changes_none(fp8_copy: Path, tmp_path: Path) -> None:
    first, second = read(fp8_copy), read(write(tmp_path / "one", shard_size_bytes=10**9))
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def test_experts_and_rows_are_linearly_independent(copies: dict[torch.dtype, Path]) -> None:
    tensors = read(copies[torch.float32])
    matrices = [
        tensors[layer_prefix(layer) + expert_weight(expert, matrix)]
        for layer in range(MODEL.num_hidden_layers)
        for expert in range(MODEL.num_local_experts)
        for matrix in ("w1", "w2", "w3")
    ]
    flat = torch.stack([matrix.flatten() for matrix in matrices])
    likeness = torch.nn.functional.normalize(flat, dim=1) @ torch.nn.functional.normalize(flat, dim=1).T
    assert (likeness - torch.eye(len(matrices))).abs().max() < 0.04
    assert all(torch.linalg.matrix_rank(matrix) == min(matrix.shape) for matrix in matrices)


def test_config_describes_the_model_to_every_reader(copies: dict[torch.dtype, Path]) -> None:
    fp8_copy, bfloat16_copy = copies[FP8], copies[torch.bfloat16]
    config = read_json(fp8_copy / "config.json")
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert config["rotary_dim"] == MODEL.rotary_dim
    assert config["rope_theta"] == 5_000_000
    assert config["scoring_func"] == "sigmoid"
    assert config["use_qk_norm"] is True
    assert "quantization_config" not in read_json(bfloat16_copy / "config.json")
    spec = ModelSpec.from_folder(fp8_copy)
    assert spec == MODEL.spec()
    assert spec.digest() == ModelSpec.from_folder(bfloat16_copy).digest()


def test_m2_preset_has_the_published_sizes() -> None:
    plan = plan_tensors(PRESETS["m2"], dtype=FP8)
    assert len(plan) == 96_103
    assert sum(tensor.size_bytes for tensor in plan) == 230_121_630_720
    layer = [tensor for tensor in plan if tensor.name.startswith(layer_prefix(7))]
    assert sum(tensor.size_bytes for tensor in layer) == 3_671_987_712
    in_bfloat16 = plan_tensors(PRESETS["m2"], dtype=torch.bfloat16)
    assert sum(tensor.size_bytes for tensor in in_bfloat16) == 457_477_079_040


def test_a_tensor_of_odd_shape_is_readable(tmp_path: Path) -> None:
    model = replace(MODEL, hidden_size=104, intermediate_size=40, num_local_experts=3, num_experts_per_tok=2)
    tensors = read(write(tmp_path / "odd", model=replace(model, num_attention_heads=2, vocab_size=301)))
    assert tensors[EMBEDDING].shape == (301, 104)
    assert tensors[layer_prefix(1) + CORRECTION_BIAS].shape == (3,)


# getrusage's peak begins with what the process held that started this one: for systems that tell nothing better.
_MEASURE = """
import resource, sys, torch
from pathlib import Path
from minimax_tools.machine.memory import MemoryUsage
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

def peak():
    rusage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUsage.current().most_resident_bytes or rusage

def write(name, model):
    folder = Path(sys.argv[1]) / name
    return synthesize(folder, model=model, dtype=torch.float8_e4m3fn, shard_size_bytes=10**9, seed=0)

write("small", SyntheticModel(num_hidden_layers=1))
before = peak()
made = write("large", SyntheticModel(num_hidden_layers=2, hidden_size=1024, intermediate_size=1024))
print(made.num_shards, made.size_bytes, peak() - before)
"""


@pytest.mark.slow
def test_memory_stays_far_below_a_shard(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_shards, size_bytes, growth_bytes = map(int, done.stdout.split())
    assert num_shards == 1
    assert size_bytes > 200_000_000
    assert growth_bytes < size_bytes / 4


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"hidden_size": 200}, "hidden_size is 200"),
        ({"intermediate_size": 136}, "intermediate_size is 136"),
        ({"head_dim": 80, "num_key_value_heads": 2}, "num_key_value_heads × head_dim is 160"),
    ],
)
def test_fp8_refuses_widths_that_its_readers_would_misread(
    change: dict[str, int], found: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="multiples of 128, or smaller") as raised:
        write(tmp_path / "ragged", model=replace(MODEL, **change))
    assert found in str(raised.value)
    assert "--dtype bfloat16" in str(raised.value)
    assert write(tmp_path / "plain", model=replace(MODEL, **change), dtype=torch.bfloat16).is_dir()


QUANTITIES = {"num_attention_heads": 7, "rotary_dim": 65, "num_experts_per_tok": 13, "num_hidden_layers": 0}


@pytest.mark.parametrize(("name", "value"), [*QUANTITIES.items(), ("hidden_size", 252)])
def test_quantities_that_describe_no_model_are_refused(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=str(value)):
        replace(MODEL, **{name: value})


def test_vocabulary_without_room_for_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary of 200 is too small"):
        write(tmp_path / "tiny", model=replace(MODEL, vocab_size=200))
    assert list(tmp_path.iterdir()) == []


def test_occupied_output_is_refused_and_left_alone_and_an_empty_one_filled(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"exists: expected a new or empty folder\. Name another folder"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert (write(tmp_path / "empty") / "config.json").is_file()


def test_checkpoint_larger_than_the_disk_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    model = replace(MODEL, vocab_size=10**13)
    size_bytes = sum(tensor.size_bytes for tensor in plan_tensors(model, dtype=FP8))
    fault = f"expected {size_bytes} bytes, found [0-9]+ bytes free"
    with pytest.raises(CheckpointError, match=fault) as raised:
        write(tmp_path / "huge", model=model)
    assert str(tmp_path / "huge") in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"bytes free, .*File too large") as raised:
            write(tmp_path / "cut")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "cut") in str(raised.value)
    assert list(tmp_path.iterdir()) == []
