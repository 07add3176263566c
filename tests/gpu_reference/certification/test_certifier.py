"""`mm2-gpu certify`: a golden passes, every tampered one fails by name, and a comparison says which it was."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import change_tensor, sign

from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from gpu_reference.certification.certifier import find_broken_versions
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import IncomparableError
from minimax_tools.model.sites import Site
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

Change = Callable[[torch.Tensor], torch.Tensor]
Certify = Callable[..., tuple[int, dict[str, Any]]]

NEEDS_MODEL = {"same_model", "rotary_width", "router_choice", "reference_layer"}


@pytest.fixture
def tampered(golden: Path, tmp_path: Path) -> Path:
    """A copy of the golden to tamper with, not certified."""
    directory = Path(shutil.copytree(golden, tmp_path / "tampered"))
    manifest = replace(Manifest.read(directory), certificate=None)
    (directory / MANIFEST_NAME).write_text(manifest.as_text())
    return directory


@pytest.fixture
def certify(command: Any, toy: Path) -> Certify:
    """Exit code, and the outcome of each check by name."""

    def run(directory: Path, *, model: Path | None = toy) -> tuple[int, dict[str, Any]]:
        named = () if model is None else ("--model", model)
        result = command(mm2_gpu, "certify", "--golden", directory, *named, "--json", "--quiet")
        certificate = json.loads(result.stdout)["certificate"]
        return result.exit_code, {check["name"]: check for check in certificate["checks"]}

    return run


def change(directory: Path, file: str, site: Site, how: Change) -> None:
    """Change a stored tensor, and note its new digest."""
    change_tensor(directory, f"{file}.safetensors", str(site), how)
    sign(directory, with_statistics=True)


def failed(checks: dict[str, Any]) -> set[str]:
    return {name for name, check in checks.items() if check["outcome"] == "failed"}


def test_a_golden_passes_every_check(certify: Certify, tampered: Path) -> None:
    code, checks = certify(tampered)
    assert code == 0
    assert {check["outcome"] for check in checks.values()} == {"passed"}
    assert checks["reference_layer"]["figure"] < 1e-5
    assert Manifest.read(tampered).is_certified


def test_without_the_model_what_it_takes_is_named(certify: Certify, tampered: Path) -> None:
    code, checks = certify(tampered, model=None)
    assert code == 0
    assert {name for name, check in checks.items() if check["outcome"] == "not checked"} == NEEDS_MODEL


def test_a_certificate_changes_nothing_else_and_is_written_again_alike(
    certify: Certify, tampered: Path
) -> None:
    before = (tampered / MANIFEST_NAME).read_bytes()
    certify(tampered, model=None)
    once = (tampered / MANIFEST_NAME).read_bytes()
    certify(tampered, model=None)
    assert (tampered / MANIFEST_NAME).read_bytes() == once != before
    assert replace(Manifest.read(tampered), certificate=None).as_text().encode() == before


def test_a_flipped_byte_is_found(certify: Certify, tampered: Path) -> None:
    path = tampered / "layer_2.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    code, checks = certify(tampered, model=None)
    assert code == 1
    assert "digests" in failed(checks)
    assert "of layer 2 in layer_2.safetensors does not match its manifest" in checks["digests"]["found"]


def test_a_file_that_is_cut_off_is_found(certify: Certify, tampered: Path) -> None:
    path = tampered / "layer_1.fp32.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    code, checks = certify(tampered)
    assert (code, failed(checks)) == (1, {"digests"})


def test_a_wrong_rotary_width_is_found(certify: Certify, tampered: Path) -> None:
    def rotate_all(rope: torch.Tensor) -> torch.Tensor:
        return torch.cat((rope[..., :32], rope[..., 32:].roll(1, dims=-1)), dim=-1)

    for file in ("layer_1", "layer_1.fp32"):
        change(tampered, file, Site.Q_ROPE, rotate_all)
    code, checks = certify(tampered)
    assert code == 1
    assert {"rotary_width", "reference_layer", "bf16_noise"} <= failed(checks)
    found = checks["rotary_width"]["found"]
    assert "q_rope of layer 1 rotates 64 dims of a head, config.json says 32" in found


def test_norms_of_single_heads_are_found_without_the_model(certify: Certify, tampered: Path) -> None:
    before = Capture.open(tampered).read(0, Site.Q_PROJ).float()

    def per_head(normed: torch.Tensor) -> torch.Tensor:
        heads = before.unflatten(-1, (-1, 64))
        whole, own = (heads.pow(2).mean(dims, keepdim=True).rsqrt() for dims in ((-2, -1), -1))
        return (normed.float().unflatten(-1, (-1, 64)) / whole * own).flatten(-2).to(normed.dtype)

    change(tampered, "layer_0", Site.Q_NORM, per_head)
    code, checks = certify(tampered, model=None)
    assert code == 1
    assert "qk_norm_width" in failed(checks)


@pytest.mark.parametrize(
    ("site", "factor", "found_by"),
    [
        (Site.MOE_DELTA, 1.01, {"bf16_scale", "noise_floor"}),
        (Site.Q_PROJ, 1.02, {"bf16_scale", "bf16_noise", "noise_floor"}),
    ],
)
def test_a_site_that_is_one_part_in_a_hundred_larger_is_found(
    certify: Certify, tampered: Path, site: Site, factor: float, found_by: set[str]
) -> None:
    change(tampered, "layer_1", site, lambda tensor: tensor * factor)
    code, checks = certify(tampered, model=None)
    assert (code, failed(checks)) == (1, found_by)


def test_a_small_error_of_a_twin_is_found(certify: Certify, tampered: Path) -> None:
    change(tampered, "layer_3.fp32", Site.MOE_DELTA, lambda delta: delta * 1.0001)
    code, checks = certify(tampered)
    assert (code, failed(checks)) == (1, {"reference_layer", "noise_floor"})
    assert "moe_delta of layer 3" in checks["reference_layer"]["found"]


def test_experts_that_the_bias_does_not_choose_are_found(certify: Certify, tampered: Path) -> None:
    change(tampered, "layer_1", Site.ROUTER_EXPERTS, lambda experts: (experts + 1) % 32)
    code, checks = certify(tampered)
    assert code == 1
    assert "router_choice" in failed(checks)


@pytest.mark.parametrize(("row", "is_found"), [((1, 5), True), ((1, 40), False)])
def test_nan_is_found_on_real_rows_alone(
    certify: Certify, tampered: Path, row: tuple[int, int], *, is_found: bool
) -> None:
    # The second row has 33 tokens.
    def plant(tensor: torch.Tensor) -> torch.Tensor:
        tensor[row] = torch.nan
        return tensor

    change(tampered, "layer_0", Site.ATTN_DELTA, plant)
    code, checks = certify(tampered, model=None)
    assert (code == 1) == is_found
    assert ("no_nan" in failed(checks)) == is_found


def test_versions_known_to_be_broken_are_found(certify: Certify, tampered: Path) -> None:
    path = tampered / MANIFEST_NAME
    record = json.loads(path.read_text())
    record["provenance"]["versions"]["transformers"] = "5.17.0"
    record["provenance"]["dtypes"]["correction_bias"] = "bfloat16"
    path.write_text(json.dumps(record))
    code, checks = certify(tampered, model=None)
    assert (code, failed(checks)) == (1, {"versions", "float32_router"})
    assert "ignores rotary_dim" in checks["versions"]["found"]


def test_versions_are_compared_as_numbers() -> None:
    for broken in ("4.57.1", "5.23.0.dev0", "5.23rc1"):
        assert find_broken_versions({"transformers": broken}), broken
    for sound in ("5.23.0", "5.23.0+cu128", "5.23.1.dev0"):
        assert not find_broken_versions({"transformers": sound}), sound
    assert not find_broken_versions({"torch": "2.9.1"})


@pytest.mark.parametrize(("num_layers", "seed"), [(2, 0), (4, 1)])
def test_another_model_is_found(
    certify: Certify, tampered: Path, tmp_path: Path, num_layers: int, seed: int
) -> None:
    model = SyntheticModel(num_hidden_layers=num_layers)
    synthesize(tmp_path / "other", model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=seed)
    code, checks = certify(tampered, model=tmp_path / "other")
    assert (code, failed(checks)) == (1, {"same_model"})
    is_told_by_config = checks["same_model"]["found"] == "config.json describes another model"
    assert is_told_by_config == (num_layers == 2)
    assert checks["reference_layer"]["outcome"] == checks["rotary_width"]["outcome"] == "not checked"
    assert checks["reference_layer"]["found"] == "the model that was given is not the golden's"


def test_a_golden_without_twins_is_computed_once_more(
    certify: Certify, command: Any, toy: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "stats"
    arguments = ("--model", toy, "--seq-len", "12,7", "--noise-floor", "stats", "--output-dir", directory)
    command(mm2_gpu, "multi-layer", "--layers", "0:2", *arguments, "--quiet")
    code, checks = certify(directory)
    assert (code, failed(checks)) == (0, set())
    assert 0 < checks["reference_layer"]["figure"] < 1e-5


def test_a_golden_certifies_itself_where_it_is_asked_to(command: Any, toy: Path, tmp_path: Path) -> None:
    arguments = ("--model", toy, "--layer", 1, "--seq-len", "12", "--output-dir", tmp_path / "one", "--quiet")
    result = command(mm2_gpu, "single-layer", *arguments, "--certify")
    assert "certificate  14 of 14 checks passed" in result.stdout
    assert command(mm2_gpu, "single-layer", *arguments, "--certify", "--no-save").exit_code == 2


def test_a_comparison_says_what_its_golden_is_worth(
    certify: Certify, golden: Path, tampered: Path, toy: Path
) -> None:
    criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)

    def notes() -> str:
        sides = Capture.open(tampered), Capture.open(golden)
        return "; ".join(compare_captures(*sides, criteria=criteria, layer_pattern="layer_*").notes)

    assert f"the golden is not certified: mm2-gpu certify --model {toy} --golden {tampered}" in notes()
    certify(tampered, model=None)
    assert "certificate is partial; not checked: same_model" in notes()
    certify(tampered)
    assert "certif" not in notes()
    change(tampered, "layer_3", Site.OUTPUT, lambda output: output)
    assert "certif" not in notes()
    change(tampered, "layer_3", Site.OUTPUT, lambda output: output * 2)
    with pytest.raises(
        IncomparableError, match="golden .* was changed after it was certified: its certificate"
    ):
        notes()
    change(tampered, "layer_3", Site.OUTPUT, lambda output: output / 2)
    path = tampered / MANIFEST_NAME
    path.write_text(path.read_text().replace('"transformers": "', '"transformers": "4.'))
    certify(tampered, model=None)
    assert "the golden FAILED certification" in notes()


def test_a_device_run_is_no_golden(command: Any, tampered: Path) -> None:
    path = tampered / MANIFEST_NAME
    path.write_text(path.read_text().replace('"side": "gpu_reference"', '"side": "neuron"'))
    result = command(mm2_gpu, "certify", "--golden", tampered)
    assert result.exit_code == 3
    assert "is no golden" in result.stderr
