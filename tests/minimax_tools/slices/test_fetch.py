from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.transfer import NoRangesError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import locked_folder
from minimax_tools.partition.cost import Workload, measure_costs
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan, make_plan
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.fetch import fetch_slice, fetch_slice_ranges
from minimax_tools.slices.source import open_source
from minimax_tools.slices.verify import verify

MODEL = "owner/toy"
MIB = 1 << 20


@pytest.fixture
def access(hub: Any, toy: Path, tmp_path: Path) -> HubAccess:
    hub.add(MODEL, toy)
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache", first_delay_s=0.01, timeout_s=60)


def make(access: HubAccess, *, headers: bool = True) -> PartitionPlan:
    source = open_source(MODEL, headers=headers, access=access)
    return make_plan(
        model=source.model,
        architecture=source.architecture,
        tensors=source.tensors,
        folder=source.folder if source.entries is not None else None,
        planner="memory",
        nodes=[Node(name="a", memory_bytes=800 * MIB), Node(name="b", memory_bytes=200 * MIB)],
        cost=measure_costs(source.tensors, source.architecture, source.config, Workload(context_length=64)),
    )


def finetune(plan: PartitionPlan, toy: Path, folder: Path) -> Path:
    """The toy with other bytes in node b's files."""
    shutil.copytree(toy, folder)
    for file in plan.slice_of("b").files:
        content = bytearray((folder / file).read_bytes())
        content[-1] ^= 1
        (folder / file).write_bytes(content)
    return folder


def asked_files(hub: Any) -> set[str]:
    return {request.file for request in hub.asked("GET", ".safetensors")}


def asked_bytes(hub: Any) -> int:
    bounds = [request.range.removeprefix("bytes=").split("-") for request in hub.asked("GET", ".safetensors")]
    return sum(int(stop) - int(start) + 1 for start, stop in bounds)


@pytest.mark.parametrize("headers", [True, False])
def test_only_the_files_that_hold_the_slice_are_fetched(
    toy: Path, hub: Any, access: HubAccess, headers: bool
) -> None:
    plan = make(access, headers=headers)
    hub.forget()
    fetched = fetch_slice(plan, "b", access=access)
    index = TensorIndex.from_folder(toy)
    held = {index[name].file.name for name in plan.slice_of("b").names}
    assert asked_files(hub) == held
    assert held < {path.name for path in toy.glob("*.safetensors")}
    assert {name for name in fetched.files if name.endswith(".safetensors")} == held
    assert {"config.json", "tokenizer.json"} < set(fetched.files)
    assert all((fetched.folder / name).read_bytes() == (toy / name).read_bytes() for name in fetched.files)


def test_what_was_fetched_is_complete_offline_and_what_was_not_is_not(hub: Any, access: HubAccess) -> None:
    plan = make(access)
    fetch_slice(plan, "b", access=access)
    offline = dataclasses.replace(access, is_offline=True)
    hub.forget()
    assert fetch_slice(plan, "b", access=offline).size_bytes > 0
    with pytest.raises(CheckpointError, match="and the hub is not asked"):
        fetch_slice(plan, "a", access=offline)
    verification = verify(plan, nodes=["b"], access=offline)
    assert verification.nodes[0].download.is_complete
    assert not hub.log


def test_an_interrupted_file_is_resumed_and_a_wrong_hash_fetched_anew(
    toy: Path, hub: Any, hub_module: ModuleType, access: HubAccess
) -> None:
    plan = make(access)
    hub.plant("GET", "/content/", hub_module.Fault(after_bytes=MIB))
    hub.plant("GET", "/content/", hub_module.Fault(is_corrupt=True))
    fetched = fetch_slice(plan, "b", access=access)
    assert all((fetched.folder / name).read_bytes() == (toy / name).read_bytes() for name in fetched.files)


def test_a_file_that_stays_corrupt_is_an_error(hub: Any, hub_module: ModuleType, access: HubAccess) -> None:
    plan = make(access)
    hub.plant("GET", "/content/", hub_module.Fault(is_corrupt=True), times=99)
    with pytest.raises(CheckpointError, match="came corrupted twice"):
        fetch_slice(plan, "b", access=access)


def test_a_folder_is_found_and_not_fetched(toy: Path, access: HubAccess) -> None:
    fetched = fetch_slice(make(access), "a", model=str(toy))
    assert fetched.folder == toy


def test_a_plan_of_another_model_is_refused(toy: Path, hub: Any, access: HubAccess) -> None:
    plan = make(access)
    files = {path.name: path.read_bytes() for path in toy.iterdir()}
    files["only.safetensors"] = files.pop(plan.slice_of("b").files[0])
    hub.add("owner/other", files)
    with pytest.raises(CheckpointError, match=r"owner/other at revision '[0-9a-f]{40}' has no model-0000"):
        fetch_slice(plan, "b", model="owner/other", access=access)


