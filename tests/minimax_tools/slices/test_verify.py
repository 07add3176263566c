from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord, read_records
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.errors import CannotRunError, CheckpointError, UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import PartCost, Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.download import fetch_slice
from minimax_tools.slices.folder import cut_slice, write_slice
from minimax_tools.slices.source import open_source
from minimax_tools.slices.verify import Verification, verify

MIB = 1 << 20
NAMES = (
    "plan_is_whole",
    "nodes_differ",
    "downloads_differ",
    "cover_everything",
    "overlap_nowhere",
    "memory_in_proportion",
    "nobody_holds_the_whole",
    "downloads_complete",
    "slices_as_planned",
    "digests_match",
    "reads_match",
)
NORM = "model.norm.weight"
LAYER_3_NORM = "model.layers.3.input_layernorm.weight"


def make(
    model: Path | str, nodes: list[Node], *, planner: str = "memory", access: HubAccess | None = None
) -> PartitionPlan:
    source = open_source(str(model), headers=True, access=access)
    return source.divide(
        planner=planner,
        nodes=nodes,
        workload=Workload(context_length=64),
    )


@pytest.fixture(scope="module")
def plan(toy: Path) -> PartitionPlan:
    """Layers 0 to 2 on a, layer 3 on b."""
    return make(toy, [Node(name="a", memory_bytes=600 * MIB), Node(name="b", memory_bytes=200 * MIB)])


