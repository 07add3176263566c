"""Modules and caches of one run of vLLM Neuron, judged together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.cli import main as mm2_compare
from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import open_source
from minimax_tools.errors import IncomparableError
from minimax_tools.model.sites import ModelSite, Site

MODULES = {
    "input_layernorm": Site.INPUT_NORM,
    "self_attn": Site.ATTN_DELTA,
    "post_attention_layernorm": Site.POST_NORM,
    "mlp": Site.MOE_DELTA,
}
Keys = Callable[[int, torch.Tensor], torch.Tensor]


def write_run(directory: Path, golden: Path, change_keys: Keys = lambda _, keys: keys) -> Path:
    """The golden's values as an engine's: a pass and a cache of each prompt."""
    source = Capture.open(golden)
    mask = source.read_attention_mask().bool()
    for prompt, is_real in enumerate(mask):
        length = int(is_real.sum())
        folder = directory / f"tensor_compare/neuron/dp0/prefill_s{length}_0"
        values = {"model.embed_tokens": source.read(None, ModelSite.EMBEDDING)}
        caches = {}
        for layer in source.layers:
            values |= {
                f"model.layers.{layer}.{name}": source.read(layer, site) for name, site in MODULES.items()
            }
            values[f"model.layers.{layer}"] = source.read(layer, Site.OUTPUT)
            keys = change_keys(layer, source.read(layer, Site.K_ROPE)[prompt : prompt + 1][:, :, is_real])
            own_values = source.read(layer, Site.V_PROJ)[prompt, is_real].unflatten(-1, (keys.shape[1], -1))
            caches[f"layers.{layer}.self_attn"] = (keys, own_values.transpose(0, 1)[None])
        for module, value in values.items():
            (folder / module).mkdir(parents=True)
            torch.save(value[prompt, is_real], folder / module / "rank0.pt")
        meta = {"req_ids": [str(prompt)], "positions": list(range(length)), "dp_rank": 0}
        (folder / f"{folder.name}_meta.json").write_text(json.dumps(meta))
        cache_folder = directory / f"prompt_{prompt}" / "kv_analysis"
        cache_folder.mkdir(parents=True)
        torch.save(caches, cache_folder / "vllm_kv.pt")
    return directory


def judge(toy: Path, golden: Path, run: Path, command: Any) -> dict[str, Any]:
    named = ["--golden", golden, "--run", run, "--model", toy]
    record: dict[str, Any] = json.loads(command(mm2_compare, *named, "--json").stdout)
    return record


def test_sites_of_both_are_held_and_a_right_run_passes(
    toy: Path, golden: Path, tmp_path: Path, command: Any
) -> None:
    run = write_run(tmp_path, golden)
    joined = open_source(run)
    assert {Site.MOE_DELTA, Site.V_PROJ, Site.K_ROPE, Site.OUTPUT} <= set(joined.sites(2))
    assert joined.not_exposed(2)[0] is Site.Q_PROJ
    source = Capture.open(golden)
    is_real = source.read_attention_mask().bool()
    laid_out = joined.laid_out_as(source)
    for site in (Site.MOE_DELTA, Site.V_PROJ):
        assert torch.equal(laid_out.read(2, site)[is_real], source.read(2, site)[is_real])
    record = judge(toy, golden, run, command)
    assert record["verdict"] == "pass"
    judged = {(result["layer"], result["site"]) for result in record["sites"] if result["status"] == "pass"}
    assert {(layer, site) for layer in range(4) for site in ("k_rope", "v_proj")} <= judged


@pytest.mark.parametrize(
    "change", [lambda keys: keys * 1.05, lambda keys: keys.roll(16, dims=2)], ids=["larger", "other blocks"]
)
def test_wrong_keys_are_blamed_in_their_layer(
    toy: Path, golden: Path, tmp_path: Path, command: Any, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    run = write_run(tmp_path, golden, lambda layer, keys: change(keys) if layer == 2 else keys)
    record = judge(toy, golden, run, command)
    assert record["verdict"] == "fail"
    [blamed] = record["blame"]
    assert (blamed["layer"], blamed["sites"][-1]) == (2, "k_rope")


def test_values_are_read_from_the_caches_also_if_modules_return_them(golden: Path, tmp_path: Path) -> None:
    """Right values may be written wrongly into the cache."""
    run = write_run(tmp_path, golden)
    for prompt, length in enumerate((48, 33)):
        module = run / f"tensor_compare/neuron/dp0/prefill_s{length}_0/model.layers.2.self_attn.v_proj"
        module.mkdir()
        torch.save(Capture.open(golden).read(2, Site.V_PROJ)[prompt, :length], module / "rank0.pt")
        path = run / f"prompt_{prompt}/kv_analysis/vllm_kv.pt"
        caches = torch.load(path, weights_only=True)
        keys, values = caches["layers.2.self_attn"]
        torch.save(caches | {"layers.2.self_attn": (keys, values.roll(1, dims=2))}, path)
    source = Capture.open(golden)
    read = open_source(run).laid_out_as(source).read(2, Site.V_PROJ)
    assert torch.equal(read[0], source.read(2, Site.V_PROJ)[0].roll(1, dims=0))


def test_layers_that_only_the_caches_hold_are_named(golden: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path, golden)
    for layer in (2, 3):
        for folder in run.glob(f"tensor_compare/neuron/dp0/*/model.layers.{layer}*"):
            shutil.rmtree(folder)
    joined = open_source(run)
    assert joined.layers == (0, 1)
    note = "vllm_kv.pt holds layers 2-3 too, of which no module was captured: they are left out"
    assert note in joined.notes
    shutil.rmtree(run / "prompt_1")
    with pytest.raises(IncomparableError, match="the caches of 2 prompts, found 1"):
        open_source(run).laid_out_as(Capture.open(golden))
