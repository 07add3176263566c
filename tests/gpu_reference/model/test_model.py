from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import capture

from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.model.model import load_golden_model
from gpu_reference.model.model_checks import hold_weight, weight_of
from gpu_reference.model.placement import Placement
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.run import single_layer_run


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_float32_golden_rounds_nothing(ask: Any, toy: Path, tmp_path: Path, is_offloaded: bool) -> None:
    placement = Placement(device_map={"": "disk" if is_offloaded else "cpu"}, offload_folder=tmp_path)
    with (
        open_golden(ask(dtype=torch.float32, placement=placement)) as golden,
        CheckpointReader(toy) as reader,
    ):
        projection = golden.model.get_submodule("model.layers.3.self_attn.q_proj")
        exact = reader.read_weight("model.layers.3.self_attn.q_proj.weight", torch.float32)
        assert torch.equal(weight_of(projection, "weight"), exact)
        assert not torch.equal(exact, exact.bfloat16().float())
        assert {value.dtype for value in golden.model.state_dict().values()} == {torch.float32}
        assert golden.forward().dtype == torch.float32


def test_layers_past_the_span_are_not_loaded(ask: Any) -> None:
    with open_golden(ask(run=single_layer_run(1, sites_level="layer"))) as golden:
        assert len(list(golden.model.get_submodule("model.layers").children())) == 2


def test_float32_matmuls_are_not_tf32(ask: Any) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with open_golden(ask()) as golden:
        assert golden.describe().provenance.options["float32_matmul"] == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_convolutions_are_not_tf32_and_the_process_can_still_export(ask: Any) -> None:
    with open_golden(ask()):
        pass
    assert torch.backends.cudnn.allow_tf32 is False
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    assert exported.module()(torch.ones(2, 2)).shape == (2, 2)


def test_attention_implementation_without_its_package_is_an_error_that_names_it(ask: Any) -> None:
    with pytest.raises(CheckpointError, match=r"transformers cannot load .*FlashAttention"):
        with open_golden(ask(attn_implementation="flash_attention_2")):
            pass


def test_model_that_fits_nowhere_asks_for_an_offload_folder(ask: Any) -> None:
    placement = Placement(device_map="auto", max_memory={"cpu": 5_000_000})
    with pytest.raises(UsageError, match=r"does not fit .*Give --offload-folder DIR too"):
        with open_golden(ask(placement=placement)):
            pass


def test_what_transformers_cannot_load_names_folder_and_reason(ask: Any, toy: Path, tmp_path: Path) -> None:
    for path in toy.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    request = ask(folder=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match=f"transformers cannot load {tmp_path}: found "):
            load_golden_model(request.model, reader)


# Two goldens, the first quietly, in one process: each start takes seconds. Layer 0 alone: transformers reports the
# weights of all other layers as unexpected.
QUIET_AND_NOT = """
import sys
from gpu_reference.cli import main

words = ["single-layer", "--layer", "0", "--seq-len", "4", "--noise-floor", "off", "--stream", "off", *sys.argv[1:]]
for options in (["--quiet"], ["--overwrite"]):
    main([*words, *options], standalone_mode=False)
    print("\\nNEXT", file=sys.stderr)
"""


def test_report_of_the_loaded_weights_follows_quiet(
    toy: Path, tmp_path: Path, forked_python: Any, golden_modules: tuple[str, ...]
) -> None:
    words = ("--model", toy, "--output-dir", tmp_path / "golden")
    done = forked_python(QUIET_AND_NOT, *words, modules=golden_modules)
    assert done.returncode == 0, done.stderr
    quiet, told, _ = done.stderr.split("\nNEXT\n")
    assert quiet == ""
    assert "LOAD REPORT" in told


def test_missing_shard_is_told_before_anything_is_loaded(ask: Any, toy: Path, tmp_path: Path) -> None:
    for path in toy.iterdir():
        if "00002-of" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="model-00002-of"):
        with open_golden(ask(folder=tmp_path)):
            pass


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


def offloading(kind: str, folder: Path) -> Placement:
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


@pytest.mark.parametrize(("stored", "kind"), [("fp8", "max-memory"), ("bf16", "mixed"), ("bf16", "disk")])
def test_offloaded_golden_captures_the_same_bits(
    ask: Any, toy: Path, toy_bf16: Path, plain: Path, tmp_path: Path, stored: str, kind: str
) -> None:
    folder = toy if stored == "fp8" else toy_bf16
    request = ask(folder=folder, placement=offloading(kind, tmp_path / "offload"), noise_floor="full")
    with open_golden(request) as golden:
        offloaded = [name for name, tensor in golden.model.named_parameters() if tensor.is_meta]
        golden.capture(tmp_path / "capture", extra={})
    assert any("mlp.experts" in name for name in offloaded)
    files = sorted(path.name for path in plain.iterdir())
    assert sorted(path.name for path in (tmp_path / "capture").iterdir()) == files
    for name in files:
        assert bits(tmp_path / "capture" / name) == bits(plain / name), name


@pytest.fixture(scope="module")
def on_disk(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    with open_golden(ask(placement=offloading("disk", tmp_path_factory.mktemp("offload")))) as golden:
        yield golden


def test_backend_of_an_offloaded_golden_is_the_device_that_computes(on_disk: Golden) -> None:
    provenance = on_disk.describe().provenance
    assert (provenance.backend, provenance.device) == ("cpu", "cpu")


def test_router_of_an_offloaded_golden_is_held_in_float32(on_disk: Golden) -> None:
    gate = on_disk.model.get_submodule("model.layers.3.mlp.gate").get_parameter("weight")
    assert (gate.device.type, gate.dtype) == ("cpu", torch.float32)
    assert on_disk.model.get_submodule("model.layers.3.self_attn.q_proj").get_parameter("weight").is_meta


def test_offloaded_weight_is_fetched_in_the_dtype_it_runs_in(ask: Any, on_disk: Golden) -> None:
    with open_golden(ask()) as whole:
        for path, name in (("self_attn.q_proj", "weight"), ("mlp.experts", "down_proj")):
            fetched = weight_of(on_disk.model.get_submodule(f"model.layers.2.{path}"), name)
            expected = whole.model.get_submodule(f"model.layers.2.{path}").get_parameter(name)
            assert not fetched.is_meta
            assert torch.equal(fetched, expected)


@pytest.mark.parametrize("kind", ["mixed", "disk"])
def test_held_weight_takes_part_in_the_computation(ask: Any, tmp_path: Path, kind: str) -> None:
    with open_golden(ask(placement=offloading(kind, tmp_path))) as golden:
        before = golden.forward()
        norm = golden.model.get_submodule("model.layers.3.input_layernorm")
        hold_weight(norm, "weight", weight_of(norm, "weight") * 2)
        held = golden.forward()
        hold_weight(norm, "weight", weight_of(norm, "weight") / 2)
        assert not torch.equal(held, before)
        assert torch.equal(golden.forward(), before)
