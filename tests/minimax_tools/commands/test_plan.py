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
from safetensors import safe_open

from minimax_tools.cli import mm2_split
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.source import open_source
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

Command = Callable[..., Result]

NODES = ("--node", "big:memory=60MB,tflops=2", "--node", "small:memory=20MB,tflops=1")
TWO_NODES = (*NODES, "--context-length", "64")


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A model of which nothing but config.json is here: MiniMax-M2, cut to two layers."""
    config = SyntheticModel.m2()._config()
    config.update(num_hidden_layers=2, attn_type_list=[1, 1], quantization_config={"quant_method": "fp8"})
    folder = tmp_path / "described"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_plan_is_drawn_for_people(
    command: Command, toy: Path, described: Path, tmp_path: Path, expect_text: Any
) -> None:
    model, small = SyntheticModel(num_hidden_layers=2), tmp_path / "small"
    synthesize(small, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=1)
    two = ("--node", "a:memory=15210kB", "--node", "b:memory=600kB", "--context-length", "64")
    cases = {
        "an idle node": (toy, *TWO_NODES, "--node", "tiny:memory=1kB,tflops=1"),
        "room for the head alone": (small, *two),
        "config.json alone": (described, "--node", "a:memory=12GB", "--node", "b:memory=12GB"),
    }
    texts = {}
    for title, (folder, *options) in cases.items():
        result = command(mm2_split, "plan", "--model", folder, *options)
        assert result.exit_code == 0, result.output
        texts[title] = result.stdout.replace(str(folder), Path(folder).name)
    expect_text("plan.txt", texts)


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


def test_plan_from_config_alone_names_no_file(command: Command, described: Path, tmp_path: Path) -> None:
    nodes = ("--node", "a:memory=12GB", "--node", "b:memory=12GB")
    output = tmp_path / "plan.json"
    assert command(mm2_split, "plan", "--model", described, *nodes, "--output", output).exit_code == 0
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
        ((*TWO_NODES, "--model", "LLAMA"), 3, "are not known: the config.json of a llama lists none"),
        ((*TWO_NODES, "--model", "DAMAGED"), 3, "is damaged"),
    ],
)
def test_wrong_usage_and_what_cannot_be_planned(
    options: tuple[str, ...], exit_code: int, said: str, command: Command, toy: Path, tmp_path: Path
) -> None:
    damaged, llama = Path(shutil.copytree(toy, tmp_path / "damaged")), tmp_path / "llama"
    min(damaged.glob("*.safetensors")).write_bytes(b"no header")
    llama.mkdir()
    (llama / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    named = {"LLAMA": llama, "DAMAGED": damaged}
    words = ("--model", toy, *(named.get(word, word) for word in options))
    result = command(mm2_split, "plan", *words, "--output", tmp_path / "plan.json")
    assert result.exit_code == exit_code
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "plan.json").exists()


def memory(command: Any, model: object) -> dict[str, Any]:
    done = command(mm2_split, "memory", "--model", model, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_bytes_by_dtype_are_those_of_the_shards(command: Any, toy: Path) -> None:
    stored: dict[str, list[int]] = {}
    for shard in toy.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                stored.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor.nbytes)
    record = memory(command, toy)
    assert record["from"] == "headers"
    assert {one["dtype"]: (one["num_tensors"], one["size_bytes"]) for one in record["dtypes"]} == {
        dtype: (len(sizes), sum(sizes)) for dtype, sizes in stored.items()
    }
    assert record["total"]["stored_bytes"] == sum(map(sum, stored.values()))


def test_parts_take_what_the_model_does(command: Any, toy: Path) -> None:
    record, spec = memory(command, toy), ModelSpec.from_folder(toy)
    parts = record["parts"]
    assert list(parts) == ["embedding", "layer_0", "layer_1", "layer_2", "layer_3", "final_norm", "lm_head"]
    for dtype in (torch.bfloat16, torch.float32):
        key = f"{str(dtype).removeprefix('torch.')}_bytes"
        assert parts["layer_2"][key] == layer_bytes(spec, dtype)
        assert parts["embedding"][key] == vocabulary_bytes(spec, dtype)
        assert record["total"][key] == sum(part[key] for part in parts.values())


def test_stacked_experts_left_in_float32_take_twice(command: Any, toy: Path) -> None:
    record, spec = memory(command, toy), ModelSpec.from_folder(toy)
    regrouping = record["regrouping"]
    num_weights = spec.num_local_experts * 3 * spec.hidden_size * spec.intermediate_size
    assert regrouping["layer_experts"]["bfloat16_bytes"] == 2 * num_weights
    assert regrouping["layer_experts"]["float32_bytes"] == 4 * num_weights
    assert regrouping["peak_layer"]["float32_bytes"] == layer_bytes(spec, torch.float32) + 4 * num_weights
    assert regrouping["model"] == record["total"]


def test_a_model_without_its_shards_is_known_by_config(command: Any, toy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((toy / "config.json").read_bytes())
    record = memory(command, tmp_path)
    assert record["from"] == "config.json"
    assert record["total"] == memory(command, toy)["total"]


def test_headers_of_a_hub_s_model_are_enough(
    command: Any, toy: Path, hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    hub.add("owner/toy", toy)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    record = memory(command, "hf://owner/toy")
    assert record["from"] == "headers"
    assert record["total"] == memory(command, toy)["total"]
    sizes = {path.name: path.stat().st_size for path in toy.glob("*.safetensors")}
    assert not [path for path in tmp_path.rglob("*.safetensors") if path.name in sizes]
