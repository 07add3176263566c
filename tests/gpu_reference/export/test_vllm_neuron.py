"""Files as vLLM Neuron's debugger reads them, and mm2's own reading of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main
from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import open_source
from minimax_tools.model.sites import ModelSite, Site


def export(command: Any, golden: Path, float32_golden: Path, output: Path, *options: object) -> Any:
    named = ["--golden", golden, "--float32-golden", float32_golden, "--output-dir", output]
    return command(main, "export", "--format", "vllm-neuron", *named, *options)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_each_prompt_has_its_passes(report: Path) -> None:
    for prompt, passes in (
        (0, ["decode_b47_0", "decode_b48_0", "prefill_s46_0"]),
        (1, ["decode_b32_0", "decode_b33_0", "prefill_s31_0"]),
    ):
        for captures in ("hf_fp32", "hf_bf16"):
            folder = report / "prompt_analysis" / f"prompt_{prompt}" / "tensor_compare" / captures / "dp0"
            assert sorted(path.name for path in folder.iterdir()) == passes


def test_pass_tells_its_request_and_positions(report: Path) -> None:
    folder = report / "prompt_analysis/prompt_1/tensor_compare/hf_bf16/dp0/decode_b32_0"
    meta = json.loads((folder / "decode_b32_0_meta.json").read_text())
    assert meta == {"req_ids": ["0"], "positions": list(range(32)), "dp_rank": 0}


@pytest.mark.parametrize(("captures", "dtype"), [("hf_bf16", torch.bfloat16), ("hf_fp32", torch.float32)])
def test_value_is_the_goldens_bit_for_bit(
    report: Path, golden: Path, float32_golden: Path, captures: str, dtype: torch.dtype
) -> None:
    source = Capture.open(golden if dtype == torch.bfloat16 else float32_golden)
    compare = report / "prompt_analysis/prompt_1/tensor_compare"
    for module, site in (
        ("self_attn", Site.ATTN_DELTA),
        ("mlp", Site.MOE_DELTA),
        ("self_attn.q_norm", Site.Q_NORM),
    ):
        for name, length in (("prefill_s31_0", 31), ("decode_b32_0", 32)):
            value = load(compare / captures / "dp0" / name / f"model.layers.2.{module}" / "rank0.pt")
            assert value.dtype == dtype
            assert torch.equal(value, source.read(2, site)[1:2, :length])
    logits = load(compare / captures / "dp0/prefill_s31_0/lm_head/rank0.pt")
    assert torch.equal(logits, source.read(None, ModelSite.LOGITS)[1:2, :31])


def test_caches_are_rotated_keys_and_values_in_float32(report: Path, golden: Path) -> None:
    source = Capture.open(golden)
    caches = load(report / "prompt_analysis/prompt_1/kv_analysis/hf_kv.pt")
    assert list(caches) == [f"layers.{layer}.self_attn" for layer in range(4)]
    keys, values = caches["layers.3.self_attn"]
    assert keys.dtype == values.dtype == torch.float32
    assert torch.equal(keys, source.read(3, Site.K_ROPE)[1:2, :, :33].float())
    assert torch.equal(values.transpose(1, 2).flatten(-2), source.read(3, Site.V_PROJ)[1:2, :33].float())


def test_mm2_reads_the_captures_back(report: Path, golden: Path) -> None:
    dump = open_source(report / "prompt_analysis/prompt_1/tensor_compare/hf_bf16")
    source = Capture.open(golden)
    assert dump.layers == (0, 1, 2, 3)
    for site in (Site.INPUT_NORM, Site.K_PROJ, Site.POST_NORM, Site.ROUTER_LOGITS, Site.MOE_DELTA):
        assert torch.equal(dump.read(1, site)[:, :31], source.read(1, site)[1:2, :31])


def test_goldens_padded_on_the_left_give_the_same_files(
    toy: Path, golden: Path, tmp_path: Path, command: Any
) -> None:
    left = {}
    for dtype in ("bfloat16", "float32"):
        left[dtype] = tmp_path / dtype
        options = ["--seq-len", "9,6", "--padding-side", "left", "--noise-floor", "off", "--dtype", dtype]
        assert (
            command(main, "extract-all", "--model", toy, "--output-dir", left[dtype], *options).exit_code == 0
        )
    result = export(command, left["bfloat16"], left["float32"], tmp_path / "report", "--allow-uncertified")
    assert result.exit_code == 0
    source = Capture.open(left["bfloat16"])
    folder = tmp_path / "report/prompt_analysis/prompt_1"
    value = load(folder / "tensor_compare/hf_bf16/dp0/prefill_s6_0/model.layers.0.mlp/rank0.pt")
    assert torch.equal(value, source.read(0, Site.MOE_DELTA)[1:2, 3:])
    keys, _ = load(folder / "kv_analysis/hf_kv.pt")["layers.0.self_attn"]
    assert torch.equal(keys, source.read(0, Site.K_ROPE)[1:2, :, 3:].float())


def test_goldens_without_caches_say_so(toy: Path, tmp_path: Path, command: Any) -> None:
    for dtype in ("bfloat16", "float32"):
        options = ["--seq-len", "6", "--sites", "component", "--noise-floor", "off", "--dtype", dtype]
        command(main, "extract-all", "--model", toy, "--output-dir", tmp_path / dtype, *options)
    named = (tmp_path / "bfloat16", tmp_path / "float32", tmp_path / "report", "--allow-uncertified")
    result = export(command, *named)
    assert result.exit_code == 0
    assert "none: the goldens do not hold k_rope and v_proj" in result.stdout
    assert not list((tmp_path / "report").rglob("*kv*"))


def test_port_with_other_names_finds_its_modules(
    golden: Path, float32_golden: Path, tmp_path: Path, command: Any
) -> None:
    option = "moe_delta=model.layers.{layer}.block_sparse_moe"
    result = export(command, golden, float32_golden, tmp_path / "report", "--module", option, "--json")
    modules = json.loads(result.stdout)["modules"]
    assert "model.layers.3.block_sparse_moe" in modules
    assert "model.layers.3.mlp" not in modules
    folder = tmp_path / "report/prompt_analysis/prompt_0/tensor_compare/hf_fp32/dp0/prefill_s48_0"
    assert sorted(modules) == sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_rows_that_no_engine_serves_are_refused(toy: Path, tmp_path: Path, command: Any) -> None:
    for dtype in ("bfloat16", "float32"):
        options = ["--seq-len", "6", "--start-positions", "100", "--noise-floor", "off", "--dtype", dtype]
        command(main, "extract-all", "--model", toy, "--output-dir", tmp_path / dtype, *options)
    named = (tmp_path / "bfloat16", tmp_path / "float32", tmp_path / "report", "--allow-uncertified")
    result = export(command, *named)
    assert result.exit_code == 2
    assert "begins at position 100: expected rows that begin at position 0" in result.stderr


def test_decoding_must_leave_a_prompt(
    golden: Path, float32_golden: Path, tmp_path: Path, command: Any
) -> None:
    result = export(command, golden, float32_golden, tmp_path / "report", "--decode", 33)
    assert result.exit_code == 2
    assert "--decode 33 leaves no prompt of row 1: found 33 tokens" in result.stderr
    assert not (tmp_path / "report").exists()


def test_damaged_golden_is_not_exported(
    golden: Path, float32_golden: Path, tmp_path: Path, command: Any
) -> None:
    import shutil

    copied = Path(shutil.copytree(golden, tmp_path / "copied"))
    path = copied / "layer_2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = export(command, copied, float32_golden, tmp_path / "report")
    assert result.exit_code == 3
    assert "was damaged or changed after it was" in result.stderr
    assert not (tmp_path / "report").exists()


def test_nothing_is_overwritten(golden: Path, float32_golden: Path, tmp_path: Path, command: Any) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mine.txt").write_text("mine")
    result = export(command, golden, float32_golden, tmp_path / "report")
    assert result.exit_code == 2
    assert "exists: expected a new or empty folder" in result.stderr
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["mine.txt"]
