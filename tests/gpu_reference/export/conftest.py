"""Goldens to export, and reports written from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpu_reference.cli import main

MakePair = Callable[..., tuple[Path, Path]]


def run(*words: object) -> None:
    result = CliRunner().invoke(main, [*map(str, words), "--quiet"])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="session")
def float32_golden(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 golden of the same tokens as `golden`, certified."""
    directory = tmp_path_factory.mktemp("float32") / "full_model"
    words = ("extract-all", "--model", toy, "--seq-len", "48,33", "--output-dir", directory)
    run(*words, "--dtype", "float32", "--certify")
    return directory


@pytest.fixture(scope="session")
def make_pair(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """Makes goldens of the same tokens in both dtypes, not certified: of layer 0, unless a command says otherwise."""

    def make(
        *options: object, command: tuple[object, ...] = ("single-layer", "--layer", 0)
    ) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("pair")
        for dtype in ("bfloat16", "float32"):
            words = ("--model", toy, "--output-dir", folder / dtype, "--dtype", dtype, *options)
            run(*command, *words, "--noise-floor", "off")
        return folder / "bfloat16", folder / "float32"

    return make


@pytest.fixture(scope="session")
def report(golden: Path, float32_golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of both certified goldens; the last two tokens of each row were decoded."""
    output = tmp_path_factory.mktemp("report") / "accuracy_report"
    goldens = ("--golden", golden, "--float32-golden", float32_golden)
    run("export", "--format", "vllm-neuron", *goldens, "--decode", 2, "--output-dir", output)
    return output
