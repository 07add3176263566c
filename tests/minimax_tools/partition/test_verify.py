from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.checkpoint.index import INDEX_FILE, TensorIndex
from minimax_tools.cli import mm2_split
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.extract import cut_slice
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan, make_plan
from minimax_tools.partition.read_record import RECORDS_FOLDER, ReadRecord, read_records
from minimax_tools.partition.slice_file import SliceDescription
from minimax_tools.partition.slice_folder import write_slice
from minimax_tools.partition.source import open_source
from minimax_tools.partition.verify import Verification, verify
from minimax_tools.span import Span

Command = Callable[..., click.testing.Result]

_SCRIPT = Path(__file__).parents[3] / "scripts" / "verify_slice_loading.py"
MIB = 1 << 20
NAMES = (
    "plan_is_whole",
    "nodes_differ",
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


def make(toy: Path, nodes: list[Node], *, planner: str = "memory") -> PartitionPlan:
    source = open_source(str(toy))
    return make_plan(
        model=str(toy),
        config=source.config,
        architecture=source.architecture,
        tensors=source.tensors,
        folder=source.folder,
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
    """What a run would write, in its capture directory."""
    for slice_ in plan.slices:
        sizes = {tensor.name: tensor.size_bytes for tensor in slice_.tensors}
        record = ReadRecord.of(slice_.node.name, sizes, bytes_read=sum(sizes.values()))
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
    assert all(verdict.holds for verdict in verification.verdicts)
    assert verification.holds


def test_what_cannot_be_judged_without_slices_and_records_is_said_and_no_failure(plan: PartitionPlan) -> None:
    verification = verify(plan)
    unjudged = {verdict.name for verdict in verification.verdicts if verdict.holds is None}
    assert unjudged == {"slices_as_planned", "digests_match", "reads_match"}
    assert verification.holds


def test_a_slice_that_holds_a_foreign_tensor_fails(plan: PartitionPlan, slices: Path, toy: Path) -> None:
    with open_source(str(toy)).open() as reader:
        foreign = reader.read(LAYER_3_NORM)
    rewrite(slices / "a", lambda tensors: tensors.update({LAYER_3_NORM: foreign}))
    faults = failing(verify(plan, slices=slices))
    assert faults.keys() == {"overlap_nowhere", "slices_as_planned", "reads_match"}
    assert faults["overlap_nowhere"] == f"{LAYER_3_NORM} is on a and b"
    assert faults["slices_as_planned"] == f"a holds {LAYER_3_NORM}, which is not its"


def test_a_slice_that_lacks_a_tensor_fails(plan: PartitionPlan, slices: Path) -> None:
    rewrite(slices / "b", lambda tensors: tensors.pop(NORM))
    faults = failing(verify(plan, slices=slices))
    assert faults["cover_everything"] == f"no node holds {NORM}"
    assert faults["slices_as_planned"] == f"b lacks {NORM}"
    assert f"b never opened {NORM}" in faults["reads_match"]


def test_two_equal_slices_fail(plan: PartitionPlan, slices: Path) -> None:
    shutil.rmtree(slices / "b")
    shutil.copytree(slices / "a", slices / "b")
    faults = failing(verify(plan, slices=slices))
    assert faults["nodes_differ"].startswith("a and b hold the same 619 tensors")
    assert "slice.json says of its node: a, the plan: b" in faults["slices_as_planned"]
    assert faults.keys() >= {"cover_everything", "overlap_nowhere"}


def test_a_slice_with_the_whole_model_fails(plan: PartitionPlan, slices: Path, toy: Path) -> None:
    everything = {
        name: tensor for file in toy.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    rewrite(slices / "b", lambda tensors: tensors.update(everything))
    assert failing(verify(plan, slices=slices))["nobody_holds_the_whole"] == "b holds all 827 tensors"


def test_one_node_may_hold_the_whole(toy: Path) -> None:
    verification = verify(make(toy, [Node(name="only", memory_bytes=2_000 * MIB)]))
    assert verification.holds
    assert {verdict.name: verdict.holds for verdict in verification.verdicts}["nobody_holds_the_whole"]


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
    assert judged["digests_match"].claim.startswith("of 827 tensors 0 have their source's bytes, 827 those")
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


def test_a_plan_with_a_wrong_place_fails(plan: PartitionPlan) -> None:
    values = plan.to_values()
    values["slices"][0]["files"][0]["tensors"][0][1] += 2
    assert failing(verify(PartitionPlan.from_values(values))).keys() == {"plan_is_whole"}


def test_a_node_too_small_for_its_slice_fails(plan: PartitionPlan) -> None:
    values = plan.to_values()
    values["slices"][1]["memory_bytes"] = 1 * MIB
    faults = failing(verify(PartitionPlan.from_values(values)))
    assert faults["memory_in_proportion"].startswith("b has 1.0 MB and needs")


def test_layers_against_the_memory_fail_where_the_plan_divides_by_it(toy: Path) -> None:
    nodes = [
        Node(name="large", memory_bytes=900 * MIB, layers=Span(0, 1)),
        Node(name="small", memory_bytes=100 * MIB, layers=Span(1, 4)),
    ]
    by_hand = make(toy, nodes, planner="manual")
    assert verify(by_hand).holds
    faults = failing(verify(replace(by_hand, planner="memory")))
    assert faults == {
        "memory_in_proportion": "small has 2.6 layers more than its share of the memory, while large has 2.6 less "
        "and room for one"
    }


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
    assert found == f"a opened lm_head.weight, which is not its | a never opened {good.tensors[0]}"


def test_a_node_without_a_record_fails_beside_those_that_have_one(plan: PartitionPlan, records: Path) -> None:
    (records / RECORDS_FOLDER / "b.json").unlink()
    assert failing(verify(plan, records=records))["reads_match"] == "b wrote no record of what it read"


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
def run(plan: PartitionPlan, tmp_path: Path) -> Callable[..., click.testing.Result]:
    """Runs `mm2-split verify` on the plan, in an environment and an encoding."""
    plan.write(tmp_path / "plan.json")

    def run_it(*arguments: object, charset: str = "utf-8", **environment: str | None) -> click.testing.Result:
        words = ["verify", "--plan", str(tmp_path / "plan.json"), *map(str, arguments)]
        runner = click.testing.CliRunner(charset=charset)
        return runner.invoke(mm2_split, words, env={"DEBUG": None, **environment}, catch_exceptions=False)

    return run_it


def sections(text: str) -> dict[str, str]:
    """The text of each section by its title; of the first node where there are several."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if "===" in line:
            title = line.split("===")[1].strip()
            found[title] = []
        elif title:
            found[title].append(line)
    return {title: "\n".join(lines).strip() for title, lines in found.items()}


def test_debug_11_shows_every_section_of_a_node(
    run: Any, plan: PartitionPlan, slices: Path, toy: Path
) -> None:
    result = run("--slices", slices, "--node", "b", DEBUG="11")
    assert result.exit_code == 0, result.output
    found = sections(result.stdout)
    assert list(found) == [
        "NODE SLICE ASSIGNMENT VERIFICATION",
        "SLICE LOADING VERIFICATION",
        "DOWNLOAD VERIFICATION",
        "DOWNLOAD COMPLETED VERIFICATION",
        "RUNTIME SLICE VERIFICATION",
        "VERDICTS",
    ]
    assert (
        found["NODE SLICE ASSIGNMENT VERIFICATION"]
        == f"""\
🖥️  Node ID: b
📊 Model: {toy}
🧩 Total layers: 4
🔗 Partition index: 1
👥 Active nodes: 2

📋 COMPLETE PARTITION MAP:
   ⏳ Node 0: a
      Layers: 0-2 (3 layers, 75.0%)
      Memory weight: [0.000, 0.750)
   ✅ Node 1: b
      Layers: 3-3 (1 layers, 25.0%)
      Memory weight: [0.750, 1.000)
   Total layers assigned: 4 of 4

🎯 THIS NODE WILL LOAD:
   Model: {toy}
   Layers: 3-3
   Layer count: 1 / 4
   Beside them: the final norm and the lm_head
   Percentage: 25.0%
   Memory savings: 75.0% reduction per node"""
    )

    weights = plan.slice_of("b").files
    patterns = [*weights, "*.json", "*.model", "*.txt", "*.jinja"]
    assert (
        found["SLICE LOADING VERIFICATION"]
        == f"""\
🎯 Shard: {toy} layers 3-3
🖥️  Node: b
📊 Layer range: 3-3 (1 layers)
🧩 Tensors: {len(plan.slice_of("b").tensors)}
🎯 Allow patterns: {patterns}"""
    )

    files = [*weights, *sorted(path.name for path in toy.glob("*.json"))]
    sizes = {name: (toy / name).stat().st_size for name in files}
    full = sum(path.stat().st_size for path in toy.iterdir())
    part = sum(sizes.values())
    lines = [f"   {i:2}. 📄 {name} ({sizes[name] / 1e6:.2f} MB)" for i, name in enumerate(files, start=1)]
    download = found["DOWNLOAD VERIFICATION"].splitlines()
    assert download[:5] == [
        f"📁 Total files in repo: {len(list(toy.iterdir()))}",
        f"🎯 Files after slice filtering: {len(files)}",
        f"💾 Full repo size: {full / 1e6:.2f} MB",
        f"💾 This slice size: {part / 1e6:.2f} MB",
        f"🎯 Size reduction: {1 - part / full:.1%}",
    ]
    assert download[-len(lines) - 1 :] == ["📋 FILES FOR THIS SLICE:", *lines]

    completed = found["DOWNLOAD COMPLETED VERIFICATION"].splitlines()
    assert completed[1] == f"📁 Files downloaded: {len(files)}"
    assert completed[2 : 2 + len(files)] == [f"   📄 {n}: {sizes[n] / 1e6:.2f} MB ✅" for n in files]
    assert completed[-4:] == [
        "💾 DOWNLOAD SUMMARY:",
        f"   Expected: {part / 1e6:.2f} MB",
        f"   Actual:   {part / 1e6:.2f} MB",
        "   Status:   ✅ Complete",
    ]

    runtime = found["RUNTIME SLICE VERIFICATION"].splitlines()
    assert runtime[:4] == ["🖥️  Node: b", f"📊 Model: {toy}", "🧩 Loaded layers: 3-3", "🎯 Layer count: 1 / 4"]
    slice_bytes = sum(tensor.size_bytes for tensor in plan.slice_of("b").tensors)
    assert f"💾 Bytes read: {slice_bytes}" in runtime
    assert "🎯 Bytes read over slice: 1.00" in runtime
    verdicts = found["VERDICTS"].splitlines()
    assert [line.split()[1].rstrip(":") for line in verdicts] == list(NAMES)


def test_verbose_shows_the_same_as_debug_and_less_debug_a_summary(run: Any) -> None:
    detailed = run("--verbose").stdout
    assert detailed == run(DEBUG="11").stdout == run(DEBUG="99").stdout
    assert "Nothing was loaded yet" in detailed
    for level in ("10", "", "yes"):
        summary = run(DEBUG=level).stdout
        assert "===" not in summary
        assert summary.splitlines()[0].startswith("a: layers 0-2 (3 of 4, 75.0%) and the embedding, ")
        assert len(summary.splitlines()) == 2 + len(NAMES)


def test_a_terminal_that_is_no_utf_8_gets_no_pictures(run: Any, slices: Path) -> None:
    result = run("--verbose", "--slices", slices, charset="ascii")
    assert result.stdout.isascii()
    assert "   [ok] Node 0: a\n" in result.stdout
    assert "\nNode ID: a\n" in result.stdout
    assert "   Status:   [ok] Complete" in result.stdout
    assert "[ok] digests_match" in result.stdout


def test_a_failed_verdict_exits_with_1_and_says_what_it_is(run: Any, slices: Path) -> None:
    shutil.rmtree(slices / "b")
    result = run("--slices", slices)
    assert result.exit_code == 1
    assert (
        "❌ cover_everything: NOT SO that all nodes together hold the whole model: no node holds"
        in result.stdout
    )


def test_incomplete_downloads_are_shown(run: Any, plan: PartitionPlan, toy: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(toy, tmp_path / "toy")
    lost = plan.slice_of("b").files[-1]
    (folder / lost).unlink()
    result = run("--verbose", "--node", "b", "--model", folder)
    assert result.exit_code == 1
    assert f"   📄 {lost}: not here of {(toy / lost).stat().st_size / 1e6:.2f} MB ❌" in result.stdout
    assert "   Status:   ❌ Incomplete" in result.stdout


def test_json_holds_what_the_sections_show(
    run: Any, plan: PartitionPlan, slices: Path, records: Path
) -> None:
    values = json.loads(run("--slices", slices, "--records", records, "--json").stdout)
    assert values["holds"] is True
    assert values["total_layers_assigned"] == values["num_hidden_layers"] == 4
    assert [node["layers"] for node in values["partition_map"]] == [[0, 3], [3, 4]]
    assert [node["memory_weight"] for node in values["partition_map"]] == [[0.0, 0.75], [0.75, 1.0]]
    assert [verdict["name"] for verdict in values["verdicts"]] == list(NAMES)
    node = values["nodes"][1]
    assert node["reads"]["bytes_read_over_slice"] == 1.0
    assert node["reads"]["num_tensors"] == len(plan.slice_of("b").tensors)
    assert node["runtime"] == {"loaded_layers": [3], "is_seen": True}
    assert node["download"]["is_complete"] is True
    assert set(node["digests"]) == set(plan.slice_of("b").names)
    assert all(len(digest) == 64 for digest in node["digests"].values())


def test_the_seeds_script_shows_every_section(
    plan: PartitionPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.write(tmp_path / "plan.json")
    monkeypatch.setattr(sys, "argv", ["verify_slice_loading.py", "--plan", str(tmp_path / "plan.json")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(_SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "===" in line]) == 11
