from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.errors import CannotRunError, UsageError
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
from minimax_tools.slices.verdicts import SliceVerdict
from minimax_tools.slices.verification_text import _format_layers
from minimax_tools.slices.verify import verify

MIB = 1 << 20
TWO_NODES = [Node(name="a", memory_bytes=101 * MIB), Node(name="b", memory_bytes=100 * MIB)]
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
    return source.divide(planner=planner, nodes=nodes, workload=Workload(context_length=64))


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


def judged(plan: PartitionPlan, **options: Any) -> dict[str, SliceVerdict]:
    return {verdict.name: verdict for verdict in verify(plan, **options).verdicts}


def failing(plan: PartitionPlan, **options: Any) -> dict[str, str]:
    """The contradictions of the verdicts that fail."""
    verdicts = judged(plan, **options)
    return {name: " | ".join(verdict.found) for name, verdict in verdicts.items() if verdict.holds is False}


def changed(plan: PartitionPlan, change: Callable[[list[dict[str, Any]]], object]) -> PartitionPlan:
    """The plan with its slices, as JSON has them, changed."""
    values = encode(plan)
    change(values["slices"])
    return decode(PartitionPlan, values)


def move_a_tensor(slices: list[dict[str, Any]]) -> None:
    slices[0]["files"][0]["tensors"][0][1] += 2


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Store a slice's tensors anew, changed, in one file."""
    tensors = tensors_of(folder)
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
    foreign = tensors_of(toy)[LAYER_3_NORM]
    rewrite(slices / "a", lambda tensors: tensors.update({LAYER_3_NORM: foreign}))
    assert failing(plan, slices=slices) == {
        "overlap_nowhere": f"{LAYER_3_NORM} is on a and b",
        "slices_as_planned": f"a holds {LAYER_3_NORM}, which belongs to another node",
    }


def test_a_slice_that_lacks_a_tensor_fails(plan: PartitionPlan, slices: Path) -> None:
    rewrite(slices / "b", lambda tensors: tensors.pop(NORM))
    assert failing(plan, slices=slices) == {
        "cover_everything": f"no node holds {NORM}",
        "slices_as_planned": f"b lacks {NORM}",
    }


def test_two_equal_slices_fail(plan: PartitionPlan, slices: Path) -> None:
    shutil.rmtree(slices / "b")
    shutil.copytree(slices / "a", slices / "b")
    faults = failing(plan, slices=slices)
    assert faults["nodes_differ"].startswith("a and b hold the same 619 tensors")
    assert "slice.json says of its node: a, the plan: b" in faults["slices_as_planned"]
    assert faults.keys() >= {"cover_everything", "overlap_nowhere"}


def test_a_slice_with_the_whole_model_fails_even_if_no_other_slice_is_there(
    plan: PartitionPlan, slices: Path, toy: Path
) -> None:
    rewrite(slices / "b", lambda tensors: tensors.update(tensors_of(toy)))
    shutil.rmtree(slices / "a")
    assert failing(plan, slices=slices)["nobody_holds_the_whole"] == "b holds all 827 tensors"


