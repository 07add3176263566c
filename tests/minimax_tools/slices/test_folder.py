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
from collections.abc import Callable
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

Content = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]

MODEL = SyntheticModel(
    num_hidden_layers=3, hidden_size=128, num_local_experts=4, intermediate_size=64, vocab_size=512
)
NODES = ("a", "b")


def plan_of(folder: Path, *ends: int, memory: str = "1GB") -> PartitionPlan:
    """Nodes a, b, … that hold the layers up to each end: 1 and 3 if none is given."""
    ends = ends or (1, 3)
    nodes = [
        Node.parse(f"{name}:memory={memory},layers={start}:{stop}")
        for name, start, stop in zip("abc", (0, *ends), ends, strict=False)
    ]
    return open_source(str(folder)).divide(
        planner="manual", nodes=nodes, workload=Workload(context_length=16)
    )


def cut(folder: Path, node: str, plan: PartitionPlan | None = None, **options: Any) -> SliceCut:
    plan = plan or plan_of(folder)
    return cut_slice(plan, node, StoredWeights.of_slice(str(folder), plan.slice_of(node)), **options)


def extract(
    folder: Path,
    node: str,
    output: Path,
    plan: PartitionPlan | None = None,
    *,
    with_digests: bool = False,
    **options: Any,
) -> SliceFolder:
    return write_slice(cut(folder, node, plan, **options), output, with_digests=with_digests)


def write_sparse(folder: Path, shards: list[dict[str, tuple[int, ...]]], *, num_layers: int) -> None:
    """A BF16 llama whose data are holes."""
    config = {"model_type": "llama", "hidden_size": 2, "num_hidden_layers": num_layers}
    tensors = [
        [TensorSize(name=name, shape=shape, dtype=BFLOAT16) for name, shape in shapes.items()]
        for shapes in shards
    ]
    write_holes(folder, config, tensors)


