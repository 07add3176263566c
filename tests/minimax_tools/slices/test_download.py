from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.download import fetch_slice
from minimax_tools.slices.folder import cut_slice, write_slice
from minimax_tools.slices.source import open_source
from minimax_tools.slices.verify import verify

MODEL = "owner/toy"


@pytest.fixture
def access(access: HubAccess, hub: Any, toy: Path) -> HubAccess:
    hub.add(MODEL, toy)
    return access


def make(access: HubAccess, *, headers: bool = True) -> PartitionPlan:
    source = open_source(MODEL, headers=headers, access=access)
    nodes = [Node.parse("a:memory=800MiB"), Node.parse("b:memory=200MiB")]
    return source.divide(planner="memory", nodes=nodes, workload=Workload(context_length=64))


def finetune(plan: PartitionPlan, toy: Path, folder: Path) -> Path:
    """The toy with other bytes in node b's files."""
    shutil.copytree(toy, folder)
    for file in plan.slice_of("b").files:
        content = bytearray((folder / file).read_bytes())
        content[-1] ^= 1
        (folder / file).write_bytes(content)
    return folder


@pytest.mark.parametrize("headers", [True, False])
def test_only_the_files_that_hold_the_slice_are_fetched(
    toy: Path, hub: Any, access: HubAccess, headers: bool
) -> None:
    plan = make(access, headers=headers)
    hub.forget()
    fetched = fetch_slice(plan, "b", access=access)
    index = TensorIndex.from_folder(toy)
    held = {index[name].file.name for name in plan.slice_of("b").names}
    assert {request.file for request in hub.asked("GET", ".safetensors")} == held
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


def test_a_folder_is_found_and_a_plan_of_another_model_refused(
    toy: Path, hub: Any, access: HubAccess
) -> None:
    plan = make(access)
    assert fetch_slice(plan, "a", model=str(toy)).folder == toy
    files = {path.name: path.read_bytes() for path in toy.iterdir()}
    files["only.safetensors"] = files.pop(plan.slice_of("b").files[0])
    hub.add("owner/other", files)
    with pytest.raises(CheckpointError, match=r"owner/other at revision '[0-9a-f]{40}' has no model-0000"):
        fetch_slice(plan, "b", model="owner/other", access=access)


def test_a_slice_of_another_model_is_not_taken_for_this_one(
    toy: Path, hub: Any, access: HubAccess, tmp_path: Path
) -> None:
    plan = make(access)
    source = dataclasses.replace(open_source(str(toy)), model=plan.model)
    write_slice(cut_slice(plan, "b", source), tmp_path / "slices" / "b", with_digests=True)
    assert verify(plan, nodes=["b"], slices=tmp_path / "slices", access=access).holds
    hub.add("other/finetune", finetune(plan, toy, tmp_path / "finetuned"))
    other = verify(plan, nodes=["b"], model="other/finetune", slices=tmp_path / "slices", access=access)
    faults = {verdict.name: verdict.found for verdict in other.verdicts if verdict.holds is False}
    assert faults.keys() == {"slices_as_planned"}
    assert faults["slices_as_planned"][0].startswith(f"b was cut from {plan.model}, not from other/")


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
    assert not [one for one in hub.log if "/main" in one.path]
    assert verify(plan, nodes=["b"], access=access).model == plan.model
    offline = dataclasses.replace(access, is_offline=True)
    assert verify(plan, nodes=["b"], access=offline).holds
    assert make(offline).model == plan.model
    assert open_source(MODEL, access=access).model == f"{MODEL}@{hub.add(MODEL, moved).commit}"