@pytest.fixture(scope="module")
def whole_slices(toy: Path, plan: PartitionPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    for node in ("a", "b"):
        write_slice(cut_slice(plan, node, open_source(str(toy))), folder / node, with_digests=True)
    return folder


@pytest.fixture
def slices(whole_slices: Path, tmp_path: Path) -> Path:
    """Slices to be spoilt."""
    return shutil.copytree(whole_slices, tmp_path / "slices")


@pytest.fixture
def records(plan: PartitionPlan, tmp_path: Path) -> Path:
    """Write the records of a run into its capture directory."""
    (tmp_path / "capture").mkdir()
    for slice_ in plan.slices:
        sizes = {tensor.name: tensor.size_bytes for tensor in slice_.tensors}
        record = ReadRecord.begun(slice_.node.name).followed_by(sizes, sizes)
        record.write(tmp_path / "capture" / RECORDS_FOLDER)
    return tmp_path / "capture"


def failing(verification: Verification) -> dict[str, str]:
    return {
        verdict.name: " | ".join(verdict.found) for verdict in verification.verdicts if verdict.holds is False
    }


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Store a slice's tensors anew, changed, in one file."""
    tensors = {
        name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for file in folder.glob("*.safetensors"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_a_good_plan_with_its_slices_and_records_passes_every_verdict(
    plan: PartitionPlan, slices: Path, records: Path
) -> None:
    verification = verify(plan, slices=slices, records=records)
    assert tuple(verdict.name for verdict in verification.verdicts) == NAMES
    # A folder is not downloaded.
    assert [verdict.name for verdict in verification.verdicts if not verdict.holds] == ["downloads_differ"]
    assert verification.holds


def test_what_cannot_be_judged_without_slices_and_records_is_said_and_no_failure(plan: PartitionPlan) -> None:
    verification = verify(plan)
    unjudged = {verdict.name for verdict in verification.verdicts if verdict.holds is None}
    assert unjudged == {"downloads_differ", "slices_as_planned", "digests_match", "reads_match"}
    assert verification.holds


def test_a_slice_that_holds_a_foreign_tensor_fails(plan: PartitionPlan, slices: Path, toy: Path) -> None:
    with CheckpointReader(toy) as reader:
        foreign = reader.read(LAYER_3_NORM)
    rewrite(slices / "a", lambda tensors: tensors.update({LAYER_3_NORM: foreign}))
    faults = failing(verify(plan, slices=slices))
    assert faults.keys() == {"overlap_nowhere", "slices_as_planned"}
    assert faults["overlap_nowhere"] == f"{LAYER_3_NORM} is on a and b"
    assert faults["slices_as_planned"] == f"a holds {LAYER_3_NORM}, which belongs to another node"


def test_a_slice_that_lacks_a_tensor_fails(plan: PartitionPlan, slices: Path) -> None:
    rewrite(slices / "b", lambda tensors: tensors.pop(NORM))
    faults = failing(verify(plan, slices=slices))
    assert faults["cover_everything"] == f"no node holds {NORM}"
    assert faults["slices_as_planned"] == f"b lacks {NORM}"


def test_two_equal_slices_fail(plan: PartitionPlan, slices: Path) -> None:
    shutil.rmtree(slices / "b")
    shutil.copytree(slices / "a", slices / "b")
    faults = failing(verify(plan, slices=slices))
    assert faults["nodes_differ"].startswith("a and b hold the same 619 tensors")
    assert "slice.json says of its node: a, the plan: b" in faults["slices_as_planned"]
    assert faults.keys() >= {"cover_everything", "overlap_nowhere"}


def test_a_slice_with_the_whole_model_fails_even_if_no_other_slice_is_there(
    plan: PartitionPlan, slices: Path, toy: Path
) -> None:
    everything = {
        name: tensor for file in toy.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    rewrite(slices / "b", lambda tensors: tensors.update(everything))
    shutil.rmtree(slices / "a")
    assert failing(verify(plan, slices=slices))["nobody_holds_the_whole"] == "b holds all 827 tensors"


def test_the_only_slice_that_is_there_is_not_said_to_hold_the_whole(
    plan: PartitionPlan, slices: Path, toy: Path, tmp_path: Path
) -> None:
    shutil.rmtree(slices / "a")
    # Without headers and index file the names of a llama's tensors are known from the plan alone.
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    config = json.loads((toy / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    for model in (str(toy), str(unknown)):
        verdict = next(
            verdict
            for verdict in verify(plan, model=model, slices=slices).verdicts
            if verdict.name == "nobody_holds_the_whole"
        )
        assert verdict.holds
        assert verdict.claim == "no node holds or downloads the whole model"


def test_two_nodes_with_the_same_layers_fail(plan: PartitionPlan) -> None:
    values = encode(plan)
    values["slices"][1]["layers"] = values["slices"][0]["layers"]
    faults = failing(verify(decode(PartitionPlan, values)))
    assert faults["nodes_differ"] == "a and b have the same 3 layers"


def test_one_used_node_of_several_may_hold_the_whole(toy: Path) -> None:
    verification = verify(
        make(toy, [Node(name="large", memory_bytes=2_000 * MIB), Node(name="tiny", memory_bytes=1 * MIB)])
    )
    assert len(verification.plan.used) == 1
    assert verification.holds


@pytest.fixture
def access(hub: Any, tmp_path: Path) -> HubAccess:
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache", first_delay_s=0.01, timeout_s=60)


def in_one_shard(llama: Path, folder: Path) -> Path:
    folder.mkdir()
    tensors = {
        name: tensor for file in llama.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    save_file(tensors, folder / "model.safetensors")
    shutil.copyfile(llama / "config.json", folder / "config.json")
    return folder


TWO_NODES = [Node(name="a", memory_bytes=101 * MIB), Node(name="b", memory_bytes=100 * MIB)]


def test_nodes_that_would_each_download_the_only_shard_fail(
    llama: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    folder = in_one_shard(llama, tmp_path / "single")
    assert verify(make(folder, TWO_NODES)).holds
    hub.add("owner/single", folder)
    faults = failing(verify(make("owner/single", TWO_NODES, access=access), access=access))
    assert faults.keys() == {"nobody_holds_the_whole", "downloads_differ"}
    assert faults["nobody_holds_the_whole"].startswith("a downloads every weight file, 1 in all: divide")
    assert faults["downloads_differ"].startswith("a and b download the same 1 weight files: divide")


def test_nodes_that_download_the_same_of_several_shards_fail(
    llama: Path, hub: Any, access: HubAccess
) -> None:
    hub.add("owner/llama", llama)
    plan = make("owner/llama", TWO_NODES, access=access)
    judged = {verdict.name: verdict.holds for verdict in verify(plan, access=access).verdicts}
    assert judged["downloads_differ"]
    assert judged["nobody_holds_the_whole"]
    moved = encode(plan)
    moved["slices"][1]["files"] = [{**file, "tensors": []} for file in moved["slices"][0]["files"]]
    for slice_ in moved["slices"]:
        for file in slice_["files"]:
            file["tensors"] = [[f"{slice_['node']}.{file['file']}", 0, 8]]
    faults = failing(verify(decode(PartitionPlan, moved), access=access))
    assert faults["downloads_differ"].startswith("a and b download the same 4 weight files")


@pytest.mark.parametrize("is_noted", [True, False])
def test_one_flipped_byte_fails(plan: PartitionPlan, slices: Path, is_noted: bool) -> None:
    entry = TensorIndex.from_folder(slices / "b")[LAYER_3_NORM]
    content = bytearray(entry.file.read_bytes())
    content[entry.offset] ^= 1
    entry.file.write_bytes(content)
    if not is_noted:
        description = SliceDescription.read(slices / "b")
        replace(description, tensors=dict.fromkeys(description.tensors)).write(slices / "b")
    faults = failing(verify(plan, slices=slices))
    assert faults.keys() == {"digests_match"}
    assert f"{LAYER_3_NORM} of b has sha256" in faults["digests_match"]
    assert ("slice.json notes" in faults["digests_match"]) is is_noted


def test_a_tensor_of_another_shape_fails(plan: PartitionPlan, slices: Path) -> None:
    rewrite(slices / "b", lambda tensors: tensors.update({NORM: tensors[NORM].view(2, -1)}))
    assert (
        "[2, 128], its source torch.bfloat16 [256]" in failing(verify(plan, slices=slices))["digests_match"]
    )


def test_slices_without_a_source_are_held_against_what_they_note(
    plan: PartitionPlan, slices: Path, toy: Path, tmp_path: Path
) -> None:
    description = shutil.copytree(toy, tmp_path / "toy", ignore=shutil.ignore_patterns("*.safetensors"))
    judged = {
        verdict.name: verdict for verdict in verify(plan, model=str(description), slices=slices).verdicts
    }
    assert judged["digests_match"].holds
    assert judged["digests_match"].claim.startswith(
        "the bytes of 827 tensors are right: 0 compared with their source, 827 "
    )
    for node in ("a", "b"):
        noted = SliceDescription.read(slices / node)
        replace(noted, tensors=dict.fromkeys(noted.tensors)).write(slices / node)
    judged = {
        verdict.name: verdict for verdict in verify(plan, model=str(description), slices=slices).verdicts
    }
    assert judged["digests_match"].holds is None


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda folder: shutil.rmtree(folder), "is not there"),
        (lambda folder: (folder / "slice.json").unlink(), "holds no slice"),
        (lambda folder: next(folder.glob("*.safetensors")).write_bytes(b"short"), "too short for a header"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "is missing"),
    ],
)
def test_a_folder_that_is_no_slice_is_a_fault_and_no_crash(
    plan: PartitionPlan, slices: Path, spoil: Callable[[Path], object], fault: str
) -> None:
    spoil(slices / "b")
    faults = failing(verify(plan, slices=slices))
    assert fault in faults["slices_as_planned"]
    assert "cover_everything" in faults


def test_weights_beside_a_slice_fail(plan: PartitionPlan, slices: Path, toy: Path) -> None:
    shutil.copyfile(toy / plan.slice_of("a").files[0], slices / "b" / "left-over.safetensors")
    faults = failing(verify(plan, slices=slices))
    assert faults == {
        "slices_as_planned": f"b: left-over.safetensors lies in {slices / 'b'}, but belongs to no slice"
    }


def test_a_plan_with_a_wrong_place_fails(plan: PartitionPlan) -> None:
    values = encode(plan)
    values["slices"][0]["files"][0]["tensors"][0][1] += 2
    assert failing(verify(decode(PartitionPlan, values))).keys() == {"plan_is_whole"}


def test_what_a_slice_takes_is_measured_whatever_the_plan_says(plan: PartitionPlan, llama: Path) -> None:
    values = encode(plan)
    values["slices"][1] |= {
        "memory_bytes": 1 * MIB,
        "cost": dict.fromkeys(values["slices"][1]["cost"], 0),
    }
    faults = failing(verify(decode(PartitionPlan, values)))
    assert faults.keys() == {"memory_in_proportion"}
    assert faults["memory_in_proportion"].startswith("b has 1.0 MB and needs")


def test_memory_out_of_proportion_fails_where_the_plan_divides_by_it(toy: Path) -> None:
    nodes = [
        Node(name="large", memory_bytes=900 * MIB, layers=Span(0, 1)),
        Node(name="small", memory_bytes=100 * MIB, layers=Span(1, 4)),
    ]
    by_hand = make(toy, nodes, planner="manual")
    assert verify(by_hand).holds
    faults = failing(verify(replace(by_hand, planner="memory")))
    assert faults.keys() == {"memory_in_proportion"}
    assert faults["memory_in_proportion"] == "small has 3 layers, by memory it would have 1"


def test_all_on_one_of_two_nodes_that_could_share_fails(toy: Path) -> None:
    only = make(toy, [Node(name="a", memory_bytes=900 * MIB, layers=Span(0, 4))], planner="manual")
    idle = Slice(
        stage=replace(
            only.slices[0].stage,
            node=Node(name="b", memory_bytes=900 * MIB),
            layers=range(4, 4),
            has_embedding=False,
            has_head=False,
        ),
        cost=PartCost(),
        tensors=(),
    )
    lopsided = replace(only, planner="memory", slices=(*only.slices, idle))
    assert failing(verify(lopsided)).keys() == {"memory_in_proportion"}


@pytest.mark.parametrize("planner", ["memory", "balanced"])
@pytest.mark.parametrize("model", ["toy", "llama"])
@pytest.mark.parametrize("num_nodes", [2, 7])
def test_honest_plans_pass(planner: str, model: str, num_nodes: int, request: pytest.FixtureRequest) -> None:
    nodes = [
        Node(name=f"n{place}", memory_bytes=(2 + place % 3) * 100 * MIB, tflops=1.0 + place)
        for place in range(num_nodes)
    ]
    verification = verify(make(request.getfixturevalue(model), nodes, planner=planner))
    assert failing(verification) == {}
    assert verification.holds


@pytest.mark.parametrize("factor", [1.01, 2.0, 0.5])
def test_a_read_record_with_other_than_the_slices_bytes_fails(
    plan: PartitionPlan, records: Path, factor: float
) -> None:
    good = ReadRecord.read(records / RECORDS_FOLDER / "b.json")
    replace(good, bytes_read=int(good.bytes_read * factor)).write(records / RECORDS_FOLDER)
    faults = failing(verify(plan, records=records))
    assert faults.keys() == {"reads_match"}
    assert f"{factor:.2f} times its {good.bytes_asked}" in faults["reads_match"]


def test_a_read_record_of_other_tensors_fails(plan: PartitionPlan, records: Path) -> None:
    good = ReadRecord.read(records / RECORDS_FOLDER / "a.json")
    tensors = ("lm_head.weight", *good.tensors[1:])
    replace(good, tensors=tensors).write(records / RECORDS_FOLDER)
    found = failing(verify(plan, records=records))["reads_match"]
    assert (
        found == f"a opened lm_head.weight, which belongs to another node | a never opened {good.tensors[0]}"
    )


def test_a_record_of_another_plan_fails(plan: PartitionPlan, records: Path) -> None:
    good = ReadRecord.read(records / RECORDS_FOLDER / "a.json")
    replace(good, plan=plan.digest).write(records / RECORDS_FOLDER)
    assert not failing(verify(plan, records=records))
    replace(good, plan="f" * 64).write(records / RECORDS_FOLDER)
    found = failing(verify(plan, records=records))["reads_match"]
    assert found == f"a read by another plan, ffffffffffff, not {plan.digest[:12]}"


def test_a_node_without_a_record_fails_beside_those_that_have_one(plan: PartitionPlan, records: Path) -> None:
    (records / RECORDS_FOLDER / "b.json").unlink()
    assert failing(verify(plan, records=records))["reads_match"] == "b wrote no record of its reads"


def test_damaged_and_mislaid_records_are_errors(plan: PartitionPlan, records: Path) -> None:
    folder = records / RECORDS_FOLDER
    shutil.copyfile(folder / "a.json", folder / "b.json")
    with pytest.raises(CannotRunError, match="the record of another node: expected b, found a"):
        read_records(folder, ["a", "b"])
    (folder / "b.json").write_text('{"node": "b"}')
    with pytest.raises(CannotRunError, match="is no read record"):
        verify(plan, records=records)


def test_a_missing_file_fails_for_a_node_asked_for_by_name(
    plan: PartitionPlan, toy: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(toy, tmp_path / "toy")
    lost = next(file for file in plan.slice_of("b").files if file not in plan.slice_of("a").files)
    (folder / lost).unlink()
    faults = failing(verify(plan, nodes=["b"], model=str(folder)))
    assert faults.keys() == {"downloads_complete"}
    assert f"{lost} of b: not here of {(toy / lost).stat().st_size}" == faults["downloads_complete"]
    assert verify(plan, nodes=["a"], model=str(folder)).holds
    everyone = verify(plan, model=str(folder))
    judged = {verdict.name: verdict for verdict in everyone.verdicts}
    assert judged["downloads_complete"].found[0].endswith("complete here: a")


def test_unknown_nodes_and_folders_are_usage_errors(plan: PartitionPlan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the plan has no node 'c'"):
        verify(plan, nodes=["c"])
    with pytest.raises(UsageError, match="is no folder"):
        verify(plan, slices=tmp_path / "nowhere")


def test_only_the_nodes_asked_for_are_looked_at(plan: PartitionPlan, slices: Path) -> None:
    shutil.rmtree(slices / "a")
    verification = verify(plan, nodes=["b"], slices=slices)
    assert verification.holds
    assert [node.slice.node.name for node in verification.nodes] == ["b"]


@pytest.fixture
def node_side(llama: Path, tmp_path: Path) -> tuple[PartitionPlan, Path]:
    """A plan of a llama, and the folder of a machine that has the files of node a alone."""
    plan = make(llama, TWO_NODES)
    folder = shutil.copytree(llama, tmp_path / "node")
    for path in folder.glob("*.safetensors"):
        if path.name not in plan.slice_of("a").files:
            path.unlink()
    return plan, folder


def test_a_nodes_machine_verifies_with_the_nodes_files_alone(
    node_side: tuple[PartitionPlan, Path], llama: Path
) -> None:
    plan, folder = node_side
    verification = verify(plan, nodes=["a"], model=str(folder))
    assert failing(verification) == {}
    judged = {verdict.name: verdict for verdict in verification.verdicts}
    assert all(judged[name].holds for name in ("plan_is_whole", "cover_everything", "downloads_complete"))
    assert (
        judged["memory_in_proportion"].claim == "each slice fits its node's memory, by the plan's own figures"
    )
    download = verification.nodes[0].download
    assert download.is_complete
    assert len(download.repository.sizes) == len(list(llama.iterdir()))
    everything = sum(path.stat().st_size for path in llama.iterdir())
    assert download.repository.size_bytes == everything
    assert download.reduction == pytest.approx(1 - download.size_bytes / everything)
    assert failing(verify(plan, nodes=["b"], model=str(folder))).keys() == {"downloads_complete"}


def test_a_nodes_machine_finds_what_is_wrong_as_far_as_it_can_know(
    node_side: tuple[PartitionPlan, Path],
) -> None:
    plan, folder = node_side
    values = encode(plan)
    values["slices"][0]["files"][0]["tensors"][0][1] += 2
    faults = failing(verify(decode(PartitionPlan, values), nodes=["a"], model=str(folder)))
    assert "does not lie at bytes" in faults["plan_is_whole"]
    values = encode(plan)
    lost = values["slices"][1]["files"][-1]["tensors"].pop()[0]
    faults = failing(verify(decode(PartitionPlan, values), nodes=["a"], model=str(folder)))
    assert faults["cover_everything"] == f"no node holds {lost}"
    values = encode(plan)
    values["slices"][1]["files"][-1]["tensors"].append(["model.layers.5.new", 0, 8])
    faults = failing(verify(decode(PartitionPlan, values), nodes=["a"], model=str(folder)))
    assert "model.layers.5.new, which the checkpoint lacks" in faults["plan_is_whole"]


def test_where_nothing_tells_the_tensors_coverage_is_not_judged(
    node_side: tuple[PartitionPlan, Path],
) -> None:
    plan, folder = node_side
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    judged = {verdict.name: verdict for verdict in verify(plan, model=str(folder)).verdicts}
    assert judged["cover_everything"].holds is None
    assert "neither headers nor an index file list" in judged["cover_everything"].found[0]


def test_sizes_are_the_plans_and_not_what_config_json_says(
    plan: PartitionPlan, records: Path, toy: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(toy, tmp_path / "toy", ignore=shutil.ignore_patterns("model-00001-*"))
    config = json.loads((folder / "config.json").read_text())
    # Of FP8 it would say half.
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    verification = verify(plan, model=str(folder), records=records)
    assert {verdict.name: verdict.holds for verdict in verification.verdicts}["reads_match"]
    for node in verification.nodes:
        assert node.slice_bytes == sum(tensor.size_bytes for tensor in node.slice.tensors)


def test_digests_that_are_no_text_are_a_fault_and_no_crash(plan: PartitionPlan, slices: Path) -> None:
    path = slices / "b" / "slice.json"
    values = json.loads(path.read_text())
    values["tensors"][NORM] = 7
    path.write_text(json.dumps(values))
    fault = failing(verify(plan, slices=slices))["slices_as_planned"]
    assert f"expected text, found 7 @ $.tensors['{NORM}']" in fault
    path.write_text(json.dumps({**values, "tensors": [NORM]}))
    with pytest.raises(CheckpointError, match="holds no slice"):
        SliceDescription.read(slices / "b")


def test_offline_the_repository_is_what_cache_index_and_plan_tell_of(
    llama: Path, hub: Any, access: HubAccess
) -> None:
    hub.add("owner/llama", llama)
    plan = make("owner/llama", TWO_NODES, access=access)
    fetch_slice(plan, "a", access=access)
    offline = verify(plan, nodes=["a"], access=replace(access, is_offline=True))
    download = offline.nodes[0].download
    assert download.is_complete
    assert not download.repository.is_listed
    assert download.repository.sizes.keys() == {path.name for path in llama.iterdir()}
    assert download.repository.size_bytes == sum(path.stat().st_size for path in llama.iterdir())
    assert offline.model == plan.model
    assert offline.holds
