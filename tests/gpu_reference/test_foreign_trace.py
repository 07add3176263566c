"""A trace that transformers' own model debugger writes is read as a capture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.model_debugging_utils import model_addition_debugger_context

from compare.cli import main as mm2_compare
from gpu_reference.golden.golden import open_golden
from minimax_tools.capture.reader import Capture


def test_trace_of_the_golden_model_is_the_golden(
    ask: Any, golden: Path, command: Any, tmp_path: Path
) -> None:
    inputs = Capture.open(golden).read_inputs()
    with open_golden(ask()) as opened, torch.no_grad():
        with model_addition_debugger_context(
            opened.model, debug_path=str(tmp_path / "trace"), use_repr=False
        ):
            opened.model(**inputs.tensors())
    # The debugger leaves them changed.
    torch.set_printoptions(profile="default")
    result = command(mm2_compare, "--golden", golden, "--run", tmp_path / "trace", "--json", "--quiet")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    # Of modules with submodules it keeps no outputs, and rotated queries and keys are no module's.
    missing = {site["site"] for site in record["sites"] if site["status"] != "pass"}
    assert missing == {"q_rope", "k_rope", "moe_delta"}
    assert all(site["noise"]["whole"] <= 1.01 for site in record["sites"] if site.get("noise"))
