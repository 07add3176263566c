from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from minimax_tools.checkpoint.expected_tensors import TensorSize, expected_tensors
from minimax_tools.checkpoint.header import encode_header
from minimax_tools.checkpoint.index import TensorIndex, find_index
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.machine.progress import NoProgress
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.partition.planned_slice import PlannedTensor as PlaceOf
from minimax_tools.slices.description import FileFormat, SliceDescription
from minimax_tools.slices.folder import SliceCut, SliceFolder, cut_slice, write_slice
from minimax_tools.slices.source import open_source
from minimax_tools.slices.stored_weights import StoredWeights
from minimax_tools.stored_dtype import BFLOAT16
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds

MODEL = SyntheticModel(
    num_hidden_layers=3, hidden_size=128, num_local_experts=4, intermediate_size=64, vocab_size=512
)
NODES = ("a", "b")


def plan_of(folder: Path, *ends: int, memory: str = "1GB") -> PartitionPlan:
    """Nodes a, b, … that hold the layers up to each end."""
    source = open_source(str(folder))
    nodes = [
        Node.parse(f"{name}:memory={memory},layers={start}:{stop}")
        for name, start, stop in zip("abc", (0, *ends), ends, strict=False)
    ]
    return source.divide(
        planner="manual",
        nodes=nodes,
        workload=Workload(context_length=16),
    )


def extract(
    folder: Path,
    node: str,
    output: Path,
    *,
    plan: PartitionPlan | None = None,
    file_format: FileFormat = FileFormat.SAFETENSORS,
    shard_size_bytes: int | None = None,
    with_digests: bool = False,
) -> SliceFolder:
    if plan is None:
        plan = plan_of(folder, 1, 3)
    made = cut(folder, node, plan, file_format=file_format, shard_size_bytes=shard_size_bytes)
    return write_slice(made, output, with_digests=with_digests)


def cut(folder: Path, node: str, plan: PartitionPlan, **options: Any) -> SliceCut:
    source = StoredWeights.of_slice(str(folder), plan.slice_of(node))
    return cut_slice(plan, node, source, **options)


def write_sparse(folder: Path, shards: list[dict[str, tuple[int, ...]]], *, num_layers: int) -> None:
    """A BF16 llama whose data are holes."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 2, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    for number, shapes in enumerate(shards):
        tensors = [TensorSize(name=name, shape=shapes[name], dtype=BFLOAT16) for name in shapes]
        header, path = encode_header(tensors), folder / f"model-{number}.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(tensor.size_bytes for tensor in tensors))


def write_headers(folder: Path) -> PartitionPlan:
    """As many tensors as MiniMax-M2 has, small ones, whose data are holes; planned for two nodes."""
    model = replace(
        MODEL, num_hidden_layers=62, num_local_experts=256, intermediate_size=8, num_experts_per_tok=8
    )
    config = model.config(dtype=torch.float8_e4m3fn, token_ids=TokenIds(bos_token_id=0, eos_token_id=0))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors, weight_map = list(expected_tensors(ModelSpec.from_config(config))), {}
    for number, start in enumerate(range(0, len(tensors), 800)):
        shard = tensors[start : start + 800]
        header, path = encode_header(shard), folder / f"model-{number:05}.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(tensor.size_bytes for tensor in shard))
        weight_map |= {tensor.name: path.name for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    source = open_source(str(folder))
    return source.divide(
        planner="memory",
        nodes=[Node(name=name, memory_bytes=10**10) for name in NODES],
        workload=Workload(context_length=16),
    )


def read_bytes(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Read a folder's shards with safetensors itself."""
    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                tensor = file.get_tensor(name)
                found[name] = as_bytes(tensor)
    return found


def as_bytes(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), content


