"""`mm2-split memory`: a checkpoint's bytes by dtype and part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from minimax_tools.cli import mm2_split
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes


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
