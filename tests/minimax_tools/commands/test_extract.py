from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.cli import mm2_split
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.slices.source import open_source

Run = Callable[..., Any]


@pytest.fixture
def plan_file(toy: Path, tmp_path: Path) -> Path:
    source = open_source(str(toy))
    plan = source.divide(
        planner="manual",
        nodes=[Node.parse("a:memory=1GB,layers=0:1"), Node.parse("b:memory=1GB,layers=1:4")],
        workload=Workload(context_length=16),
    )
    plan.write(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_nodes_slice_goes_to_the_folder_that_was_named(
    command: Run, plan_file: Path, tmp_path: Path
) -> None:
    result = command(mm2_split, "extract", "--plan", plan_file, "--node", "a", "--output", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"a: {tmp_path / 'mine'}, ")
    assert "File 1 (1 of " in result.stderr
    assert TensorIndex.from_folder(tmp_path / "mine").layers == (0,)
    again = command(
        mm2_split, "extract", "--plan", plan_file, "--node", "a", "--output", tmp_path / "mine", "--quiet"
    )
    assert again.exit_code == 0
    assert "was there already, byte for byte" in again.stdout
    assert again.stderr == ""


def test_a_node_that_is_named_twice_goes_where_it_goes_named_once(
    command: Run, plan_file: Path, tmp_path: Path
) -> None:
    nodes = ("--node", "a", "--node", "a")
    result = command(mm2_split, "extract", "--plan", plan_file, *nodes, "--output", tmp_path / "mine")
    assert result.stdout.startswith(f"a: {tmp_path / 'mine'}, ")


def test_all_slices_go_to_model_shards(
    command: Run, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(mm2_split, "extract", "--plan", plan_file, "--all-nodes", "--json", "--digests")
    assert result.exit_code == 0, result.output
    slices = json.loads(result.stdout)["slices"]
    assert [(slice_["node"], slice_["folder"], slice_["layers"]) for slice_ in slices] == [
        ("a", "model_shards/a", [0, 1]),
        ("b", "model_shards/b", [1, 4]),
    ]
    for slice_ in slices:
        index = TensorIndex.from_folder(Path(slice_["folder"]))
        assert (len(index), sum(entry.size_bytes for entry in index.entries.values())) == (
            slice_["num_tensors"],
            slice_["size_bytes"],
        )
        described = json.loads((Path(slice_["folder"]) / "slice.json").read_text())
        assert all(len(digest) == 64 for digest in described["tensors"].values())


def test_a_state_dict_is_written_on_request(command: Run, plan_file: Path, tmp_path: Path) -> None:
    words = (
        "extract",
        "--plan",
        plan_file,
        "--node",
        "b",
        "--output",
        tmp_path / "b",
        "--format",
        "pth",
        "--json",
    )
    result = command(mm2_split, *words)
    assert json.loads(result.stdout)["slices"][0]["files"] == ["model.pth"]
    assert "lm_head.weight" in torch.load(tmp_path / "b" / "model.pth", weights_only=True)


def test_the_checkpoint_may_lie_elsewhere_than_the_plan_says(
    command: Run, toy: Path, plan_file: Path, tmp_path: Path
) -> None:
    plan = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**plan, "model": "nobody/has-this"}))
    words = ("extract", "--plan", plan_file, "--node", "a", "--output", tmp_path / "a", "--model", toy)
    assert command(mm2_split, *words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        ((), 2, "name the slices to cut"),
        (("--node", "a", "--all-nodes"), 2, "expected --node NAME or --all-nodes"),
        (("--node", "z"), 2, "no node 'z'"),
        (("--node", "a", "--shard-size", "12"), 2, "expected a size"),
        (("--node", "a", "--model", "."), 3, "is not here"),
        (("--all-nodes", "--model", "."), 3, "no checkpoint at ."),
    ],
)
def test_what_cannot_be_done_is_told(
    words: tuple[str, ...],
    exit_code: int,
    message: str,
    command: Run,
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(mm2_split, "extract", "--plan", plan_file, *words)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert not (tmp_path / "model_shards").exists()


def test_all_slices_are_cut_only_along_a_plan_that_is_whole(
    command: Run, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = json.loads(plan_file.read_text())
    lost = next(
        tensor
        for file in plan["slices"][1]["files"]
        for tensor in file["tensors"]
        if tensor[0].endswith("q_proj.weight")
    )
    for file in plan["slices"][1]["files"]:
        file["tensors"] = [tensor for tensor in file["tensors"] if tensor != lost]
    plan_file.write_text(json.dumps(plan))
    result = command(mm2_split, "extract", "--plan", plan_file, "--all-nodes")
    assert result.exit_code == 3
    assert f"node b lacks {lost[0]}" in result.stderr
    assert not (tmp_path / "model_shards").exists()


@pytest.fixture
def names_file(toy: Path, tmp_path: Path) -> Path:
    """A plan of names: the toy's layers 0 and 1 on one node, all other tensors on another."""
    names = TensorIndex.from_folder(toy).names
    first = [name for name in names if name.startswith(("model.layers.0.", "model.layers.1."))]
    plan = {"node_001": {"layer_names": first, "total_compute": 100.0, "compute_utilization": 0.5}}
    plan |= {"node_002": [name for name in names if name not in first]}
    (tmp_path / "names.json").write_text(json.dumps(plan))
    return tmp_path / "names.json"


def test_a_plan_of_names_is_cut_into_state_dicts(
    command: Run, names_file: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("extract", "--plan-of-names", names_file, "--model", toy, "--all-nodes", "--json", "--quiet")
    result = command(mm2_split, *words)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [(slice_["node"], slice_["files"], slice_["layers"]) for slice_ in record["slices"]] == [
        ("node_001", ["model.pth"], None),
        ("node_002", ["model.pth"], None),
    ]
    # mm2-split verify takes plans of stages alone.
    assert record["next"] == []
    loaded = [torch.load(tmp_path / "model_shards" / node / "model.pth", weights_only=True) for node in NODES]
    assert sorted([*loaded[0], *loaded[1]]) == sorted(TensorIndex.from_folder(toy).names)


NODES = ("node_001", "node_002")


def test_a_node_of_a_plan_of_names_may_be_safetensors(
    command: Run, names_file: Path, toy: Path, tmp_path: Path
) -> None:
    words = ("--plan-of-names", names_file, "--model", toy, "--node", "node_001", "--format", "safetensors")
    result = command(mm2_split, "extract", *words, "--output", tmp_path / "mine", "--quiet")
    assert result.exit_code == 0, result.output
    assert TensorIndex.from_folder(tmp_path / "mine").layers == (0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--node", "node_001"), "name the plan in one way"),
        (("--plan-of-names", "NAMES", "--plan", "NAMES", "--node", "node_001"), "name the plan in one way"),
        (("--plan-of-names", "NAMES", "--node", "node_001"), "expected --model FOLDER"),
        (("--plan-of-names", "NAMES", "--model", "TOY", "--node", "node_003"), "no node 'node_003'"),
    ],
)
def test_a_plan_of_names_that_cannot_be_cut_is_told(
    words: tuple[str, ...], message: str, command: Run, names_file: Path, toy: Path
) -> None:
    meant = {"NAMES": str(names_file), "TOY": str(toy)}
    result = command(mm2_split, "extract", *(meant.get(word, word) for word in words))
    assert result.exit_code == 2
    assert message in result.stderr


def test_all_nodes_of_a_plan_of_names_are_cut_only_if_it_is_whole(
    command: Run, names_file: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = json.loads(names_file.read_text())
    lost = plan["node_002"].pop()
    names_file.write_text(json.dumps(plan))
    words = ("--plan-of-names", names_file, "--model", toy, "--all-nodes")
    result = command(mm2_split, "extract", *words)
    assert result.exit_code == 2
    assert f"{lost} is not assigned" in result.stderr
    assert not (tmp_path / "model_shards").exists()


def test_what_is_no_plan_is_refused(command: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    result = command(mm2_split, "extract", "--plan", tmp_path / "plan.json", "--all-nodes")
    assert result.exit_code == 2
    assert "is no plan" in result.stderr
