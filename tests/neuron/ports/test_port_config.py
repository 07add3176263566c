"""A port's `mm2_neuron_config`, as its captures record it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from neuron.ports.nxdi import NxdiTarget
from neuron.ports.targets import find_target


class Layer:
    mm2_neuron_config: ClassVar[dict[str, object]] = {"cast_type": "as-declared", "dtype": torch.float32}


def test_options_of_the_class_come_after_those_of_its_module() -> None:
    module = ModuleType("port")
    module.mm2_neuron_config = {"cast_type": "config", "seq_len": 64}  # type: ignore[attr-defined]
    target = NxdiTarget(name="nxdi:port:Layer", factory=Layer, module=module, source_digest="")
    assert target.port_config == {"cast_type": "as-declared", "seq_len": 64, "dtype": torch.float32}


def test_options_of_a_class_of_torch_are_recorded_too(run: Any, write_port: Any, small: Path) -> None:
    target = write_port(
        'mm2_neuron_config = {"fused": True, "tile": 32}\n'
        'class Port(ReferenceLayer):\n    mm2_neuron_config = {"tile": 64}\n'
    )
    result = run(
        *("single-layer", "--layer", 0, "--model", small, "--target", target, "--backend", "cpu"),
        *("--seq-len", 8, "--json"),
    )
    assert result.exit_code == 0, result.output
    provenance = Capture.open(json.loads(result.stdout)["directory"]).description.provenance
    assert provenance.port_config == {"fused": True, "tile": 64}


def test_port_without_options_has_none() -> None:
    assert find_target("builtin").port_config == {}


def test_captures_record_the_values_of_config_json(
    run: Any, command: Any, toy: Path, golden: Path, tmp_path: Path
) -> None:
    config = json.loads((toy / "config.json").read_text())
    assert Capture.open(golden).description.provenance.model_config == config
    result = run(
        "single-layer", "--layer", 0, "--model", toy, "--golden", golden, "--backend", "cpu", "--json"
    )
    provenance = Capture.open(json.loads(result.stdout)["directory"]).description.provenance
    assert provenance.model_config == config
    assert provenance.port_config == {}
    shown = command(mm2_gpu, "show", golden, "--json")
    assert (
        json.loads(shown.stdout)["description"]["provenance"]["model_config"]["rope_theta"]
        == config["rope_theta"]
    )
