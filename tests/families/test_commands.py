"""Commands that take checkpoints apart, and those that say what a machine can do, on each family's toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.cli import mm2_split
from minimax_tools.model.architecture import ARCHITECTURES
from minimax_tools.model.family import Family
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import float32_names
from minimax_tools.split.factory import ModelFactory
from minimax_tools.synthetic.toy_model import PRESETS
from neuron.cli import main as mm2_test

ROWS = ("--seq-len", "8")
NODES = ("--node", "a:memory=1GB,layers=0:1", "--node", "b:memory=1GB,layers=1:4", "--planner", "manual")


def test_slices_are_planned_cut_and_proved(command: Any, made: Path, tmp_path: Path) -> None:
    plan, slices = tmp_path / "plan.json", tmp_path / "slices"
    for words in (
        ("plan", "--model", made, *NODES, "--output", plan),
        ("extract", "--plan", plan, "--all-nodes", "--output", slices),
        ("verify", "--plan", plan, "--slices", slices),
    ):
        done = command(mm2_split, *words, "--quiet")
        assert done.exit_code == 0, done.output


def test_a_planned_golden_reads_its_slice_once(command: Any, made: Path, tmp_path: Path) -> None:
    plan, golden = tmp_path / "plan.json", tmp_path / "golden"
    for main, *words in (
        (mm2_split, "plan", "--model", made, "--node", "a:memory=1GB", "--output", plan),
        (mm2_gpu, "extract-all", "--plan", plan, *ROWS, "--noise-floor", "off", "--output-dir", golden),
        (mm2_split, "verify", "--plan", plan, "--records", golden),
    ):
        done = command(main, *words, "--quiet")
        assert done.exit_code == 0, done.output


def test_a_plan_counts_what_is_loaded_in_float32(command: Any, made: Path, spec: ModelSpec) -> None:
    done = command(mm2_split, "plan", "--model", made, *NODES, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    nodes = json.loads(done.stdout)["nodes"]
    # The toy is stored as it is loaded in BF16: a router that is float32 stays so.
    assert all(part["cost"]["loaded_bytes"] == part["cost"]["stored_bytes"] for part in nodes)
    assert bool(float32_names(spec.graph)) == spec.graph.has_float32_router


def test_parts_chain_to_the_goldens_logits(family: Family, made: Path, capture: Capture) -> None:
    assert family.model_type in ARCHITECTURES
    inputs = capture.read_inputs()
    states = inputs.input_ids
    with torch.no_grad():
        for part in ModelFactory.create_split_models(family.model_type, str(made), 1, 3):
            states = part(states, inputs.attention_mask)
    real = inputs.attention_mask.bool()
    assert torch.equal(states[real], capture.read(None, ModelSite.LOGITS)[real])


def test_memory_is_listed(command: Any, made: Path) -> None:
    done = command(mm2_split, "memory", "--model", made, "--quiet")
    assert done.exit_code == 0, done.output


def test_machines_are_checked_for_the_toy_and_for_the_true_size(
    command: Any, family: Family, made: Path
) -> None:
    for main in (mm2_gpu, mm2_test):
        done = command(main, "check", "--model", made, "--json", "--quiet")
        assert done.exit_code == 0, done.output
        # The toy's router is stored as its family has it.
        assert "router" not in {finding["subject"] for finding in json.loads(done.stdout)["findings"]}
    words = ("check", "--preset", family.preset, "--gpus", "16x80GB", "--memory", "2TB")
    ways = json.loads(command(mm2_gpu, *words, "--json", "--quiet").stdout)["ways"]
    assert ways[0]["works"]
    # At least the weights lie on the GPUs.
    spec = PRESETS[family.preset].spec()
    experts = 3 * spec.hidden_size * spec.intermediate_size * spec.num_local_experts
    num_routed = spec.num_hidden_layers - len(spec.graph.dense_layers)
    assert ways[0]["needed_bytes"] > 2 * experts * num_routed
