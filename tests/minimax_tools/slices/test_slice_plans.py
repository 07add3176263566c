from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.errors import UsageError
from minimax_tools.slices.folder import SliceCut
from minimax_tools.slices.slice_plans import (
    ModelSplitter,
    SplitConfig,
    SplitPlan,
    SplitResult,
    read_split_plans,
)

Tensors = dict[str, torch.Tensor]
Save = Callable[..., Path]

_ATTENTION = tuple(f"transformer.h.0.attn.{name}_proj.weight" for name in "qkv")
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 32},
    "llama": {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "intermediate_size": 16,
    },
}


def gpt2() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    names = [*_ATTENTION, *(name.replace("h.0", "h.1") for name in _ATTENTION)]
    shapes = dict.fromkeys(names, (8, 8)) | {
        "transformer.wte.weight": (32, 8),
        "transformer.ln_f.weight": (8,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def llama() -> Tensors:
    """With block scales, as an FP8 copy has them."""
    generator = torch.Generator().manual_seed(1)
    tensors = {"model.embed_tokens.weight": torch.randn(32, 8, generator=generator).bfloat16()}
    tensors |= {"lm_head.weight": torch.randn(32, 8, generator=generator).bfloat16()}
    tensors |= {"model.norm.weight": torch.ones(8, dtype=torch.bfloat16)}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = torch.randn(8, 8, generator=generator).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(1, 1, generator=generator)
    return tensors


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Saves a model of one of the two types, in safetensors or as a `.bin` file."""

    def save_model(model_type: str, *, pickled: bool = False) -> Path:
        folder = tmp_path / model_type
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS[model_type]))
        tensors = {"gpt2": gpt2, "llama": llama}[model_type]()
        if pickled:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
        return folder

    return save_model


def plan_for(node: str, names: tuple[str, ...]) -> SplitPlan:
    return SplitPlan(node_id=node, layer_names=names, total_compute=100.0, compute_utilization=0.5)


def plans(**names: tuple[str, ...]) -> dict[str, SplitPlan]:
    return {node: plan_for(node, own) for node, own in names.items()}


def config_of(folder: Path, output: Path, **names: tuple[str, ...]) -> SplitConfig:
    return SplitConfig(
        model_name="a/model", model_path=str(folder), split_plan=plans(**names), output_dir=output
    )


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_the_seeds_example_gives_its_three_tensors(pickled: bool, save: Save, tmp_path: Path) -> None:
    config = config_of(save("gpt2", pickled=pickled), tmp_path / "out", node_001=_ATTENTION)
    result = asyncio.run(ModelSplitter().split_model(config, "node_001"))
    assert result == SplitResult(
        node_id="node_001",
        shard_path=tmp_path / "out" / "node_001" / "model.pth",
        layer_names=tuple(sorted(_ATTENTION)),
        total_params=3 * 64,
        shard_size_mb=3 * 64 * 4 / 1e6,
    )
    loaded = torch.load(result.shard_path, weights_only=True)
    whole = gpt2()
    assert loaded.keys() == set(_ATTENTION)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("config", ['{"model_type": "of-tomorrow"}', None])
def test_a_model_that_nobody_knows_is_split_and_twice_alike(
    config: str | None, save: Save, tmp_path: Path
) -> None:
    folder = save("gpt2", pickled=config is None)
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    given = config_of(folder, tmp_path / "out", n=_ATTENTION)
    result = ModelSplitter().split_model_sync(given, "n")
    assert result.layer_names == tuple(sorted(_ATTENTION))
    assert ModelSplitter().split_model_sync(given, "n") == result


def test_block_scales_go_with_their_weights_and_are_no_parameters(save: Save, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    result = ModelSplitter().split_model_sync(config_of(save("llama"), tmp_path, n=(name,)), "n")
    assert result.layer_names == (name, f"{name}_scale_inv")
    assert result.total_params == 64
    loaded = torch.load(result.shard_path, weights_only=True)
    assert torch.equal(loaded[f"{name}_scale_inv"], llama()[f"{name}_scale_inv"])


def test_names_must_match_to_the_letter_and_all_faults_are_told(save: Save, tmp_path: Path) -> None:
    names = ("transformer.h.0.attn.q_proj", "transformer.h.9.attn.q_proj.weight", *_ATTENTION[:1] * 2)
    config = config_of(save("gpt2"), tmp_path / "out", n=names)
    with pytest.raises(UsageError, match="the split plan has 3 faults") as raised:
        ModelSplitter().split_model_sync(config, "n")
    assert f"n gets {_ATTENTION[0]} twice" in str(raised.value)
    assert "n gets transformer.h.0.attn.q_proj, which the checkpoint lacks" in str(raised.value)
    assert "n gets transformer.h.9.attn.q_proj.weight, which the checkpoint lacks" in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_node_and_an_empty_one_are_refused(save: Save, tmp_path: Path) -> None:
    config = config_of(save("gpt2"), tmp_path / "out", n=())
    with pytest.raises(UsageError, match="no node 'm': expected one of n"):
        ModelSplitter().split_model_sync(config, "m")
    with pytest.raises(UsageError, match="n gets nothing"):
        ModelSplitter().split_model_sync(config, "n")


@pytest.mark.parametrize("name", ["../escape", "", ".", "a/b"])
def test_a_node_that_is_no_folders_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is no node"):
        plan_for(name, _ATTENTION)


def test_a_whole_plan_passes_with_scales_named_or_not() -> None:
    first, second = (tuple(n for n in llama() if ("layers.1" in n) == is_last) for is_last in (False, True))
    ModelSplitter.validate_split_plan(list(llama()), plans(a=first, b=second))
    unnamed = tuple(name for name in second if not name.endswith("_scale_inv"))
    ModelSplitter.validate_split_plan(list(llama()), plans(a=first, b=unnamed))


def test_every_fault_of_a_split_plan_is_told_at_once() -> None:
    names = list(gpt2())
    split_plan = plans(a=(*_ATTENTION, "lm_head.weight"), b=(_ATTENTION[0], names[3]))
    split_plan["c"] = plan_for("d", (names[4],))
    with pytest.raises(UsageError) as raised:
        ModelSplitter.validate_split_plan(names, split_plan)
    for fault in (
        "the split plan has 6 faults",
        "a gets lm_head.weight, which the checkpoint lacks",
        f"{_ATTENTION[0]} is assigned to a and b",
        "the plan of c names node d",
        *(f"{name} is not assigned" for name in names[5:]),
    ):
        assert fault in str(raised.value)


def test_scales_without_their_weights_are_a_fault() -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    rest = tuple(other for other in llama() if name not in other)
    with pytest.raises(UsageError) as raised:
        ModelSplitter.validate_split_plan(list(llama()), plans(a=(*rest, name), b=(f"{name}_scale_inv",)))
    assert f"b gets {name}_scale_inv without its weight" in str(raised.value)
    assert f"{name}_scale_inv is assigned to a and b" in str(raised.value)


def test_utilization_and_compute_are_kept_in_bounds() -> None:
    for compute, utilization in ((-1.0, 0.5), (1.0, 1.1), (float("nan"), 0.5), (1.0, float("nan"))):
        with pytest.raises(UsageError, match="the split plan of n is invalid"):
            SplitPlan(node_id="n", layer_names=(), total_compute=compute, compute_utilization=utilization)


def test_split_model_is_awaited_and_does_not_block(save: Save, tmp_path: Path) -> None:
    config = config_of(save("gpt2"), tmp_path / "async", a=_ATTENTION[:2], b=_ATTENTION[2:])
    has_ticked = threading.Event()

    class WaitingSplitter(ModelSplitter):
        """A splitter whose threads cut nothing before the event loop has gone on."""

        def cut_shard(self, *args: Any, **options: Any) -> SliceCut:
            assert has_ticked.wait(timeout=60)
            return super().cut_shard(*args, **options)

    splitter = WaitingSplitter()

    async def split_both() -> list[SplitResult]:
        tasks = [asyncio.create_task(splitter.split_model(config, node)) for node in "ab"]
        for _ in range(10):
            await asyncio.sleep(0)
        has_ticked.set()
        return list(await asyncio.gather(*tasks))

    results = asyncio.run(split_both())
    assert results == [splitter.split_model_sync(config, node) for node in "ab"]


def test_a_plan_of_names_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    node: dict[str, Any] = {
        "node_id": "a",
        "layer_names": ["x"],
        "total_compute": 100.0,
        "compute_utilization": 0.5,
    }
    path.write_text(json.dumps({"a": node, "b": ["y", "z"]}))
    bare = SplitPlan(node_id="b", layer_names=["y", "z"], total_compute=0.0, compute_utilization=0.0)
    assert read_split_plans(path) == {"a": SplitPlan(**node), "b": bare}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1]", "AttributeError"),
        ("{", "JsonError"),
        ('{"a": 1}', "a has no list of layer_names"),
        ('{"a": {"node_id": "a"}}', "layer_names"),
        ('{"a": [1]}', "layer_names of a are not all names"),
        ('{"a": {"layer_names": [], "layers": 3}}', "unexpected keyword argument 'layers'"),
    ],
)
def test_a_file_of_another_form_is_no_plan_of_names(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(UsageError, match="is no plan of names") as raised:
        read_split_plans(tmp_path / "names.json")
    assert found in str(raised.value)
