from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import capture

from gpu_reference.golden.golden import open_golden
from gpu_reference.model.model_checks import hold_weight, weight_of
from gpu_reference.model.placement import Placement
from minimax_tools.capture.store import MANIFEST_NAME

# Layers 0 and 1 and the head in memory; layer 2 in parts, layer 3 whole on disk.
MIXED = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "cpu",
    "model.layers.2.input_layernorm": "cpu",
    "model.layers.2.post_attention_layernorm": "cpu",
    "model.layers.2.self_attn": "disk",
    "model.layers.2.mlp": "disk",
    "model.layers.3": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def placement(kind: str, folder: Path) -> Placement:
    if kind == "max-memory":
        return Placement(device_map="auto", max_memory={"cpu": 12_000_000}, offload_folder=folder)
    return Placement(device_map=MIXED if kind == "mixed" else {"": "disk"}, offload_folder=folder)


@pytest.fixture(scope="module")
def plain(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of a model that lies in memory whole."""
    return capture(ask(noise_floor="full"), tmp_path_factory.mktemp("plain") / "full_model").directory


def bits(path: Path) -> object:
    """The bytes of a file; a manifest without the config, which says how the checkpoint is stored."""
    if path.name != MANIFEST_NAME:
        return path.read_bytes()
    manifest = json.loads(path.read_text())
    del manifest["provenance"]["model_config"]
    return manifest


@pytest.mark.parametrize(
    ("stored", "kind"), [("fp8", "max-memory"), ("fp8", "mixed"), ("bf16", "mixed"), ("bf16", "disk")]
)
def test_offloaded_golden_captures_the_same_bits(
    ask: Any, toy: Path, toy_bf16: Path, plain: Path, tmp_path: Path, stored: str, kind: str
) -> None:
    folder = toy if stored == "fp8" else toy_bf16
    request = ask(folder=folder, placement=placement(kind, tmp_path / "offload"), noise_floor="full")
    with open_golden(request) as golden:
        offloaded = [name for name, tensor in golden.model.named_parameters() if tensor.is_meta]
        golden.capture(tmp_path / "capture", extra={})
    assert any("mlp.experts" in name for name in offloaded)
    files = sorted(path.name for path in plain.iterdir())
    assert sorted(path.name for path in (tmp_path / "capture").iterdir()) == files
    for name in files:
        assert bits(tmp_path / "capture" / name) == bits(plain / name), name


def test_backend_of_an_offloaded_golden_is_the_device_that_computes(ask: Any, tmp_path: Path) -> None:
    request = ask(placement=placement("disk", tmp_path / "offload"))
    provenance = capture(request, tmp_path / "capture").description.provenance
    assert (provenance.backend, provenance.device) == ("cpu", "cpu")


def test_router_of_an_offloaded_golden_is_held_in_float32(ask: Any, tmp_path: Path) -> None:
    with open_golden(ask(placement=placement("disk", tmp_path))) as golden:
        gate = golden.model.get_submodule("model.layers.3.mlp.gate").get_parameter("weight")
        projection = golden.model.get_submodule("model.layers.3.self_attn.q_proj").get_parameter("weight")
    assert (gate.device.type, gate.dtype) == ("cpu", torch.float32)
    assert projection.is_meta


def test_offloaded_weight_is_fetched_in_the_dtype_it_runs_in(ask: Any, tmp_path: Path) -> None:
    with open_golden(ask()) as whole, open_golden(ask(placement=placement("disk", tmp_path))) as golden:
        for path, name in (("self_attn.q_proj", "weight"), ("mlp.experts", "down_proj")):
            fetched = weight_of(golden.model.get_submodule(f"model.layers.2.{path}"), name)
            expected = whole.model.get_submodule(f"model.layers.2.{path}").get_parameter(name)
            assert not fetched.is_meta
            assert torch.equal(fetched, expected)


@pytest.mark.parametrize("kind", ["mixed", "disk"])
def test_held_weight_takes_part_in_the_computation(ask: Any, tmp_path: Path, kind: str) -> None:
    with open_golden(ask(placement=placement(kind, tmp_path))) as golden:
        before = golden.forward()
        norm = golden.model.get_submodule("model.layers.3.input_layernorm")
        hold_weight(norm, "weight", weight_of(norm, "weight") * 2)
        held = golden.forward()
        hold_weight(norm, "weight", weight_of(norm, "weight") / 2)
        assert not torch.equal(held, before)
        assert torch.equal(golden.forward(), before)