def write_holes(folder: Path, config: dict[str, Any], shards: list[list[TensorSize]]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, tensors in enumerate(shards):
        header, path = encode_header(tensors), folder / f"model-{number:05}.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(tensor.size_bytes for tensor in tensors))
        weight_map |= {tensor.name: path.name for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_headers(folder: Path) -> PartitionPlan:
    """As many tensors as MiniMax-M2 has, small ones, whose data are holes; planned for two nodes."""
    model = replace(
        MODEL, num_hidden_layers=62, num_local_experts=256, intermediate_size=8, num_experts_per_tok=8
    )
    config = model.config(dtype=torch.float8_e4m3fn, token_ids=TokenIds(bos_token_id=0, eos_token_id=0))
    tensors = list(expected_tensors(ModelSpec.from_config(config)))
    write_holes(folder, config, [tensors[start : start + 800] for start in range(0, len(tensors), 800)])
    return plan_of(folder, 31, 62)


def read_bytes(folder: Path) -> Content:
    """Read a folder's shards with safetensors itself."""
    found: Content = {}
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


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {"fp8": root / "fp8", "bf16": root / "bf16", "bin": pickled}


@pytest.fixture
def source(sources: dict[str, Path], tmp_path: Path) -> Path:
    """The model in FP8, to be spoilt."""
    return shutil.copytree(sources["fp8"], tmp_path / "source")


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
        written = extract(sources[kind], node, tmp_path / node, with_digests=True)
        assert written.is_new
        found = read_bytes(tmp_path / node)
        assert written.size_bytes == sum(len(content) for _, _, content in found.values())
        digests = {name: hashlib.sha256(content).hexdigest() for name, (_, _, content) in found.items()}
        assert SliceDescription.read(tmp_path / node).tensors == digests
        slices.append(found)
    assert not slices[0].keys() & slices[1].keys()
    assert slices[0] | slices[1] == whole
    assert names_in(tmp_path) == ["a", "b"]


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
    slice_ = plan_of(sources["fp8"]).slice_of("a")
    written = extract(sources["fp8"], "a", tmp_path / "a")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (sources["fp8"] / name).read_bytes()
    weight_map = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(weight_map) == sorted(slice_.names)
    assert sorted(set(weight_map.values())) == [file.name for file in written.files]
    # One for each of the source's that holds some of it.
    assert len(written.files) == len(slice_.files)
    assert json.loads((tmp_path / "a" / "slice.json").read_text()) == {
        "schema_version": 1,
        "node": "a",
        "layers": [0, 1],
        "has_embedding": True,
        "has_head": False,
        "source": str(sources["fp8"]),
        "tensors": dict.fromkeys(sorted(weight_map)),
    }


def test_a_tied_embedding_lies_in_the_first_and_in_the_last_slice(tied: Path, tmp_path: Path) -> None:
    plan = plan_of(tied, 1, 2)
    for node in NODES:
        extract(tied, node, tmp_path / node, plan)
    first, last = read_bytes(tmp_path / "a"), read_bytes(tmp_path / "b")
    assert first.keys() & last.keys() == {"model.embed_tokens.weight"}
    assert first["model.embed_tokens.weight"] == last["model.embed_tokens.weight"]
    assert first | last == read_bytes(tied)


def test_shards_keep_to_the_size_asked_for(sources: dict[str, Path], tmp_path: Path) -> None:
    written = extract(sources["fp8"], "b", tmp_path / "b", shard_size_bytes=50_000)
    assert len(written.files) > 3
    sizes = [[tensor.nbytes for tensor in load_file(file).values()] for file in written.files]
    assert all(sum(shard) <= 50_000 or len(shard) == 1 for shard in sizes)
    assert max(map(sum, sizes)) > 50_000, "one tensor is larger than a shard, and is not split"
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
    assert not extract(sources[kind], "a", tmp_path / "pth", file_format=FileFormat.PTH).is_new
    with pytest.raises(UsageError, match="has no shards"):
        cut(sources[kind], "a", file_format=FileFormat.PTH, shard_size_bytes=1000)


def test_the_same_slice_is_left_and_what_a_killed_run_left_beside_it_removed(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    extract(sources["fp8"], "a", tmp_path / "a")
    before = content_of(tmp_path / "a"), (tmp_path / "a").stat().st_ino
    (tmp_path / ".a.0123abcd.tmp").mkdir()
    assert not extract(sources["fp8"], "a", tmp_path / "a").is_new
    assert (content_of(tmp_path / "a"), (tmp_path / "a").stat().st_ino) == before
    assert names_in(tmp_path) == ["a"]


def test_digests_are_added_to_the_same_slice_and_a_false_one_is_refused(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    extract(sources["fp8"], "a", tmp_path / "a")
    assert not extract(sources["fp8"], "a", tmp_path / "a", with_digests=True).is_new
    described = SliceDescription.read(tmp_path / "a")
    name, content = min(read_bytes(tmp_path / "a").items())
    assert described.tensors[name] == hashlib.sha256(content[2]).hexdigest()
    assert None not in described.tensors.values()
    replace(described, tensors={**described.tensors, name: "0" * 64}).write(tmp_path / "a")
    with pytest.raises(UsageError, match=f"another digest of {name}"):
        extract(sources["fp8"], "a", tmp_path / "a")


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


def test_a_plan_of_another_checkpoint_is_refused_with_every_fault(sources: dict[str, Path]) -> None:
    plan = plan_of(sources["fp8"])
    missing = [name for name in plan.slice_of("a").files if not (sources["bf16"] / name).exists()]
    assert missing
    with pytest.raises(CheckpointError, match="bf16 does not hold what the plan gives node a") as raised:
        cut(sources["bf16"], "a", plan)
    assert all(f"{name} is not here" in str(raised.value) for name in missing)


def test_an_unknown_and_an_idle_node_are_refused(sources: dict[str, Path]) -> None:
    plan = plan_of(sources["fp8"])
    with pytest.raises(UsageError, match="no node 'z': expected one of a, b"):
        cut(sources["fp8"], "z", plan)
    stage = replace(
        plan.slices[1].stage, node=Node.parse("idle:memory=1GB"), layers=range(3, 3), has_head=False
    )
    idle = replace(plan.slices[1], stage=stage, tensors=())
    with pytest.raises(UsageError, match="node idle holds nothing in this plan: expected one of a, b"):
        cut(sources["fp8"], "idle", replace(plan, slices=(*plan.slices, idle)))


def test_a_source_that_was_cut_short_is_refused_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source)
    made = cut(source, "a", plan)
    last = made.entries[-1]
    os.truncate(last.file, last.file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{last.file.name} is damaged .*truncated"):
        cut(source, "a", plan)
    # Or after its headers were read.
    os.truncate(last.file, last.offset + 1)
    fault = f"{last.file.name} became shorter: expected bytes .* found an end"
    with pytest.raises(CheckpointError, match=fault):
        write_slice(made, tmp_path / "a")
    last.file.unlink()
    with pytest.raises(CheckpointError, match=f"{last.file.name} cannot be opened"):
        write_slice(made, tmp_path / "a")
    assert names_in(tmp_path) == ["source"]


class _Removing(NoProgress):
    """A progress that removes files of the slice being written, as a clean-up script would."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent

    def advance(self, layer: int, *, num_bytes: int) -> None:
        for path in self._parent.rglob("model-00001-of-*.safetensors"):
            path.unlink()


def test_a_slice_whose_files_are_removed_or_cut_is_told(sources: dict[str, Path], tmp_path: Path) -> None:
    made = cut(sources["fp8"], "a", shard_size_bytes=100_000)
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
    folder = shutil.copytree(sources["bin"], tmp_path / "source")
    made = cut(folder, "a")
    entry = made.entries[0]
    content = bytearray(entry.file.read_bytes())
    content[entry.offset] ^= 1
    entry.file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{entry.name} .*is damaged"):
        write_slice(made, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["fp8", "bin"])
def test_the_files_of_one_slice_suffice_for_it(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(sources[kind])
    part = shutil.copytree(sources[kind], tmp_path / "part")
    foreign = sorted(set(plan.slice_of("b").files) - set(plan.slice_of("a").files))
    assert foreign
    for name in foreign:
        (part / name).unlink()
    extract(part, "a", tmp_path / "a", plan)
    assert set(read_bytes(tmp_path / "a")) == set(plan.slice_of("a").names)
    index = find_index(part)
    assert index is not None
    assert set(index.absent.values()) == set(foreign)
    with pytest.raises(CheckpointError, match=f"{foreign[0]} is not here"):
        cut(part, "b", plan)


@pytest.mark.parametrize("has_index", [True, False])
def test_a_plan_without_places_finds_its_files(has_index: bool, source: Path) -> None:
    plan = plan_of(source)
    slices = [
        replace(slice_, tensors=tuple(PlaceOf(name=name) for name in slice_.names)) for slice_ in plan.slices
    ]
    if has_index:
        for name in set(plan.slice_of("b").files) - set(plan.slice_of("a").files):
            (source / name).unlink()
    else:
        (source / "model.safetensors.index.json").unlink()
    made = cut(source, "a", replace(plan, slices=tuple(slices)))
    assert {entry.name for entry in made.entries} == set(plan.slice_of("a").names)


def test_only_one_nodes_tensors_are_kept_of_a_plan(sources: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of(sources["fp8"])
    plan.write(tmp_path / "plan.json")
    part = PartitionPlan.read(tmp_path / "plan.json", tensors_of="b")
    assert part.slices == (replace(plan.slice_of("a"), tensors=()), plan.slice_of("b"))
    with pytest.raises(UsageError, match="no node 'z'"):
        PartitionPlan.read(tmp_path / "plan.json", tensors_of="z")


def test_places_are_held_against_the_headers(source: Path) -> None:
    plan = plan_of(source)
    shard = source / plan.slice_of("a").files[0]
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    # Eight spaces more before the data.
    header = struct.pack("<Q", length + 8) + content[8 : 8 + length] + b" " * 8
    shard.write_bytes(header + content[8 + length :])
    with pytest.raises(CheckpointError, match=rf"does not lie at bytes \d+ to \d+ of {shard.name}"):
        cut(source, "a", plan)


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
        extract(folder, "a", tmp_path / "a", plan)
    assert names_in(tmp_path) == ["sparse"]


def test_a_disk_that_fills_up_leaves_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written: .*File too large"):
            extract(sources["fp8"], "a", tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(tmp_path) == []


_EXTRACT = """
import sys
from pathlib import Path
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.folder import FileFormat, cut_slice, write_slice
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
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000_000, 50_000_000))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB in two files, one tensor of them 60 MB, all zeros that take no disk; and its plan beside it."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {"model.embed_tokens.weight": (30_000, 1000), "model.norm.weight": (1000,)}
    shapes |= {f"model.layers.{layer}.mlp.up_proj.weight": (10_000, 1000) for layer in range(5)}
    shards = [{name: shapes[name] for name in part} for part in (sorted(shapes)[:3], sorted(shapes)[3:])]
    write_sparse(folder / "model", shards, num_layers=5)
    plan_of(folder / "model", 4, 5).write(folder / "plan.json")
    return folder


def run_extract(
    plan: Path, output: Path, *arguments: str, before: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", before + _EXTRACT, plan, "a", output, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("file_format", "digests"),
    [("safetensors", "digests"), pytest.param("pth", "none", marks=pytest.mark.slow)],
)
def test_extraction_takes_little_memory_whatever_the_size(
    file_format: str, digests: str, large: Path, tmp_path: Path
) -> None:
    done = run_extract(large / "plan.json", tmp_path / "a", file_format, digests)
    assert done.returncode == 0, done.stderr
    size_bytes = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    assert size_bytes > 100e6
    assert int(done.stdout.splitlines()[-1]) < 20e6


@pytest.mark.slow
def test_half_of_as_many_tensors_as_the_true_model_has_takes_little_memory(tmp_path: Path) -> None:
    plan = write_headers(tmp_path / "model")
    assert sum(len(slice_.tensors) for slice_ in plan.slices) > 96_000
    plan.write(tmp_path / "plan.json")
    done = run_extract(tmp_path / "plan.json", tmp_path / "a", "safetensors", "none")
    assert done.returncode == 0, done.stderr
    assert len(TensorIndex.from_folder(tmp_path / "a")) == len(plan.slice_of("a").tensors)
    assert int(done.stdout.splitlines()[-1]) < 50e6


def test_a_killed_extraction_leaves_nothing_that_looks_whole(large: Path, tmp_path: Path) -> None:
    killed = run_extract(large / "plan.json", tmp_path / "a", "safetensors", "none", before=_KILLED)
    assert (killed.returncode, killed.stdout) == (-signal.SIGXFSZ, "cut\n"), killed.stderr
    assert list(tmp_path.glob(".a.*.tmp/.a.tmp/*.safetensors"))
    assert not (tmp_path / "a").exists()
    assert len(names_in(tmp_path)) == 1
    extract(large / "model", "a", tmp_path / "a", PartitionPlan.read(large / "plan.json"))
    # What it left is gone too.
    assert names_in(tmp_path) == ["a"]
    TensorIndex.from_folder(tmp_path / "a")
