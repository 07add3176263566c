from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minimax_tools.cli import mm2_split
from minimax_tools.model.spec import ModelSpec

SMALL = (
    *("--num-hidden-layers", 1, "--hidden-size", 64, "--num-attention-heads", 2, "--num-key-value-heads", 1),
    *("--head-dim", 32, "--rotary-dim", 16, "--num-local-experts", 4, "--num-experts-per-tok", 2),
    *("--intermediate-size", 32, "--batch-size", 2, "--seq-len", 32, "--num-threads", 1),
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(mm2_split, ["train", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("\n".join(f"Line {number} of a text, {number % 7} in its week." for number in range(900)))
    return path


def test_two_copies_are_written_and_the_model_is_told_about(text: Path, tmp_path: Path) -> None:
    folders = (tmp_path / "learned", tmp_path / "learned_fp8")
    result = run("--output", folders[0], "--fp8-output", folders[1], "--text", text, "--steps", 3, *SMALL)
    assert result.exit_code == 0, result.output
    assert ModelSpec.from_folder(folders[1]).digest() == ModelSpec.from_folder(folders[0]).digest()
    assert "quantization_config" in json.loads((folders[1] / "config.json").read_text())
    assert "3 steps, 192 tokens" in result.stdout
    assert "bits per byte" in result.stdout
    assert "with the experts of another token" in result.stdout


def test_json_holds_the_record(text: Path, tmp_path: Path) -> None:
    result = run("--output", tmp_path / "learned", "--text", text, "--steps", 2, *SMALL, "--json")
    record = json.loads(result.stdout)
    assert record["folders"] == [str(tmp_path / "learned")]
    assert record["options"]["learning_rate"] == 0.5 / 64
    assert record["model"]["num_local_experts"] == 4
    assert record["machine"]["num_threads"] == 1
    assert len(record["after"]["layers"]) == 1


def test_steps_and_minutes_exclude_each_other(text: Path, tmp_path: Path) -> None:
    result = run("--output", tmp_path / "learned", "--text", text, "--steps", 2, "--minutes", 1)
    assert result.exit_code == 2
    assert "--steps and --minutes exclude each other" in result.stderr


def test_widths_that_fp8_cannot_store_are_refused_before_the_training(text: Path, tmp_path: Path) -> None:
    result = run(
        *("--output", tmp_path / "learned", "--text", text, "--steps", 10**9, "--storage", "fp8", *SMALL),
        *("--hidden-size", 192),
    )
    assert result.exit_code == 2
    assert "do not fit FP8's blocks" in result.stderr
    assert not (tmp_path / "learned").exists()
