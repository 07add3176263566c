"""Goldens that belong together, and those that do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpu_reference.cli import main
from gpu_reference.export.vllm_neuron import open_golden_pair
from minimax_tools.errors import CaptureError, IncomparableError, UsageError


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Path:
    """A copy of the golden, to change."""
    return Path(shutil.copytree(golden, tmp_path / "copied"))


def change_manifest(directory: Path, change: Any) -> Path:
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return directory


def drop_certificate(manifest: dict[str, Any]) -> None:
    del manifest["certificate"]


def test_swapped_goldens_are_refused(golden: Path, float32_golden: Path) -> None:
    with pytest.raises(UsageError, match=r"--golden .* was not computed in bfloat16: .* found float32"):
        open_golden_pair(float32_golden, golden)


def test_golden_without_a_certificate_is_refused_unless_allowed(copied: Path, float32_golden: Path) -> None:
    change_manifest(copied, drop_certificate)
    with pytest.raises(IncomparableError, match=r"is not certified\. Certify it: .*--allow-uncertified"):
        open_golden_pair(copied, float32_golden)
    assert open_golden_pair(copied, float32_golden, allows_uncertified=True).inputs.lengths == (48, 33)


def test_golden_certified_without_its_model_is_refused_unless_allowed(
    copied: Path, float32_golden: Path, command: Any
) -> None:
    assert command(main, "certify", "--golden", copied, "--quiet").exit_code == 0
    with pytest.raises(IncomparableError, match="was certified without its model"):
        open_golden_pair(copied, float32_golden)
    open_golden_pair(copied, float32_golden, allows_uncertified=True)


@pytest.mark.parametrize("allows_uncertified", [False, True])
def test_void_certificate_is_refused_always(
    copied: Path, float32_golden: Path, allows_uncertified: bool
) -> None:
    change_manifest(copied, lambda manifest: manifest["entries"].pop())
    with pytest.raises(IncomparableError, match="was changed after it was certified"):
        open_golden_pair(copied, float32_golden, allows_uncertified=allows_uncertified)


@pytest.mark.parametrize("allows_uncertified", [False, True])
def test_failed_certificate_is_refused_always(
    copied: Path, float32_golden: Path, allows_uncertified: bool
) -> None:
    def fail(manifest: dict[str, Any]) -> None:
        manifest["certificate"]["checks"][0] |= {"outcome": "failed", "found": "a test"}

    change_manifest(copied, fail)
    with pytest.raises(IncomparableError, match=r"failed certification, .*: a test"):
        open_golden_pair(copied, float32_golden, allows_uncertified=allows_uncertified)


def test_incomplete_golden_is_refused(copied: Path, float32_golden: Path) -> None:
    change_manifest(copied, lambda manifest: manifest.update(complete=False))
    with pytest.raises(CaptureError, match="is incomplete"):
        open_golden_pair(copied, float32_golden)


def test_run_on_a_device_is_refused(copied: Path, float32_golden: Path) -> None:
    change_manifest(copied, lambda manifest: manifest.update(side="neuron"))
    with pytest.raises(IncomparableError, match=r"is no golden: expected a capture of mm2-gpu"):
        open_golden_pair(copied, float32_golden)


def change_tokens(manifest: dict[str, Any]) -> None:
    manifest["inputs_digest"] = "0" * 64


def drop_norms(manifest: dict[str, Any]) -> None:
    manifest["entries"] = [entry for entry in manifest["entries"] if entry["site"] != "q_norm"]


def change_model(manifest: dict[str, Any]) -> None:
    manifest["provenance"]["model"]["spec_digest"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_tokens, "tokens: "),
        (drop_norms, "one side alone holds q_norm of layer 0, "),
        (change_model, r"config\.json differs"),
    ],
)
def test_strangers_are_refused(change: Any, found: str, copied: Path, float32_golden: Path) -> None:
    change_manifest(change_manifest(copied, drop_certificate), change)
    with pytest.raises(IncomparableError, match=f"do not belong together: found {found}"):
        open_golden_pair(copied, float32_golden, allows_uncertified=True)
