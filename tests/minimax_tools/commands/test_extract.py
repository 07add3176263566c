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

NODES = ("node_001", "node_002")


@pytest.fixture
def plan_file(toy: Path, tmp_path: Path) -> Path:
    """Layer 0 on a, the others on b."""
    nodes = [Node.parse("a:memory=1GB,layers=0:1"), Node.parse("b:memory=1GB,layers=1:4")]
    plan = open_source(str(toy)).divide(planner="manual", nodes=nodes, workload=Workload(context_length=16))
    plan.write(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def names_file(toy: Path, tmp_path: Path) -> Path:
    """A plan of names: the toy's layers 0 and 1 on one node, all other tensors on another."""
    names = TensorIndex.from_folder(toy).names
    first = [name for name in names if name.startswith(("model.layers.0.", "model.layers.1."))]
    plan = {"node_001": {"layer_names": first, "total_compute": 100.0, "compute_utilization": 0.5}}
    plan |= {"node_002": [name for name in names if name not in first]}
    (tmp_path / "names.json").write_text(json.dumps(plan))
    return tmp_path / "names.json"


@pytest.fixture
def extract(
    command: Run,
    toy: Path,
    plan_file: Path,
    names_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs `mm2-split extract` in the test's folder; PLAN, NAMES and TOY are the paths of these."""
    monkeypatch.chdir(tmp_path)
    meant = {"PLAN": plan_file, "NAMES": names_file, "TOY": toy}
    return lambda *words: command(mm2_split, "extract", *(meant.get(word, word) for word in words))


def test_a_nodes_slice_goes_to_the_folder_that_was_named(extract: Run, tmp_path: Path) -> None:
    # A node that is named twice is one.
    words = ("--plan", "PLAN", "--node", "a", "--node", "a", "--output", str(tmp_path / "mine"))
    result = extract(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"a: {tmp_path / 'mine'}, ")
    assert "File 1 (1 of " in result.stderr
    assert TensorIndex.from_folder(tmp_path / "mine").layers == (0,)
    again = extract(*words, "--quiet")
    assert again.exit_code == 0
    assert "was there already, byte for byte" in again.stdout
    assert again.stderr == ""


def test_all_slices_go_to_model_shards(extract: Run) -> None:
    result = extract("--plan", "PLAN", "--all-nodes", "--json", "--digests")
    assert result.exit_code == 0, result.output
    slices = json.loads(result.stdout)["slices"]
    assert [(slice_["node"], slice_["folder"], slice_["layers"]) for slice_ in slices] == [
        ("a", "model_shards/a", [0, 1]),
        ("b", "model_shards/b", [1, 4]),
    ]
    for slice_ in slices:
        folder = Path(slice_["folder"])
        index = TensorIndex.from_folder(folder)
        assert len(index) == slice_["num_tensors"]
        assert sum(entry.size_bytes for entry in index.entries.values()) == slice_["size_bytes"]
        described = json.loads((folder / "slice.json").read_text())
        assert all(len(digest) == 64 for digest in described["tensors"].values())


def test_a_state_dict_is_written_on_request(extract: Run, tmp_path: Path) -> None:
    result = extract("--plan", "PLAN", "--node", "b", "--output", "b", "--format", "pth", "--json")
    assert json.loads(result.stdout)["slices"][0]["files"] == ["model.pth"]
    assert "lm_head.weight" in torch.load(tmp_path / "b" / "model.pth", weights_only=True)


def test_the_checkpoint_may_lie_elsewhere_than_the_plan_says(extract: Run, plan_file: Path) -> None:
    plan = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps({**plan, "model": "nobody/has-this"}))
    assert extract("--plan", "PLAN", "--node", "a", "--output", "a", "--model", "TOY").exit_code == 0


def test_a_plan_of_names_is_cut_into_state_dicts(extract: Run, toy: Path, tmp_path: Path) -> None:
    result = extract("--plan-of-names", "NAMES", "--model", "TOY", "--all-nodes", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [(slice_["node"], slice_["files"], slice_["layers"]) for slice_ in record["slices"]] == [
        (node, ["model.pth"], None) for node in NODES
    ]
    # mm2-split verify takes plans of stages alone.
    assert record["next"] == []
    loaded = [torch.load(tmp_path / "model_shards" / node / "model.pth", weights_only=True) for node in NODES]
    assert sorted([*loaded[0], *loaded[1]]) == sorted(TensorIndex.from_folder(toy).names)


def test_a_node_of_a_plan_of_names_may_be_safetensors(extract: Run, tmp_path: Path) -> None:
    words = ("--plan-of-names", "NAMES", "--model", "TOY", "--node", "node_001", "--format", "safetensors")
    result = extract(*words, "--output", "mine", "--quiet")
    assert result.exit_code == 0, result.output
    assert TensorIndex.from_folder(tmp_path / "mine").layers == (0, 1)


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("--plan", "PLAN"), 2, "name the slices to cut"),
        (("--plan", "PLAN", "--node", "a", "--all-nodes"), 2, "expected --node NAME or --all-nodes"),
        (("--plan", "PLAN", "--node", "z"), 2, "no node 'z'"),
        (("--plan", "PLAN", "--node", "a", "--shard-size", "12"), 2, "expected a size"),
        (("--plan", "PLAN", "--node", "a", "--model", "."), 3, "is not here"),
        (("--plan", "PLAN", "--all-nodes", "--model", "."), 3, "no checkpoint at ."),
        (("--plan", "empty.json", "--all-nodes"), 2, "is no plan"),
        (("--node", "node_001"), 2, "name the plan in one way"),
        (
            ("--plan-of-names", "NAMES", "--plan", "NAMES", "--node", "node_001"),
            2,
            "name the plan in one way",
        ),
        (("--plan-of-names", "NAMES", "--node", "node_001"), 2, "expected --model FOLDER"),
        (("--plan-of-names", "NAMES", "--model", "TOY", "--node", "node_003"), 2, "no node 'node_003'"),
    ],
)
def test_what_cannot_be_done_is_told(
    words: tuple[str, ...], exit_code: int, message: str, extract: Run, tmp_path: Path
) -> None:
    (tmp_path / "empty.json").write_text("{}")
    result = extract(*words)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert not (tmp_path / "model_shards").exists()


def test_all_slices_are_cut_only_along_a_plan_that_is_whole(
    extract: Run, plan_file: Path, tmp_path: Path
) -> None:
    plan = json.loads(plan_file.read_text())
    files = plan["slices"][1]["files"]
    held = [tensor for file in files for tensor in file["tensors"]]
    lost = next(tensor for tensor in held if tensor[0].endswith("q_proj.weight"))
    for file in files:
        file["tensors"] = [tensor for tensor in file["tensors"] if tensor != lost]
    plan_file.write_text(json.dumps(plan))
    result = extract("--plan", "PLAN", "--all-nodes")
    assert result.exit_code == 3
    assert f"node b lacks {lost[0]}" in result.stderr
    assert not (tmp_path / "model_shards").exists()


def test_all_nodes_of_a_plan_of_names_are_cut_only_if_it_is_whole(
    extract: Run, names_file: Path, tmp_path: Path
) -> None:
    plan = json.loads(names_file.read_text())
    lost = plan["node_002"].pop()
    names_file.write_text(json.dumps(plan))
    result = extract("--plan-of-names", "NAMES", "--model", "TOY", "--all-nodes")
    assert result.exit_code == 2
    assert f"{lost} is not assigned" in result.stderr
    assert not (tmp_path / "model_shards").exists()
