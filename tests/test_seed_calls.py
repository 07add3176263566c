"""The calls of splitlearn's and model-splitter's documents, written as those show them, on the learned toy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from minimax_tools.errors import UsageError
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.model.architecture import ParamMapper
from minimax_tools.slices.slice_plans import ModelSplitter, SplitConfig, SplitPlan
from minimax_tools.split.components import SplitModel
from minimax_tools.split.factory import ModelFactory
from minimax_tools.split.part_loading import ShardLoader

LEARNED = str(Path(__file__).parent / "models" / "learned")


def test_components_are_made_saved_and_loaded(tmp_path: Path) -> None:
    bottom, trunk, top = ModelFactory.create_split_models(
        model_type="minimax_m2",
        model_name_or_path=LEARNED,
        split_point_1=1,
        split_point_2=3,
        device="cpu",
        low_memory=True,
        storage_path=str(tmp_path / "my_models"),
        auto_save=True,
    )
    input_ids = torch.randint(0, 200, (1, 10))
    hidden = bottom(input_ids)
    hidden = trunk(hidden)
    output = top(hidden)
    for name in ("bottom", "trunk", "top"):
        loaded = SplitModel.load(f"{tmp_path}/my_models/{name}.pt")
        input_ids = loaded(input_ids)
    assert torch.equal(input_ids, output)


def test_tracker_prints_changes_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = MemoryTracker()
    tracker.snapshot("开始")
    ModelFactory.create_split_models("minimax_m2", LEARNED, 1, 3, device="cpu", low_memory=True)
    tracker.snapshot("加载完成")
    tracker.report()
    changes = capsys.readouterr().out.splitlines()
    assert changes[0] == "Memory: 加载完成"
    assert changes[1].startswith("  RAM: ")
    assert changes[2].startswith("  GPU: 0.00 GB (+0.00 GB)")
    tracker.summary()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "=== Memory Usage Summary ==="
    assert lines[1].startswith("Peak RAM: ")
    timeline = lines[lines.index("Timeline:") + 1 :]
    assert [line.split()[0] for line in timeline] == ["开始", "加载完成"]
    assert all("RAM: " in line and "GPU: " in line for line in timeline)


def test_shard_loader_finds_and_reads_a_component(tmp_path: Path) -> None:
    assert ShardLoader.is_sharded_model(LEARNED)
    index = ShardLoader.load_index_json(LEARNED)
    required_shards = ShardLoader.get_required_shards_for_component(
        index_json=index,
        component="bottom",
        layer_range=(0, 1),
        model_type="minimax_m2",
        include_embedding=True,
    )
    assert set(required_shards) < set(index["weight_map"].values())
    shard_paths = ShardLoader.download_shards_if_needed(model_path=LEARNED, shard_files=required_shards)
    assert shard_paths.keys() == required_shards

    def filter_fn(param_name: str) -> bool:
        if ParamMapper.is_embedding(param_name, "minimax_m2"):
            return True
        layer_num = ParamMapper.get_layer_number(param_name, "minimax_m2")
        return layer_num is not None and 0 <= layer_num < 1

    tensors = {
        name: tensor
        for path in shard_paths.values()
        for name, tensor in ShardLoader.load_shard_partial(path, filter_fn).items()
    }
    assert "model.embed_tokens.weight" in tensors
    assert {name.split(".")[2] for name in tensors if ".layers." in name} == {"0"}


def test_splitter_is_awaited_and_its_shard_is_a_pth_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    split_plan = {
        "node_001": SplitPlan(
            node_id="node_001", layer_names=names, total_compute=100.0, compute_utilization=0.5
        )
    }
    config = SplitConfig(
        model_name="meta-llama/Llama-3.2-1B-Instruct",
        model_path=LEARNED,
        split_plan=split_plan,
        output_dir="./model_shards",
    )

    async def main() -> None:
        splitter = ModelSplitter()
        result = await splitter.split_model(config, "node_001")
        assert result.node_id == "node_001"
        assert result.shard_path == Path("model_shards/node_001/model.pth")
        tensors = torch.load(result.shard_path, weights_only=True)
        assert sorted(tensors) == list(result.layer_names) == sorted(names)
        assert result.total_params == sum(tensor.numel() for tensor in tensors.values())
        assert f"{result.shard_size_mb:.2f} MB" == f"{result.total_params * 2 / 1e6:.2f} MB"

    asyncio.run(main())
    with pytest.raises(UsageError, match="is not assigned"):
        ModelSplitter.validate_split_plan(
            list(ShardLoader.load_index_json(LEARNED)["weight_map"]), split_plan
        )