def content_of(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in FP8, in BF16 and as BF16 `.bin` files; several shards each, layers across them."""
    root = tmp_path_factory.mktemp("sources")
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
        synthesize(root / name, model=MODEL, dtype=dtype, shard_size_bytes=300_000, seed=0)
        (root / name / "generation_config.json").write_text('{"top_k": 40}')
    pickled = root / "bin"
    shutil.copytree(root / "bf16", pickled)
    weight_map = {}
    for shard in sorted(pickled.glob("*.safetensors")):
        name = shard.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        tensors = load_file(shard)
        torch.save(tensors, pickled / name)
        weight_map |= dict.fromkeys(tensors, name)
        shard.unlink()
    (pickled / "model.safetensors.index.json").unlink()
    (pickled / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return {"fp8": root / "fp8", "bf16": root / "bf16", "bin": pickled}


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A llama of two layers without an lm_head, all in one file."""
    folder = tmp_path / "tied"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "intermediate_size": 16,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.self_attn.q_proj.weight": (8, 8)}
        shapes |= {f"model.layers.{layer}.input_layernorm.weight": (8,)}
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", ["fp8", "bf16", "bin"])
def test_slices_are_the_whole_checkpoint_each_tensor_once_and_byte_for_byte(
    kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    whole = read_bytes(sources["fp8" if kind == "fp8" else "bf16"])
    slices = []
    for node in NODES:
        written = extract(sources[kind], node, tmp_path / node)
        assert written.is_new
        slices.append(read_bytes(tmp_path / node))
        assert written.size_bytes == sum(len(content) for _, _, content in slices[-1].values())
    assert not slices[0].keys() & slices[1].keys()
    assert slices[0] | slices[1] == whole
    assert leftovers(tmp_path) == []


def test_a_slice_opens_as_a_checkpoint_of_its_layers(sources: dict[str, Path], tmp_path: Path) -> None:
    extract(sources["fp8"], "b", tmp_path / "b")
    index = TensorIndex.from_folder(tmp_path / "b", layers=range(1, 3))
    assert index.layers == (1, 2)
    assert not index.absent
    name = "model.layers.2.self_attn.q_proj.weight"
    with (
        CheckpointReader(tmp_path / "b", layers=range(1, 3)) as part,
        CheckpointReader(sources["fp8"]) as all_,
    ):
        assert torch.equal(part.read_weight(name, torch.bfloat16), all_.read_weight(name, torch.bfloat16))
        assert part.num_bytes_read == all_.num_bytes_read


def test_a_slice_has_the_sources_description_and_an_index_of_its_own(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    plan = plan_of(sources["fp8"], 1, 3)
    written = extract(sources["fp8"], "a", tmp_path / "a", plan=plan)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (sources["fp8"] / name).read_bytes()
    weight_map = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(weight_map) == sorted(plan.slice_of("a").names)
    assert sorted(set(weight_map.values())) == [file.name for file in written.files]
    # One for each of the source's that holds some of it.
    assert len(written.files) == len(plan.slice_of("a").files)
    described = json.loads((tmp_path / "a" / "slice.json").read_text())
    assert described == {
        "schema_version": 1,
        "node": "a",
        "layers": [0, 1],
        "has_embedding": True,
        "has_head": False,
        "source": str(sources["fp8"]),
        "tensors": dict.fromkeys(sorted(weight_map)),
    }


@pytest.mark.parametrize("kind", ["fp8", "bin"])
def test_digests_are_the_sha256_of_each_tensors_bytes(
    kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    extract(sources[kind], "b", tmp_path / "b", with_digests=True)
    expected = {
        name: hashlib.sha256(content).hexdigest()
        for name, (_, _, content) in read_bytes(tmp_path / "b").items()
    }
    assert SliceDescription.read(tmp_path / "b").tensors == expected


def test_a_tied_embedding_lies_in_the_first_and_in_the_last_slice(tied: Path, tmp_path: Path) -> None:
    plan = plan_of(tied, 1, 2)
    first, last = (read_bytes_of(tied, plan, node, tmp_path) for node in NODES)
    assert first.keys() & last.keys() == {"model.embed_tokens.weight"}
    assert first["model.embed_tokens.weight"] == last["model.embed_tokens.weight"]
    assert first | last == read_bytes(tied)


def read_bytes_of(
    folder: Path, plan: PartitionPlan, node: str, tmp_path: Path
) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    extract(folder, node, tmp_path / node, plan=plan)
    return read_bytes(tmp_path / node)


def test_shards_keep_to_the_size_asked_for(sources: dict[str, Path], tmp_path: Path) -> None:
    written = extract(sources["fp8"], "b", tmp_path / "b", shard_size_bytes=50_000)
    assert len(written.files) > 3
    largest = 0
    for file in written.files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 50_000 or len(sizes) == 1
        largest = max(largest, sum(sizes))
    assert largest > 50_000, "one tensor is larger than a shard, and is not split"
    whole = read_bytes(sources["fp8"])
    assert all(content == whole[name] for name, content in read_bytes(tmp_path / "b").items())


@pytest.mark.parametrize("kind", ["fp8", "bin"])
def test_a_pth_file_is_a_plain_state_dict_of_the_same_bytes(
    kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    written = extract(sources[kind], "a", tmp_path / "pth", file_format=FileFormat.PTH)
    assert [file.name for file in written.files] == ["model.pth"]
    loaded = torch.load(written.files[0], weights_only=True)
    extract(sources[kind], "a", tmp_path / "plain")
    assert {name: as_bytes(tensor) for name, tensor in loaded.items()} == read_bytes(tmp_path / "plain")
    # Storages of their own: what is saved is the slice, not the files it came from.
    assert written.files[0].stat().st_size < 1.5 * written.size_bytes
    again = extract(sources[kind], "a", tmp_path / "pth", file_format=FileFormat.PTH)
    assert not again.is_new


def test_the_same_slice_is_left_as_it_is(sources: dict[str, Path], tmp_path: Path) -> None:
    extract(sources["fp8"], "a", tmp_path / "a")
    before = content_of(tmp_path / "a"), (tmp_path / "a").stat().st_ino
    again = extract(sources["fp8"], "a", tmp_path / "a")
    assert not again.is_new
    assert (content_of(tmp_path / "a"), (tmp_path / "a").stat().st_ino) == before


def test_what_a_killed_run_left_beside_the_same_slice_is_removed(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    extract(sources["bf16"], "a", tmp_path / "a")
    (tmp_path / ".a.0123abcd.tmp").mkdir()
    assert not extract(sources["bf16"], "a", tmp_path / "a").is_new
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_digests_are_added_to_the_same_slice_and_a_false_one_is_refused(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    extract(sources["fp8"], "a", tmp_path / "a")
    assert not extract(sources["fp8"], "a", tmp_path / "a", with_digests=True).is_new
    digests = SliceDescription.read(tmp_path / "a").tensors
    assert digests == extract(sources["fp8"], "a", tmp_path / "new", with_digests=True).description.tensors
    name = min(digests)
    replace(SliceDescription.read(tmp_path / "a"), tensors={**digests, name: "0" * 64}).write(tmp_path / "a")
    with pytest.raises(UsageError, match=f"another digest of {name}"):
        extract(sources["fp8"], "a", tmp_path / "a")


def test_a_pth_file_has_no_shards(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no shards"):
        extract(sources["fp8"], "a", tmp_path / "a", file_format=FileFormat.PTH, shard_size_bytes=1000)


def damage_a_byte(folder: Path) -> None:
    shard = max(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (damage_a_byte, "other bytes of "),
        (lambda folder: (folder / "config.json").write_text("{}"), "another config.json"),
        (lambda folder: (folder / "slice.json").unlink(), "holds no slice"),
        (lambda folder: (folder / "slice.json").write_text("["), "holds no slice"),
        (lambda folder: (folder / "slice.json").write_text('{"schema_version": 2}'), "holds no slice"),
        (lambda folder: max(folder.glob("*.safetensors")).unlink(), "1 fault"),
    ],
    ids=["byte", "config", "no slice.json", "damaged slice.json", "other version", "shard gone"],
)
def test_an_output_that_holds_something_else_is_refused_and_left(
    change: Callable[[Path], object], found: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    extract(sources["fp8"], "a", tmp_path / "a")
    change(tmp_path / "a")
    before = content_of(tmp_path / "a")
    with pytest.raises(UsageError, match=found):
        extract(sources["fp8"], "a", tmp_path / "a")
    assert content_of(tmp_path / "a") == before


def test_another_nodes_slice_is_not_written_over(sources: dict[str, Path], tmp_path: Path) -> None:
    extract(sources["fp8"], "a", tmp_path / "out")
    with pytest.raises(UsageError, match="another slice, of node a"):
        extract(sources["fp8"], "b", tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file exists"):
        extract(sources["fp8"], "b", tmp_path / "file")


def test_a_plan_of_another_checkpoint_is_refused_with_every_fault(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    plan = plan_of(sources["fp8"], 1, 3)
    with pytest.raises(CheckpointError, match="bf16 does not hold what the plan gives node a") as raised:
        extract(sources["bf16"], "a", tmp_path / "a", plan=plan)
    missing = [name for name in plan.slice_of("a").files if not (sources["bf16"] / name).exists()]
    assert all(f"{name} is not here" in str(raised.value) for name in missing)
    assert missing
    assert not (tmp_path / "a").exists()


def test_an_unknown_and_an_idle_node_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(sources["fp8"], 1, 3)
    with pytest.raises(UsageError, match="no node 'z': expected one of a, b"):
        extract(sources["fp8"], "z", tmp_path / "z", plan=plan)
    idle = replace(
        plan.slices[1],
        stage=replace(
            plan.slices[1].stage, node=Node.parse("idle:memory=1GB"), layers=range(3, 3), has_head=False
        ),
        tensors=(),
    )
    with pytest.raises(UsageError, match="node idle holds nothing in this plan: expected one of a, b"):
        extract(sources["fp8"], "idle", tmp_path / "z", plan=replace(plan, slices=(*plan.slices, idle)))


def test_a_source_that_was_cut_short_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(sources["fp8"], folder)
    plan = plan_of(folder, 1, 3)
    shard = folder / plan.slice_of("a").files[0]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged .*truncated"):
        extract(folder, "a", tmp_path / "a", plan=plan)


def test_a_source_that_is_cut_short_meanwhile_leaves_nothing(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(sources["fp8"], folder)
    made = cut(folder, "a", plan_of(folder, 1, 3))
    shard = made.entries[-1].file
    os.truncate(shard, made.entries[-1].offset + 1)
    with pytest.raises(CheckpointError, match=f"{shard.name} became shorter: expected bytes .* found an end"):
        write_slice(made, tmp_path / "a")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be opened"):
        write_slice(made, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


class _Removing(NoProgress):
    """A progress that removes files of the slice being written, as a clean-up script would."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def advance(self, layer: int, *, num_bytes: int) -> None:
        for path in self._parent.rglob("model-00001-of-*.safetensors"):
            path.unlink()


def test_a_slice_whose_files_are_removed_or_cut_is_told(sources: dict[str, Path], tmp_path: Path) -> None:
    made = cut(sources["fp8"], "a", plan_of(sources["fp8"], 1, 3), shard_size_bytes=100_000)
    fault = "files of the slice .*/slice were removed or changed .*: found model-00001-of.* is missing"
    with pytest.raises(CheckpointError, match=fault):
        write_slice(made, tmp_path / "slice", progress=_Removing(tmp_path))
    assert not list(tmp_path.iterdir())
    # Later, while the next slices are cut.
    written = write_slice(made, tmp_path / "slice")
    written.require_files()
    written.files[0].write_bytes(written.files[0].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{written.files[0].name} has \d+ bytes, not"):
        written.require_files()
    shutil.rmtree(written.folder)
    with pytest.raises(CheckpointError, match="remove the folder and run the same command again"):
        written.require_files()


def test_a_damaged_bin_file_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(sources["bin"], folder)
    made = cut(folder, "a", plan_of(folder, 1, 3))
    entry = made.entries[0]
    with entry.file.open("r+b") as file:
        file.seek(entry.offset)
        first = file.read(1)
        file.seek(entry.offset)
        file.write(bytes([first[0] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{entry.name} .*is damaged"):
        write_slice(made, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["fp8", "bin"])
def test_the_files_of_one_slice_suffice_for_it(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(sources[kind], 1, 3)
    part = tmp_path / "part"
    shutil.copytree(sources[kind], part)
    foreign = sorted(set(plan.slice_of("b").files) - set(plan.slice_of("a").files))
    assert foreign
    for name in foreign:
        (part / name).unlink()
    extract(part, "a", tmp_path / "a", plan=plan)
    assert set(read_bytes(tmp_path / "a")) == set(plan.slice_of("a").names)
    index = find_index(part)
    assert index is not None
    assert set(index.absent.values()) == set(foreign)
    with pytest.raises(CheckpointError, match=f"{foreign[0]} is not here"):
        extract(part, "b", tmp_path / "b", plan=plan)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_plan_without_places_finds_its_files(
    has_index: bool, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(sources["fp8"], folder)
    plan = plan_of(folder, 1, 3)
    placeless = replace(
        plan,
        slices=tuple(
            replace(slice_, tensors=tuple(PlaceOf(name=name) for name in slice_.names))
            for slice_ in plan.slices
        ),
    )
    if has_index:
        for name in set(plan.slice_of("b").files) - set(plan.slice_of("a").files):
            (folder / name).unlink()
    else:
        (folder / "model.safetensors.index.json").unlink()
    extract(folder, "a", tmp_path / "a", plan=placeless)
    assert set(read_bytes(tmp_path / "a")) == set(plan.slice_of("a").names)


def test_only_one_nodes_tensors_are_kept_of_a_plan(sources: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(sources["fp8"], 1, 3)
    plan.write(tmp_path / "plan.json")
    part = PartitionPlan.read(tmp_path / "plan.json", tensors_of="b")
    assert part.slice_of("b") == plan.slice_of("b")
    assert part.slice_of("a") == replace(plan.slice_of("a"), tensors=())
    with pytest.raises(UsageError, match="no node 'z'"):
        PartitionPlan.read(tmp_path / "plan.json", tensors_of="z")


def test_places_are_held_against_the_headers(sources: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(sources["fp8"], 1, 3)
    part = tmp_path / "part"
    shutil.copytree(sources["fp8"], part)
    shard = part / plan.slice_of("a").files[0]
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    # Eight spaces more before the data.
    shard.write_bytes(
        struct.pack("<Q", length + 8) + content[8 : 8 + length] + b" " * 8 + content[8 + length :]
    )
    with pytest.raises(CheckpointError, match=rf"does not lie at bytes \d+ to \d+ of {shard.name}"):
        extract(part, "a", tmp_path / "a", plan=plan)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The source is sparse: it takes no disk, and its copy would."""
    folder = tmp_path / "sparse"
    rows = shutil.disk_usage(tmp_path).free // 4 + 10_000_000
    shapes = {"model.embed_tokens.weight": (rows, 2), "model.layers.0.input_layernorm.weight": (2,)}
    try:
        write_sparse(folder, [{**shapes, "model.norm.weight": (2,)}], num_layers=1)
    except OSError:
        pytest.skip("no file is as large as what is free on this disk")
    plan = plan_of(folder, 1, memory="1PB")
    with pytest.raises(CheckpointError, match=r"expected \d+ bytes, found \d+ bytes free. .*more room"):
        extract(folder, "a", tmp_path / "a", plan=plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sparse"]


def test_a_disk_that_fills_up_leaves_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    with largest_file(100_000), pytest.raises(CheckpointError, match="cannot be written: .*File too large"):
        extract(sources["fp8"], "a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


_EXTRACT = """
import sys
from pathlib import Path
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.slices.folder import cut_slice
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.folder import FileFormat
from minimax_tools.slices.folder import write_slice
from minimax_tools.slices.stored_weights import StoredWeights

plan_file, node, output, file_format, digests = sys.argv[1:]
with MemoryTracker(interval_s=0.001) as tracker:
    before = tracker.get_current_usage()["anonymous_bytes"]
    plan = PartitionPlan.read(Path(plan_file), tensors_of=node)
    source = StoredWeights.of_slice(plan.model, plan.slice_of(node))
    cut = cut_slice(plan, node, source, file_format=FileFormat(file_format))
    print("cut", flush=True)
    write_slice(cut, Path(output), with_digests=digests == "digests")
print(tracker.peak.anonymous_bytes - before)
"""

# The system kills who writes more into a file, as abruptly as SIGKILL does, and at the same byte every time.
_KILLED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000_000, 100_000_000))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """280 MB in two files, one tensor of them 80 MB, all zeros that take no disk; and its plan beside it."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {"model.embed_tokens.weight": (40_000, 1000), "model.norm.weight": (1000,)}
    shapes |= {f"model.layers.{layer}.mlp.up_proj.weight": (20_000, 1000) for layer in range(5)}
    names = sorted(shapes)
    write_sparse(
        folder / "model",
        [{name: shapes[name] for name in part} for part in (names[:3], names[3:])],
        num_layers=5,
    )
    plan_of(folder / "model", 4, 5).write(folder / "plan.json")
    return folder


def extracting(
    large: Path, output: Path, file_format: str, digests: str, *, code: str = _EXTRACT
) -> list[str]:
    arguments = [str(large / "plan.json"), "a", str(output), file_format, digests]
    return [sys.executable, "-W", "ignore", "-c", code, *arguments]


@pytest.mark.parametrize(
    ("file_format", "digests"),
    [
        ("safetensors", "digests"),
        pytest.param("pth", "none", marks=pytest.mark.slow),
    ],
)
def test_extraction_takes_little_memory_whatever_the_size(
    file_format: str, digests: str, large: Path, tmp_path: Path
) -> None:
    command = extracting(large, tmp_path / "a", file_format, digests)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size_bytes = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    assert size_bytes > 100e6
    assert int(done.stdout.splitlines()[-1]) < 20e6


@pytest.mark.slow
def test_half_of_as_many_tensors_as_the_true_model_has_takes_little_memory(tmp_path: Path) -> None:
    plan = write_headers(tmp_path / "model")
    assert sum(len(slice_.tensors) for slice_ in plan.slices) > 96_000
    plan.write(tmp_path / "plan.json")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _EXTRACT,
        str(tmp_path / "plan.json"),
        "a",
        str(tmp_path / "a"),
    ]
    done = subprocess.run([*command, "safetensors", "none"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(TensorIndex.from_folder(tmp_path / "a")) == len(plan.slice_of("a").tensors)
    assert int(done.stdout.splitlines()[-1]) < 50e6


def test_a_killed_extraction_leaves_nothing_that_looks_whole(large: Path, tmp_path: Path) -> None:
    command = extracting(large, tmp_path / "a", "safetensors", "none", code=_KILLED + _EXTRACT)
    killed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (killed.returncode, killed.stdout) == (-signal.SIGXFSZ, "cut\n"), killed.stderr
    assert list(tmp_path.glob(".a.*.tmp/.a.tmp/*.safetensors"))
    assert not (tmp_path / "a").exists()
    assert len(leftovers(tmp_path)) == 1
    extract(large / "model", "a", tmp_path / "a", plan=PartitionPlan.read(large / "plan.json"))
    # What it left is gone too.
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    TensorIndex.from_folder(tmp_path / "a")
