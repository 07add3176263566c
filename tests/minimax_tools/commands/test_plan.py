from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from minimax_tools.cli import mm2_split
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.source import open_source
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

Command = Callable[..., Result]

NODES = ("--node", "big:memory=60MB,tflops=2", "--node", "small:memory=20MB,tflops=1")
TWO_NODES = (*NODES, "--context-length", "64")
COLUMNS = "node holds share stored loaded KV activations memory parameters GFLOPs/token ms/token files"


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A model of which nothing but config.json is here: MiniMax-M2, cut to two layers."""
    config = SyntheticModel.m2()._config()
    config.update(num_hidden_layers=2, attn_type_list=[1, 1], quantization_config={"quant_method": "fp8"})
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_plan_is_drawn_for_people(command: Command, toy: Path) -> None:
    result = command(mm2_split, "plan", "--model", toy, *TWO_NODES, "--node", "tiny:memory=1kB,tflops=1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"{toy}: 4 layers on 2 of 3 nodes, by memory"
    assert " ".join(lines[2].split()) == COLUMNS
    assert lines[3].startswith("big    embedding + layers 0 to 2  75.0%")
    assert "of 60.0 MB (" in lines[3]
    assert lines[4].startswith("small  layer 3 + head             25.0%")
    assert lines[5].startswith("tiny   idle")
    for part in ("embedding", "each of layers 0 to 3", "final norm", "lm_head", "whole model"):
        assert any(line.startswith(part + " ") for line in lines), part
    assert "big bounds the pipeline: " in result.stdout
    assert "\nbig reads model-0000" in result.stdout
    assert len(lines[3]) == len(lines[4])


def test_node_with_room_for_the_head_alone_is_drawn(command: Command, tmp_path: Path) -> None:
    synthesize(
        tmp_path,
        model=SyntheticModel(num_hidden_layers=2),
        dtype=torch.bfloat16,
        shard_size_bytes=None,
        seed=1,
    )
    nodes = ("--node", "a:memory=15210kB", "--node", "b:memory=600kB", "--context-length", "64")
    result = command(mm2_split, "plan", "--model", tmp_path, *nodes)
    assert result.exit_code == 0, result.output
    assert "a     embedding + layers 0 to 1 " in result.stdout
    assert "b     head " in result.stdout


def test_plan_is_written_where_asked_and_nowhere_else(
    command: Command, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(mm2_split, "plan", "--model", toy, *TWO_NODES).exit_code == 0
    assert not list(tmp_path.iterdir())
    result = command(mm2_split, "plan", "--model", toy, *TWO_NODES, "--output", "plan.json")
    assert "Written to plan.json." in result.stdout
    plan = PartitionPlan.read(tmp_path / "plan.json")
    source = open_source(str(toy))
    plan.validate(source.entries, source.architecture, folder=source.folder)
    assert (plan.model, plan.planner) == (str(toy), "memory")


def test_json_tells_nodes_parts_and_the_slowest(command: Command, toy: Path, tmp_path: Path) -> None:
    options = ("--batch-size", 2, "--dtype", "float32", "--planner", "balanced")
    output = tmp_path / "plan.json"
    result = command(mm2_split, "plan", "--model", toy, *TWO_NODES, *options, "--output", output, "--json")
    found = json.loads(result.stdout)
    assert (found["context_length"], found["batch_size"], found["dtype"]) == (64, 2, "float32")
    assert found["plan"] == str(output)
    plan = PartitionPlan.read(output)
    assert [node["node"] for node in found["nodes"]] == [slice_.node.name for slice_ in plan.slices]
    assert sum(node["share_of_layers"] for node in found["nodes"]) == pytest.approx(1)
    for node, slice_ in zip(found["nodes"], plan.slices, strict=True):
        assert node["files"] == list(slice_.files)
        assert node["memory_needed_bytes"] == slice_.cost.memory_bytes <= node["memory_bytes"]
        assert node["seconds_per_token"] == slice_.seconds_per_token
    assert found["slowest_node"] in {"big", "small"}
    assert len(found["layers"]) == 4
    assert found["parts"]["whole model"]["stored_bytes"] == sum(
        node["cost"]["stored_bytes"] for node in found["nodes"]
    )


def test_config_alone_is_enough(command: Command, described: Path, tmp_path: Path) -> None:
    nodes = ("--node", "a:memory=12GB", "--node", "b:memory=12GB")
    output = tmp_path / "plan.json"
    result = command(mm2_split, "plan", "--model", described, *nodes, "--output", output)
    assert result.exit_code == 0, result.output
    assert "this plan is from config.json alone" in result.stdout
    assert "3.669 B" in result.stdout
    assert "give tflops to learn which is the slowest" in result.stdout
    assert {file for slice_ in PartitionPlan.read(output).slices for file in slice_.files} == set()


def test_nodes_come_from_a_file_too(command: Command, toy: Path, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps([{"name": "b", "memory": "60MB", "layers": "1:4"}]))
    nodes = ("--node", "a:memory=60MB,layers=0:1", "--nodes-file", path, "--planner", "manual")
    nodes += ("--context-length", "64")
    found = json.loads(command(mm2_split, "plan", "--model", toy, *nodes, "--json").stdout)
    assert {node["node"]: node["layers"] for node in found["nodes"]} == {"a": [0, 1], "b": [1, 4]}
    assert found["slowest_node"] is None


@pytest.mark.slow
def test_model_on_the_hub_is_planned_before_its_weights_are_here(toy: Path, hub: Any, tmp_path: Path) -> None:
    commit = hub.add("owner/toy", toy).commit
    # huggingface_hub reads its environment once, when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    program = "from minimax_tools.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "--model", "owner/toy", *TWO_NODES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"owner/toy@{commit}: 4 layers on 2 of 2 nodes")
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [
        ((), 2, "0 nodes cannot share a model: expected 1 to 64. Give --node."),
        (("--node", "a"), 2, "node 'a' cannot be understood"),
        (("--node", "a:memory=1GB", "--node", "a:memory=1GB"), 2, "nodes share a name: found a"),
        (("--node", "a:memory=1GB", "--planner", "balanced"), 2, "needs each node's throughput"),
        (("--node", "a:memory=1GB", "--planner", "best"), 2, "'best' is not one of"),
        (("--node", "a:memory=1GB", "--context-length", "0"), 2, "0 is not in the range"),
        (("--node", "a:memory=3MB"), 3, "1 node cannot hold the model"),
    ],
)
def test_wrong_usage_and_what_cannot_be_planned(
    options: tuple[str, ...], exit_code: int, said: str, command: Command, toy: Path, tmp_path: Path
) -> None:
    result = command(mm2_split, "plan", "--model", toy, *options, "--output", tmp_path / "plan.json")
    assert result.exit_code == exit_code
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_model_whose_tensors_are_not_known_cannot_be_planned(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    result = command(mm2_split, "plan", "--model", tmp_path, *TWO_NODES)
    assert result.exit_code == 3
    assert "are not known: the config.json of a llama lists none" in result.stderr
    assert "Fetch what is missing" in result.stderr


def test_damaged_shard_is_not_planned(command: Command, toy: Path, tmp_path: Path) -> None:
    copy = tmp_path / "toy"
    shutil.copytree(toy, copy)
    next(iter(sorted(copy.glob("*.safetensors")))).write_bytes(b"no header")
    result = command(mm2_split, "plan", "--model", copy, *TWO_NODES)
    assert result.exit_code == 3
    assert "is damaged" in result.stderr
