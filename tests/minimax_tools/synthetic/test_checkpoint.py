from __future__ import annotations

import hashlib
import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.errors import CheckpointError, UsageError
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
def fp8_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fp8") / "checkpoint")


@pytest.fixture(scope="module")
def bfloat16_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("bfloat16") / "checkpoint", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def float32_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("float32") / "checkpoint", dtype=torch.float32)


def write(
    folder: Path,
    *,
    model: SyntheticModel = MODEL,
    dtype: torch.dtype = FP8,
    shard_size_bytes: int | None = None,
    seed: int = 0,
) -> Path:
    return synthesize(folder, model=model, dtype=dtype, shard_size_bytes=shard_size_bytes, seed=seed).folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def header(shard: Path) -> dict:
    with shard.open("rb") as file:
        size_bytes = int.from_bytes(file.read(8), "little")
        assert size_bytes % 8 == 0
        return json.loads(file.read(size_bytes))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_tensor_has_the_hubs_name_and_shape(fp8_copy: Path) -> None:
    shapes = {EMBEDDING: (512, 256), LM_HEAD: (512, 256), FINAL_NORM: (256,)}
    for layer in range(MODEL.num_hidden_layers):
        for name, shape in expected_layer_shapes(MODEL.spec()).items():
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
        else:
            assert tensor.dtype == torch.bfloat16, name


def test_router_stays_float32_in_every_copy(fp8_copy: Path, bfloat16_copy: Path, float32_copy: Path) -> None:
    copies = [read(folder) for folder in (fp8_copy, bfloat16_copy, float32_copy)]
    for kind in FLOAT32_NAMES:
        name = layer_prefix(1) + kind
        assert all(copy[name].dtype == torch.float32 for copy in copies)
        assert all(torch.equal(copy[name], copies[0][name]) for copy in copies)
        assert not torch.equal(copies[0][name], copies[0][name].bfloat16().float())


def test_bfloat16_and_float32_copies_hold_the_dequantised_fp8_values(
    fp8_copy: Path, bfloat16_copy: Path, float32_copy: Path
) -> None:
    stored, rounded, exact = read(fp8_copy), read(bfloat16_copy), read(float32_copy)
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


def test_fp8_codes_are_finite_and_reach_the_top_of_their_range(fp8_copy: Path) -> None:
    for name, tensor in read(fp8_copy).items():
        if tensor.dtype == FP8:
            assert 256 < tensor.float().abs().max() <= 448, name


def test_index_points_every_tensor_to_its_shard(fp8_copy: Path) -> None:
    index = read_json(fp8_copy / "model.safetensors.index.json")
    found = {
        name: (shard.name, entry["data_offsets"][1] - entry["data_offsets"][0])
        for shard in fp8_copy.glob("*.safetensors")
        for name, entry in header(shard).items()
        if name != "__metadata__"
    }
    assert index["weight_map"] == {name: shard for name, (shard, _) in found.items()}
    assert index["metadata"]["total_size"] == sum(size_bytes for _, size_bytes in found.values())


def test_shards_are_numbered_from_zero_and_names_run_on_alphabetically(fp8_copy: Path) -> None:
    shards = sorted(fp8_copy.glob("*.safetensors"))
    assert len(shards) >= 4
    count = f"{len(shards):05}"
    assert [shard.name for shard in shards] == [
        f"model-{number:05}-of-{count}.safetensors" for number in range(len(shards))
    ]
    order = [name for shard in shards for name in header(shard) if name != "__metadata__"]
    assert order == sorted(order)
    tenth, second = (layer_prefix(0) + expert_weight(expert, "w1") for expert in (10, 2))
    assert order.index(tenth) < order.index(second)


def test_no_shard_exceeds_its_size_unless_one_tensor_does(tmp_path: Path) -> None:
    folder = write(tmp_path / "small", shard_size_bytes=100_000)
    sizes = []
    for shard in folder.glob("*.safetensors"):
        entries = {name: entry for name, entry in header(shard).items() if name != "__metadata__"}
        size_bytes = max(entry["data_offsets"][1] for entry in entries.values())
        assert size_bytes <= 100_000 or len(entries) == 1
        sizes.append(size_bytes)
    assert max(sizes) == 512 * 256 * 2


def test_same_seed_gives_the_same_bytes(fp8_copy: Path, tmp_path: Path) -> None:
    assert digests(write(tmp_path / "again")) == digests(fp8_copy)


def test_another_seed_changes_every_shard(fp8_copy: Path, tmp_path: Path) -> None:
    before, after = digests(fp8_copy), digests(write(tmp_path / "other", seed=1))
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if name.endswith(".safetensors")
    }


def test_shard_size_moves_tensors_but_changes_none(fp8_copy: Path, tmp_path: Path) -> None:
    first, second = read(fp8_copy), read(write(tmp_path / "one", shard_size_bytes=10**9))
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def test_experts_and_rows_are_linearly_independent(float32_copy: Path) -> None:
    tensors = read(float32_copy)
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


def test_config_describes_the_model_to_every_reader(fp8_copy: Path, bfloat16_copy: Path) -> None:
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


@pytest.mark.slow
def test_memory_stays_far_below_a_shard(tmp_path: Path) -> None:
    program = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from minimax_tools.machine.memory import MemoryUsage\n"
        "from minimax_tools.synthetic.checkpoint import synthesize\n"
        "from minimax_tools.synthetic.toy_model import SyntheticModel\n"
        # getrusage's begins with what the process held that started this one: for systems that tell nothing better.
        "rusage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "peak = lambda: MemoryUsage.current().most_resident_bytes or rusage()\n"
        "toy = SyntheticModel(num_hidden_layers=1)\n"
        "def write(name, model):\n"
        "    return synthesize(Path(sys.argv[1]) / name, model=model, dtype=torch.float8_e4m3fn,\n"
        "                      shard_size_bytes=10**9, seed=0)\n"
        "write('small', toy)\n"
        "before = peak()\n"
        "wide = SyntheticModel(num_hidden_layers=2, hidden_size=1024, intermediate_size=1024)\n"
        "made = write('large', wide)\n"
        "print(made.num_shards, made.size_bytes, peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
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


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 7},
        {"rotary_dim": 65},
        {"num_experts_per_tok": 13},
        {"num_hidden_layers": 0},
        {"hidden_size": 252},
    ],
)
def test_quantities_that_describe_no_model_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=str(next(iter(change.values())))):
        replace(MODEL, **change)


def test_vocabulary_without_room_for_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary of 200 is too small"):
        write(tmp_path / "tiny", model=replace(MODEL, vocab_size=200))
    assert list(tmp_path.iterdir()) == []


def test_occupied_output_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"exists: expected a new or empty folder\. Name another folder"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_empty_output_is_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (write(tmp_path / "empty") / "config.json").is_file()


def test_checkpoint_larger_than_the_disk_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    model = replace(MODEL, vocab_size=10**13)
    size_bytes = sum(tensor.size_bytes for tensor in plan_tensors(model, dtype=FP8))
    with pytest.raises(
        CheckpointError, match=f"expected {size_bytes} bytes, found [0-9]+ bytes free"
    ) as raised:
        write(tmp_path / "huge", model=model)
    assert str(tmp_path / "huge") in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with (
        largest_file(200_000),
        pytest.raises(CheckpointError, match=r"bytes free, .*File too large") as raised,
    ):
        write(tmp_path / "cut")
    assert str(tmp_path / "cut") in str(raised.value)
    assert list(tmp_path.iterdir()) == []