def test_by_ranges_only_the_slice_is_fetched_and_it_is_the_sources_bytes(
    toy: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    hub.forget()
    output = tmp_path / "shards" / "b"
    fetched = fetch_slice_ranges(plan, "b", output, access=access)
    slice_bytes = sum(tensor.size_bytes for tensor in plan.slice_of("b").tensors)
    assert fetched.bytes_fetched == fetched.size_bytes == slice_bytes
    index = TensorIndex.from_folder(toy)
    headers_bytes = sum(path.stat().st_size for path in index.files) - sum(
        entry.size_bytes for entry in index.entries.values()
    )
    assert asked_bytes(hub) == slice_bytes + headers_bytes
    assert not list((access.cache_dir).rglob("*.safetensors"))
    assert [path.name for path in output.parent.iterdir()] == ["b"]

    there = {name: tensor for file in toy.glob("*.safetensors") for name, tensor in load_file(file).items()}
    here = {name: tensor for file in output.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(here) == set(plan.slice_of("b").names)
    assert all(torch.equal(here[name].view(torch.uint8), there[name].view(torch.uint8)) for name in here)
    assert SliceDescription.read(output).source == plan.model
    proof = verify(plan, nodes=["b"], model=str(toy), slices=output.parent)
    assert proof.holds


def test_a_slice_that_is_there_is_not_fetched_again_and_another_is_refused(
    hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    plan, output = make(access), tmp_path / "b"
    fetch_slice_ranges(plan, "b", output, access=access)
    hub.forget()
    assert fetch_slice_ranges(plan, "b", output, access=access).bytes_fetched == 0
    assert not hub.asked("GET", ".safetensors")
    with pytest.raises(
        UsageError, match=r"expected a new or empty folder, or the slice of node a.*its node: b"
    ):
        fetch_slice_ranges(plan, "a", output, access=access)


def test_a_slice_of_another_model_or_commit_is_not_taken_for_this_one(
    toy: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    plan, output = make(access), tmp_path / "b"
    fetch_slice_ranges(plan, "b", output, access=access)
    finetuned = finetune(plan, toy, tmp_path / "finetuned")
    hub.add("other/finetune", finetuned)
    with pytest.raises(UsageError, match=f"of other/finetune@.*found one cut from {plan.model}"):
        fetch_slice_ranges(plan, "b", output, model="other/finetune", access=access)
    (tmp_path / "slices").mkdir()
    shutil.copytree(output, tmp_path / "slices" / "b")
    assert verify(plan, nodes=["b"], slices=tmp_path / "slices", access=access).holds
    other = verify(plan, nodes=["b"], model="other/finetune", slices=tmp_path / "slices", access=access)
    faults = {verdict.name: verdict.found for verdict in other.verdicts if verdict.holds is False}
    assert faults.keys() == {"slices_as_planned"}
    assert faults["slices_as_planned"][0].startswith(f"b was cut from {plan.model}, not from other/")
    hub.add(MODEL, finetuned)
    assert fetch_slice_ranges(plan, "b", output, access=access).bytes_fetched == 0
    with pytest.raises(UsageError, match="found one cut from"):
        fetch_slice_ranges(plan, "b", output, model=MODEL, access=access)


def test_what_is_fetched_and_verified_is_the_commit_that_was_planned(
    toy: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    planned = hub.add(MODEL, toy).commit
    assert plan.model == f"{MODEL}@{planned}"
    moved = finetune(plan, toy, tmp_path / "finetuned")
    assert hub.add(MODEL, moved).commit != planned
    hub.forget()
    fetched = fetch_slice(plan, "b", access=access)
    assert all((fetched.folder / name).read_bytes() == (toy / name).read_bytes() for name in fetched.files)
    fetch_slice_ranges(plan, "b", tmp_path / "slices" / "b", access=access)
    assert not [one for one in hub.log if "/main" in one.path]
    assert verify(plan, nodes=["b"], slices=tmp_path / "slices", access=access).holds
    assert verify(plan, nodes=["b"], access=access).model == plan.model
    offline = dataclasses.replace(access, is_offline=True)
    assert verify(plan, nodes=["b"], access=offline).holds
    assert make(offline).model == plan.model
    assert open_source(MODEL, access=access).model == f"{MODEL}@{hub.add(MODEL, moved).commit}"


def test_two_processes_do_not_fetch_into_one_folder(access: HubAccess, tmp_path: Path) -> None:
    plan = make(access)
    working_folder = tmp_path / ".b.fetched"
    working_folder.mkdir()
    with (
        locked_folder(working_folder),
        pytest.raises(CheckpointError, match="another process fetches into .*b.fetched"),
    ):
        fetch_slice_ranges(plan, "b", tmp_path / "b", access=access)
    assert not (tmp_path / "b").exists()
    assert fetch_slice_ranges(plan, "b", tmp_path / "b", access=access).bytes_fetched
    assert not working_folder.exists()
    # As a run leaves it that was killed once the slice was there.
    working_folder.mkdir()
    assert fetch_slice_ranges(plan, "b", tmp_path / "b", access=access).bytes_fetched == 0
    assert not working_folder.exists()


def test_ranges_that_break_off_are_continued(
    toy: Path, hub: Any, hub_module: ModuleType, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    hub.plant("GET", "/content/", hub_module.Fault(after_bytes=300_000, ending="reset"), times=3)
    fetch_slice_ranges(plan, "b", tmp_path / "b", access=access)
    assert verify(plan, nodes=["b"], model=str(toy), slices=tmp_path).holds


def test_a_fetch_that_was_broken_off_goes_on_with_the_next_run(
    toy: Path, hub: Any, hub_module: ModuleType, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    one_at_a_time = dataclasses.replace(access, num_workers=1)
    last = plan.slice_of("b").files[-1]
    # The headers are read before.
    hub.plant("GET", last, hub_module.Fault(), times=4)
    hub.plant("GET", last, hub_module.Fault(status=503), times=5)
    with pytest.raises(CheckpointError, match="does not answer, or breaks off"):
        fetch_slice_ranges(plan, "b", tmp_path / "b", access=one_at_a_time)
    assert not (tmp_path / "b").exists()
    fetched = fetch_slice_ranges(plan, "b", tmp_path / "b", access=access)
    assert fetched.bytes_fetched is not None
    assert 0 < fetched.bytes_fetched < fetched.size_bytes
    assert verify(plan, nodes=["b"], model=str(toy), slices=tmp_path).holds


DAMAGED_LINES = (
    *(b"3", b"[1]", b"[]", b'["0", 1]', b"null", b'{"a": 1, "b": 2, "c": 3}', b'["0", null, [3]]', b"\xff"),
)


@pytest.mark.parametrize("lines", [DAMAGED_LINES[:-1], DAMAGED_LINES[-1:]], ids=["values", "bytes"])
def test_damaged_line_in_the_list_of_pieces_counts_for_nothing(
    toy: Path, hub: Any, hub_module: ModuleType, access: HubAccess, tmp_path: Path, lines: tuple[bytes, ...]
) -> None:
    plan = make(access)
    last = plan.slice_of("b").files[-1]
    hub.plant("GET", last, hub_module.Fault(), times=4)
    hub.plant("GET", last, hub_module.Fault(status=503), times=5)
    with pytest.raises(CheckpointError):
        fetch_slice_ranges(plan, "b", tmp_path / "b", access=dataclasses.replace(access, num_workers=1))
    journals = list(tmp_path.rglob("*.safetensors.fetched"))
    assert journals
    for journal in journals:
        journal.write_bytes(journal.read_bytes() + b"\n".join(lines) + b"\n")
    fetched = fetch_slice_ranges(plan, "b", tmp_path / "b", access=access)
    assert fetched.bytes_fetched is not None
    assert 0 < fetched.bytes_fetched < fetched.size_bytes
    assert verify(plan, nodes=["b"], model=str(toy), slices=tmp_path).holds


def test_what_was_begun_of_another_commit_is_thrown_away(
    toy: Path, hub: Any, hub_module: ModuleType, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    last = plan.slice_of("b").files[-1]
    hub.plant("GET", last, hub_module.Fault(), times=4)
    hub.plant("GET", last, hub_module.Fault(status=503), times=5)
    with pytest.raises(CheckpointError):
        fetch_slice_ranges(plan, "b", tmp_path / "b", access=dataclasses.replace(access, num_workers=1))
    changed = finetune(plan, toy, tmp_path / "changed")
    hub.add(MODEL, changed)
    fetch_slice_ranges(plan, "b", tmp_path / "b", model=MODEL, access=access)
    assert verify(plan, nodes=["b"], model=str(changed), slices=tmp_path).holds


def test_a_server_without_ranges_says_to_fetch_whole_files(
    hub: Any, hub_module: ModuleType, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    hub.plant("GET", "/content/", hub_module.Fault(ignores_range=True), times=99)
    with pytest.raises(NoRangesError, match="leave out --byte-ranges"):
        fetch_slice_ranges(plan, "b", tmp_path / "b", access=access)
    assert list(tmp_path.glob("b*")) == []


def test_a_plan_whose_places_are_not_the_hubs_is_refused(
    toy: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    values = encode(make(access))
    values["slices"][1]["files"][0]["tensors"][0][1] += 2
    with pytest.raises(CheckpointError, match="does not lie at bytes"):
        fetch_slice_ranges(decode(PartitionPlan, values), "b", tmp_path / "b", access=access)


def test_a_folder_has_no_byte_ranges_to_fetch(toy: Path, access: HubAccess, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mm2-split extract"):
        fetch_slice_ranges(make(access), "b", tmp_path / "b", model=str(toy), access=access)