def test_the_only_slice_that_is_there_is_not_said_to_hold_the_whole(
    plan: PartitionPlan, slices: Path, toy: Path, tmp_path: Path
) -> None:
    shutil.rmtree(slices / "a")
    # Without headers and index file the names of a llama's tensors are known from the plan alone.
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    config = json.loads((toy / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    for model in (toy, unknown):
        verdict = judged(plan, model=str(model), slices=slices)["nobody_holds_the_whole"]
        assert verdict.holds
        assert verdict.claim == "no node holds or downloads the whole model"


def test_two_nodes_with_the_same_layers_fail(plan: PartitionPlan) -> None:
    twice = changed(plan, lambda slices: slices[1].update(layers=slices[0]["layers"]))
    assert failing(twice)["nodes_differ"] == "a and b have the same 3 layers"


def test_one_used_node_of_several_may_hold_the_whole(toy: Path) -> None:
    nodes = [Node(name="large", memory_bytes=2_000 * MIB), Node(name="tiny", memory_bytes=1 * MIB)]
    verification = verify(make(toy, nodes))
    assert len(verification.plan.used) == 1
    assert verification.holds


def test_nodes_that_would_each_download_the_only_shard_fail(
    llama: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(tensors_of(llama), folder / "model.safetensors")
    shutil.copyfile(llama / "config.json", folder / "config.json")
    assert verify(make(folder, TWO_NODES)).holds
    hub.add("owner/single", folder)
    faults = failing(make("owner/single", TWO_NODES, access=access), access=access)
    assert faults.keys() == {"nobody_holds_the_whole", "downloads_differ"}
    assert faults["nobody_holds_the_whole"].startswith("a downloads every weight file, 1 in all: divide")
    assert faults["downloads_differ"].startswith("a and b download the same 1 weight files: divide")


def test_nodes_that_download_the_same_of_several_shards_fail(
    llama: Path, hub: Any, access: HubAccess
) -> None:
    hub.add("owner/llama", llama)
    plan = make("owner/llama", TWO_NODES, access=access)
    verdicts = judged(plan, access=access)
    assert verdicts["downloads_differ"].holds
    assert verdicts["nobody_holds_the_whole"].holds

    def spread(slices: list[dict[str, Any]]) -> None:
        names = [file["file"] for file in slices[0]["files"]]
        for slice_ in slices:
            slice_["files"] = [
                {"file": name, "tensors": [[f"{slice_['node']}.{name}", 0, 8]]} for name in names
            ]

    faults = failing(changed(plan, spread), access=access)
    assert faults["downloads_differ"].startswith("a and b download the same 4 weight files")


@pytest.mark.parametrize("is_noted", [True, False])
def test_one_flipped_byte_fails(plan: PartitionPlan, slices: Path, is_noted: bool) -> None:
    entry = TensorIndex.from_folder(slices / "b")[LAYER_3_NORM]
    content = bytearray(entry.file.read_bytes())
    content[entry.offset] ^= 1
    entry.file.write_bytes(content)
    if not is_noted:
        forget_digests(slices / "b")
    faults = failing(plan, slices=slices)
    assert faults.keys() == {"digests_match"}
    assert f"{LAYER_3_NORM} of b has sha256" in faults["digests_match"]
    assert ("slice.json notes" in faults["digests_match"]) is is_noted


def forget_digests(folder: Path) -> None:
    description = SliceDescription.read(folder)
    replace(description, tensors=dict.fromkeys(description.tensors)).write(folder)


def test_a_tensor_of_another_shape_fails(plan: PartitionPlan, slices: Path) -> None:
    rewrite(slices / "b", lambda tensors: tensors.update({NORM: tensors[NORM].view(2, -1)}))
    fault = failing(plan, slices=slices)["digests_match"]
    assert "[2, 128], its source torch.bfloat16 [256]" in fault


def test_slices_without_a_source_are_held_against_what_they_note(
    plan: PartitionPlan, slices: Path, toy: Path, tmp_path: Path
) -> None:
    described = shutil.copytree(toy, tmp_path / "toy", ignore=shutil.ignore_patterns("*.safetensors"))
    verdict = judged(plan, model=str(described), slices=slices)["digests_match"]
    assert verdict.holds
    assert "bytes of 827 tensors are right: 0 compared with their source, 827 " in verdict.claim
    for node in ("a", "b"):
        forget_digests(slices / node)
    assert judged(plan, model=str(described), slices=slices)["digests_match"].holds is None


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
    faults = failing(plan, slices=slices)
    assert fault in faults["slices_as_planned"]
    assert "cover_everything" in faults


def test_weights_beside_a_slice_fail(plan: PartitionPlan, slices: Path, toy: Path) -> None:
    shutil.copyfile(toy / plan.slice_of("a").files[0], slices / "b" / "left-over.safetensors")
    fault = f"b: left-over.safetensors lies in {slices / 'b'}, but belongs to no slice"
    assert failing(plan, slices=slices) == {"slices_as_planned": fault}


def test_a_plan_with_a_wrong_place_fails(plan: PartitionPlan) -> None:
    assert failing(changed(plan, move_a_tensor)).keys() == {"plan_is_whole"}


def test_what_a_slice_takes_is_measured_whatever_the_plan_says(plan: PartitionPlan) -> None:
    def claim_little(slices: list[dict[str, Any]]) -> None:
        slices[1] |= {"memory_bytes": 1 * MIB, "cost": dict.fromkeys(slices[1]["cost"], 0)}

    faults = failing(changed(plan, claim_little))
    assert faults.keys() == {"memory_in_proportion"}
    assert faults["memory_in_proportion"].startswith("b has 1.0 MB and needs")


def test_memory_out_of_proportion_fails_where_the_plan_divides_by_it(toy: Path) -> None:
    nodes = [
        Node(name="large", memory_bytes=900 * MIB, layers=Span(0, 1)),
        Node(name="small", memory_bytes=100 * MIB, layers=Span(1, 4)),
    ]
    by_hand = make(toy, nodes, planner="manual")
    assert verify(by_hand).holds
    fault = "small has 3 layers, by memory it would have 1"
    assert failing(replace(by_hand, planner="memory")) == {"memory_in_proportion": fault}


def test_all_on_one_of_two_nodes_that_could_share_fails(toy: Path) -> None:
    only = make(toy, [Node(name="a", memory_bytes=900 * MIB, layers=Span(0, 4))], planner="manual")
    node = Node(name="b", memory_bytes=900 * MIB)
    stage = replace(only.slices[0].stage, node=node, layers=range(4, 4), has_embedding=False, has_head=False)
    idle = Slice(stage=stage, cost=PartCost(), tensors=())
    lopsided = replace(only, planner="memory", slices=(*only.slices, idle))
    assert failing(lopsided).keys() == {"memory_in_proportion"}


@pytest.mark.parametrize("planner", ["memory", "balanced"])
@pytest.mark.parametrize("model", ["toy", "llama"])
@pytest.mark.parametrize("num_nodes", [2, 7])
def test_honest_plans_pass(planner: str, model: str, num_nodes: int, request: pytest.FixtureRequest) -> None:
    nodes = [
        Node(name=f"n{place}", memory_bytes=(2 + place % 3) * 100 * MIB, tflops=1.0 + place)
        for place in range(num_nodes)
    ]
    assert failing(make(request.getfixturevalue(model), nodes, planner=planner)) == {}


@pytest.mark.parametrize("factor", [1.01, 2.0, 0.5])
def test_a_read_record_with_other_than_the_slices_bytes_fails(
    plan: PartitionPlan, records: Path, factor: float
) -> None:
    good = ReadRecord.read(records / RECORDS_FOLDER / "b.json")
    replace(good, bytes_read=int(good.bytes_read * factor)).write(records / RECORDS_FOLDER)
    faults = failing(plan, records=records)
    assert faults.keys() == {"reads_match"}
    assert f"{factor:.2f} times its {good.bytes_asked}" in faults["reads_match"]


def test_a_read_record_of_other_tensors_or_of_another_plan_fails(plan: PartitionPlan, records: Path) -> None:
    good = ReadRecord.read(records / RECORDS_FOLDER / "a.json")
    replace(good, tensors=("lm_head.weight", *good.tensors[1:])).write(records / RECORDS_FOLDER)
    assert failing(plan, records=records)["reads_match"] == (
        f"a opened lm_head.weight, which belongs to another node | a never opened {good.tensors[0]}"
    )
    replace(good, plan=plan.digest).write(records / RECORDS_FOLDER)
    assert not failing(plan, records=records)
    replace(good, plan="f" * 64).write(records / RECORDS_FOLDER)
    fault = f"a read by another plan, ffffffffffff, not {plan.digest[:12]}"
    assert failing(plan, records=records)["reads_match"] == fault


def test_missing_mislaid_and_damaged_records_are_told(plan: PartitionPlan, records: Path) -> None:
    folder = records / RECORDS_FOLDER
    (folder / "b.json").unlink()
    assert failing(plan, records=records)["reads_match"] == "b wrote no record of its reads"
    shutil.copyfile(folder / "a.json", folder / "b.json")
    with pytest.raises(CannotRunError, match="the record of another node: expected b, found a"):
        verify(plan, records=records)
    (folder / "b.json").write_text('{"node": "b"}')
    with pytest.raises(CannotRunError, match="is no read record"):
        verify(plan, records=records)


def test_a_missing_file_fails_for_a_node_asked_for_by_name(
    plan: PartitionPlan, toy: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(toy, tmp_path / "toy")
    lost = next(file for file in plan.slice_of("b").files if file not in plan.slice_of("a").files)
    (folder / lost).unlink()
    fault = f"{lost} of b: not here of {(toy / lost).stat().st_size}"
    assert failing(plan, nodes=["b"], model=str(folder)) == {"downloads_complete": fault}
    assert verify(plan, nodes=["a"], model=str(folder)).holds
    everyone = judged(plan, model=str(folder))["downloads_complete"]
    assert everyone.found[0].endswith("complete here: a")


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
    assert verification.holds
    verdicts = {verdict.name: verdict for verdict in verification.verdicts}
    assert all(verdicts[name].holds for name in ("plan_is_whole", "cover_everything", "downloads_complete"))
    claim = "each slice fits its node's memory, by the plan's own figures"
    assert verdicts["memory_in_proportion"].claim == claim
    download = verification.nodes[0].download
    assert download.is_complete
    assert len(download.repository.sizes) == len(list(llama.iterdir()))
    everything = sum(path.stat().st_size for path in llama.iterdir())
    assert download.repository.size_bytes == everything
    assert download.reduction == pytest.approx(1 - download.size_bytes / everything)
    assert failing(plan, nodes=["b"], model=str(folder)).keys() == {"downloads_complete"}


def test_a_nodes_machine_finds_what_is_wrong_as_far_as_it_can_know(
    node_side: tuple[PartitionPlan, Path],
) -> None:
    plan, folder = node_side
    last_tensors = encode(plan)["slices"][1]["files"][-1]["tensors"]

    def faults_of(change: Callable[[list[dict[str, Any]]], object]) -> dict[str, str]:
        return failing(changed(plan, change), nodes=["a"], model=str(folder))

    assert "does not lie at bytes" in faults_of(move_a_tensor)["plan_is_whole"]
    faults = faults_of(lambda slices: slices[1]["files"][-1]["tensors"].pop())
    assert faults["cover_everything"] == f"no node holds {last_tensors[-1][0]}"
    new = ["model.layers.5.new", 0, 8]
    faults = faults_of(lambda slices: slices[1]["files"][-1]["tensors"].append(new))
    assert "model.layers.5.new, which the checkpoint lacks" in faults["plan_is_whole"]


def test_where_nothing_tells_the_tensors_coverage_is_not_judged(
    node_side: tuple[PartitionPlan, Path],
) -> None:
    plan, folder = node_side
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    verdict = judged(plan, model=str(folder))["cover_everything"]
    assert verdict.holds is None
    assert "neither headers nor an index file list" in verdict.found[0]


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
    fault = failing(plan, slices=slices)["slices_as_planned"]
    assert f"expected text, found 7 @ $.tensors['{NORM}']" in fault
    path.write_text(json.dumps({**values, "tensors": [NORM]}))
    assert "holds no slice" in failing(plan, slices=slices)["slices_as_planned"]


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


@pytest.mark.parametrize(
    ("layers", "text"),
    [(range(10), "0-9"), ([0, 1, 2, 3, 7], "0-3, 7"), ([5], "5"), ([1, 3, 4], "1, 3-4"), ([], "none")],
)
def test_layers_are_rendered_as_runs(layers: Sequence[int], text: str) -> None:
    assert _format_layers(layers) == text
