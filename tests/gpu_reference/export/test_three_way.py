"""Three-way comparison with exported goldens as references, by the definition in vLLM Neuron's documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.opening import open_source
from neuron.cli import main as mm2_test

sys.path.insert(0, str(Path(__file__).parents[2]))

from three_way import LIMIT, MODULES, measure_ratios, write_engine_captures

REPOSITORY = Path(__file__).parents[3]
RIGHT = REPOSITORY / "scripts" / "examples" / "port.py"
WRONG = REPOSITORY / "tests" / "ports" / "one_wrong_layer.py"
ROUNDED = REPOSITORY / "tests" / "ports" / "planted.py"

NUM_DECODED = 2

Run = Callable[..., Path]


@pytest.fixture(scope="session")
def run_port(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a port's layers in a chain and writes its captures as a serving engine does: `run(TARGET)`."""
    from click.testing import CliRunner

    @cache
    def run(target: str) -> Path:
        folder = tmp_path_factory.mktemp("port")
        named = ["--model", str(toy), "--golden", str(golden), "--target", target]
        options = ["--backend", "cpu", "--output-dir", str(folder / "capture"), "--quiet"]
        result = CliRunner().invoke(mm2_test, ["full", *named, *options])
        assert result.exit_code in (0, 1), result.output
        source = Capture.open(folder / "capture")
        write_engine_captures(folder / "engine", source, num_decoded=NUM_DECODED)
        return folder / "engine"

    return run


def test_right_port_is_as_good_as_the_golden(report: Path, run_port: Run) -> None:
    found = measure_ratios(report, run_port(f"{RIGHT}:DecoderLayer"))
    assert len(found) == 4 * len(MODULES) + 2
    assert torch.all(found.pop("model.embed_tokens") == 0)
    for module, values in found.items():
        assert 0.85 < values.median() < 1.15, module
    of_layers = torch.cat([values for module, values in found.items() if ".layers." in module])
    # Where the port alone chooses another expert than float32 does, its ratio is far above any limit.
    assert (of_layers > LIMIT).float().mean() < 0.03


def test_mistake_is_seen_in_its_layer(report: Path, run_port: Run) -> None:
    found = measure_ratios(report, run_port(f"{WRONG}:SwappedGateUp_at_2"))
    assert found["model.layers.2.mlp"].median() > LIMIT
    assert (found["model.layers.2.mlp"] > LIMIT).float().mean() > 0.5
    for module in ("model.layers.2.self_attn", "model.layers.2.mlp.gate", "model.layers.1.mlp"):
        assert found[module].median() < 1.15, module


def test_baseline_with_a_rounded_router_is_seen_and_hides_the_mistake(report: Path, run_port: Run) -> None:
    rounded = run_port(f"{ROUNDED}:RoundedRouter")
    # It chooses other experts for many tokens, in the first layer already.
    assert (measure_ratios(report, rounded)["model.layers.0.mlp"] > LIMIT).float().mean() > 0.3
    wrong = run_port(f"{WRONG}:SwappedGateUp_at_2")
    own, hidden = measure_ratios(report, wrong), measure_ratios(report, wrong, baseline=rounded)
    assert hidden["model.layers.2.mlp"].median() < 2 < own["model.layers.2.mlp"].median() / 4
    assert hidden["lm_head"].median() < 1 < own["lm_head"].median() / 2


def test_mm2_passes_the_exported_golden(toy: Path, tmp_path: Path, make_pair: Any, command: Any) -> None:
    """An export of one prompt, judged as a port's dump."""
    from compare.cli import main as mm2_compare
    from gpu_reference.cli import main as mm2_gpu

    bfloat16, float32 = make_pair("--seq-len", 12, command=("extract-all",))
    named = ("--golden", bfloat16, "--float32-golden", float32, "--output-dir", tmp_path / "report")
    command(mm2_gpu, "export", "--format", "vllm-neuron", *named, "--allow-uncertified")
    dump = tmp_path / "report/prompt_analysis/prompt_0/tensor_compare/hf_bf16"
    result = command(mm2_compare, "--golden", bfloat16, "--run", dump, "--model", toy, "--json")
    assert json.loads(result.stdout)["verdict"] == "pass", result.output
    assert open_source(dump).layers == (0, 1, 2, 3)
