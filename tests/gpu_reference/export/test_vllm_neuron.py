"""Files as vLLM Neuron's debugger reads them, mm2's own reading of them, and the goldens that may be exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main
from gpu_reference.export.vllm_neuron import SiteModules, open_golden_pair
from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import open_source
from minimax_tools.errors import CaptureError, IncomparableError, UsageError
from minimax_tools.model.sites import ModelSite, Site

Manifest = dict[str, Any]


@pytest.fixture
def export(command: Any, tmp_path: Path) -> Callable[..., Any]:
    """Exports a pair of goldens into `report`."""

    def run(golden: Path, float32_golden: Path, *options: object) -> Any:
        named = ("--golden", golden, "--float32-golden", float32_golden, "--output-dir", tmp_path / "report")
        return command(main, "export", "--format", "vllm-neuron", *named, *options)

    return run


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_each_prompt_has_its_passes(report: Path) -> None:
    passes = (
        ["decode_b47_0", "decode_b48_0", "prefill_s46_0"],
        ["decode_b32_0", "decode_b33_0", "prefill_s31_0"],
    )
    for prompt, expected in enumerate(passes):
        for captures in ("hf_fp32", "hf_bf16"):
            folder = report / f"prompt_analysis/prompt_{prompt}/tensor_compare/{captures}/dp0"
            assert sorted(path.name for path in folder.iterdir()) == expected
    meta = folder / "decode_b32_0/decode_b32_0_meta.json"
    assert json.loads(meta.read_text()) == {"req_ids": ["0"], "positions": list(range(32)), "dp_rank": 0}


@pytest.mark.parametrize(("captures", "dtype"), [("hf_bf16", torch.bfloat16), ("hf_fp32", torch.float32)])
def test_value_is_the_goldens_bit_for_bit(
    report: Path, golden: Path, float32_golden: Path, captures: str, dtype: torch.dtype
) -> None:
    source = Capture.open(golden if dtype == torch.bfloat16 else float32_golden)
    folder = report / "prompt_analysis/prompt_1/tensor_compare" / captures / "dp0"
    sites = {"self_attn": Site.ATTN_DELTA, "mlp": Site.MOE_DELTA, "self_attn.q_norm": Site.Q_NORM}
    for module, site in sites.items():
        for name, length in (("prefill_s31_0", 31), ("decode_b32_0", 32)):
            value = load(folder / name / f"model.layers.2.{module}" / "rank0.pt")
            assert value.dtype == dtype
            assert torch.equal(value, source.read(2, site)[1:2, :length])
    logits = load(folder / "prefill_s31_0/lm_head/rank0.pt")
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


def test_goldens_padded_on_the_left_give_the_same_files(export: Any, make_pair: Any, tmp_path: Path) -> None:
    goldens = make_pair("--seq-len", "9,6", "--padding-side", "left")
    assert export(*goldens, "--allow-uncertified").exit_code == 0
    source = Capture.open(goldens[0])
    folder = tmp_path / "report/prompt_analysis/prompt_1"
    value = load(folder / "tensor_compare/hf_bf16/dp0/prefill_s6_0/model.layers.0.mlp/rank0.pt")
    assert torch.equal(value, source.read(0, Site.MOE_DELTA)[1:2, 3:])
    keys, _ = load(folder / "kv_analysis/hf_kv.pt")["layers.0.self_attn"]
    assert torch.equal(keys, source.read(0, Site.K_ROPE)[1:2, :, 3:].float())


def test_goldens_without_caches_say_so(export: Any, make_pair: Any, tmp_path: Path) -> None:
    result = export(*make_pair("--seq-len", 6, "--sites", "component"), "--allow-uncertified")
    assert result.exit_code == 0
    assert "none: the goldens do not hold k_rope and v_proj" in result.stdout
    assert not list((tmp_path / "report").rglob("*kv*"))


def test_rows_that_no_engine_serves_are_refused(export: Any, make_pair: Any) -> None:
    result = export(*make_pair("--seq-len", 6, "--start-positions", 100), "--allow-uncertified")
    assert result.exit_code == 2
    assert "begins at position 100: expected rows that begin at position 0" in result.stderr


def test_port_with_other_names_finds_its_modules(
    export: Any, golden: Path, float32_golden: Path, tmp_path: Path
) -> None:
    option = "moe_delta=model.layers.{layer}.block_sparse_moe"
    modules = json.loads(export(golden, float32_golden, "--module", option, "--json").stdout)["modules"]
    assert "model.layers.3.block_sparse_moe" in modules
    assert "model.layers.3.mlp" not in modules
    folder = tmp_path / "report/prompt_analysis/prompt_0/tensor_compare/hf_fp32/dp0/prefill_s48_0"
    assert sorted(modules) == sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_default_names_are_those_of_transformers_own_model() -> None:
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    config = MiniMaxM2Config(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_local_experts=2,
        num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    )  # fmt: skip
    modules = dict(MiniMaxM2ForCausalLM(config).named_modules())
    usual = SiteModules()
    assert {usual.find(site, 1) for site in usual.paths} <= modules.keys()


def test_port_may_name_a_module_otherwise() -> None:
    named = SiteModules.parse(["moe_delta=model.layers.{layer}.block_sparse_moe", "final_norm = model.final"])
    assert named.find(Site.MOE_DELTA, 7) == "model.layers.7.block_sparse_moe"
    assert named.find(ModelSite.FINAL_NORM, None) == "model.final"
    assert named.find(Site.Q_ROPE, 7) is None
    assert named.find(Site.POST_NORM, 7) == "model.layers.7.post_attention_layernorm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q_rope=model.layers.{layer}.rope", "'q_rope' is not the first output of a module"),
        ("moe_delta", "names no module of moe_delta"),
        ("moe_delta=model.layers.3.mlp", "names no module of moe_delta"),
        ("logits=model.layers.{layer}.head", "names no module of logits"),
        ("moe_delta=../{layer}", "names no module of moe_delta"),
        ("moe_delta=a/{layer}", "names no module of moe_delta"),
        ("moe_delta=model.layers.{layer}", "gives moe_delta and output one module"),
    ],
)
def test_name_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SiteModules.parse([text])


def test_decoding_must_leave_a_prompt(
    export: Any, golden: Path, float32_golden: Path, tmp_path: Path
) -> None:
    result = export(golden, float32_golden, "--decode", 33)
    assert result.exit_code == 2
    assert "--decode 33 leaves no prompt of row 1: found 33 tokens" in result.stderr
    assert not (tmp_path / "report").exists()


def test_nothing_is_overwritten(export: Any, golden: Path, float32_golden: Path, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "mine.txt").write_text("mine")
    result = export(golden, float32_golden)
    assert result.exit_code == 2
    assert "exists: expected a new or empty folder" in result.stderr
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["mine.txt"]


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Path:
    """A copy of the golden, to change."""
    return Path(shutil.copytree(golden, tmp_path / "copied"))


def test_damaged_golden_is_not_exported(
    export: Any, copied: Path, float32_golden: Path, tmp_path: Path
) -> None:
    path = copied / "layer_2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = export(copied, float32_golden)
    assert result.exit_code == 3
    assert "was damaged or changed after it was" in result.stderr
    assert not (tmp_path / "report").exists()


def drop_certificate(manifest: Manifest) -> None:
    del manifest["certificate"]


def drop_entry(manifest: Manifest) -> None:
    del manifest["entries"][-1]


def fail(manifest: Manifest) -> None:
    manifest["certificate"]["checks"][0] |= {"outcome": "failed", "found": "a test"}


def end_early(manifest: Manifest) -> None:
    manifest["complete"] = False


def move_to_device(manifest: Manifest) -> None:
    manifest["side"] = "neuron"


def change_tokens(manifest: Manifest) -> None:
    drop_certificate(manifest)
    manifest["inputs_digest"] = "0" * 64


def drop_norms(manifest: Manifest) -> None:
    drop_certificate(manifest)
    manifest["entries"] = [entry for entry in manifest["entries"] if entry["site"] != "q_norm"]


def change_model(manifest: Manifest) -> None:
    drop_certificate(manifest)
    manifest["provenance"]["model"]["spec_digest"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "is_allowed", "error", "message"),
    [
        (drop_certificate, False, IncomparableError, r"is not certified\. Certify it: .*--allow-uncertified"),
        (drop_entry, False, IncomparableError, "was changed after it was certified"),
        (drop_entry, True, IncomparableError, "was changed after it was certified"),
        (fail, False, IncomparableError, "failed certification, .*: a test"),
        (fail, True, IncomparableError, "failed certification, .*: a test"),
        (end_early, False, CaptureError, "is incomplete"),
        (move_to_device, False, IncomparableError, "is no golden: expected a capture of mm2-gpu"),
        (change_tokens, True, IncomparableError, "do not belong together: found tokens: "),
        (
            drop_norms,
            True,
            IncomparableError,
            "do not belong together: found one side alone holds q_norm of layer 0, ",
        ),
        (change_model, True, IncomparableError, r"do not belong together: found config\.json differs"),
    ],
)
def test_golden_that_is_no_partner_is_refused(
    copied: Path, float32_golden: Path, change: Any, is_allowed: bool, error: type[Exception], message: str
) -> None:
    path = copied / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(error, match=message):
        open_golden_pair(copied, float32_golden, allows_uncertified=is_allowed)


def test_uncertified_goldens_pass_where_they_are_allowed(
    copied: Path, float32_golden: Path, make_pair: Any, command: Any
) -> None:
    pair = open_golden_pair(*make_pair("--seq-len", "9,6"), allows_uncertified=True)
    assert pair.inputs.lengths == (9, 6)
    assert command(main, "certify", "--golden", copied, "--quiet").exit_code == 0
    with pytest.raises(IncomparableError, match="was certified without its model"):
        open_golden_pair(copied, float32_golden)
    open_golden_pair(copied, float32_golden, allows_uncertified=True)


def test_swapped_goldens_are_refused(golden: Path, float32_golden: Path) -> None:
    with pytest.raises(UsageError, match=r"--golden .* was not computed in bfloat16: .* found float32"):
        open_golden_pair(float32_golden, golden)
