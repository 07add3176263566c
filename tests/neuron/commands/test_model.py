"""`mm2-test model`: a whole port, judged from its embedding to its tokens; what is wrong first, placed and named.

Each mistake of a whole port is planted by tests/test_planted_models.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test

TESTS = Path(__file__).parents[2]
PLANTED = TESTS / "ports" / "prompt_ports.py"
PASSES = TESTS.parent / "scripts" / "whole_ports" / "passes.py"

IMPORTS = f"""
import sys
sys.path.insert(0, {str(PLANTED.parent)!r})
import torch
from torch import nn
import prompt_ports
from prompt_ports import Model as Right
"""

RIGHT = """
class Model(Right):
    pass
"""

# transformers' own models have this name for their past since 5.24.
CACHE = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids, cache=None, **kwargs):
        assert not kwargs, kwargs
        logits, cache = super().forward(input_ids, attention_mask, position_ids, cache)
        return {"logits": logits, "cache": cache}
"""

# Takes the weights of all layers in one call.
WHOLE_CONVERSION = """
class Model(Right):
    def convert_state_dict(self, tensors, config):
        converted = super().convert_state_dict(
            {name: tensors[name] for name in tensors if "layers" not in name}, config, None
        )
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            own = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
            converted |= super().convert_state_dict(own, config, layer)
        return converted
"""

# Shows its layers' outputs itself, and lets nobody find a layer that runs alone.
HIDDEN = """
class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.hidden = [prompt_ports.SwappedGateUp(config)]

    def convert_state_dict(self, tensors, config, layer_idx):
        converted = self.hidden[0].convert_state_dict(tensors, config, layer_idx)
        self.hidden[0].load_state_dict(converted, strict=False)
        return {}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        states = []
        layers = self.hidden[0].model.layers
        hooks = [layer.register_forward_hook(lambda *call: states.append(call[2][0])) for layer in layers]
        logits, cache = self.hidden[0](input_ids, attention_mask, position_ids, past_key_values)
        for hook in hooks:
            hook.remove()
        sites = {f"layer_{index}.output": output for index, output in enumerate(states)}
        return {"logits": logits, "past_key_values": cache, "sites": sites}
"""

NAN_NORM = """
class Model(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
        return super().convert_state_dict(tensors, config, layer_idx)
"""

# Runs the prompts without their chunks: half the time.
WHOLE_PROMPTS = "--no-chunks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run of a whole port: its exit code, errors and JSON, and the folders of its capture and report."""

    exit_code: int
    stderr: str
    record: dict[str, Any]
    capture: Path
    report: Path

    @property
    def stored_inputs(self) -> list[int | None]:
        """The layers whose input is stored."""
        entries = Capture.open(self.capture).manifest.entries
        return [entry.layer for entry in entries if entry.site == "input"]


@pytest.fixture
def judge(command: Any, tmp_path: Path, on_small: tuple[object, ...]) -> Any:
    """Runs a whole port on the small model; a port is a `--target`, or the source of `Model`."""

    def run(port: str, *options: object, has_report: bool = False) -> Judged:
        if "\n" in port:
            (tmp_path / "whole_port.py").write_text(IMPORTS + port)
            port = f"{tmp_path / 'whole_port.py'}:Model"
        capture, report = tmp_path / "run", tmp_path / "report"
        output = ("--output-dir", capture, "--overwrite", "--json", "--quiet")
        words = ("model", *on_small, "--target", port, "--backend", "cpu", *output, *options)
        result = command(mm2_test, *words, *(("--report-path", report) if has_report else ()))
        record = json.loads(result.stdout)
        return Judged(
            exit_code=result.exit_code, stderr=result.stderr, record=record, capture=capture, report=report
        )

    return run


def assert_reported(run: Judged, told: str) -> None:
    """Assert that the report holds a text, and the same verdict and findings as the JSON."""
    assert told in (run.report / "report.md").read_text(encoding="utf-8")
    report = json.loads((run.report / "comparison_report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report.get("findings")) == (run.record["verdict"], run.record.get("findings"))


def place(finding: dict[str, Any]) -> tuple[int, int | None]:
    """Return the pass and the layer of a finding."""
    return finding["number"], finding["layer"]


@pytest.mark.parametrize(
    ("source", "options"),
    [(RIGHT, ()), (CACHE, (WHOLE_PROMPTS,)), (WHOLE_CONVERSION, (WHOLE_PROMPTS,))],
    ids=["right", "past by another name", "one conversion"],
)
def test_right_ports_pass_whole(judge: Any, source: str, options: tuple[object, ...]) -> None:
    run = judge(source, *options)
    assert (run.exit_code, run.record["verdict"]) == (0, "pass")
    assert (run.record["compared"], run.record["of"]) == (71, 71)
    assert "findings" not in run.record
    # An input is stored only where another layer did not make it.
    assert run.stored_inputs == [0]
    capture = Capture.open(run.capture)
    assert torch.equal(capture.read(2, Site.INPUT), capture.read(1, Site.OUTPUT))


def test_layers_out_of_order_are_named_and_their_inputs_stored(judge: Any) -> None:
    run = judge(f"{PASSES}:LayersOutOfOrder", WHOLE_PROMPTS)
    assert run.exit_code == 1
    first = run.record["findings"][0]
    assert (place(first), first["mistake"]) == ((0, 1), "layers_out_of_order")
    # Layers 1 to 3 each get the output of another layer than the one before.
    assert run.stored_inputs == [0, 1, 2, 3]


@pytest.mark.slow
def test_the_suspect_layer_runs_alone_and_its_mistake_is_named(judge: Any) -> None:
    run = judge(f"{PLANTED}:SwappedGateUp", has_report=True)
    assert (run.exit_code, run.record["verdict"]) == (1, "fail")
    first = run.record["findings"][0]
    assert (place(first), first["sites"], first["mistake"]) == ((0, 2), ["moe_delta"], "gate_up_swapped")
    assert run.record["isolated"]["verdict"] == "fail"
    assert run.record["isolated"]["blame"][0]["layer"] == 2
    assert_reported(run, r"layer 2, moe\_delta")


def test_a_mistake_of_decoding_is_placed_at_its_first_step(judge: Any) -> None:
    run = judge(f"{PLANTED}:RestartedPositions", WHOLE_PROMPTS, has_report=True)
    assert run.exit_code == 1
    first, *others = run.record["findings"]
    assert place(first) == (1, 0)
    assert first["sites"] in (["q_rope"], ["k_rope"])
    assert 0 not in [other["number"] for other in others]
    assert_reported(run, "To blame")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "told"), [("LayerSkipped", "layer 2"), ("WrongRowSampled", "To blame")])
def test_report_can_be_written_of_other_mistakes_too(judge: Any, name: str, told: str) -> None:
    run = judge(f"{PASSES}:{name}", has_report=True)
    assert run.exit_code == 1
    assert_reported(run, told)


def test_nan_is_blamed_where_it_arises_and_not_on_earlier_prompts(judge: Any) -> None:
    run = judge(NAN_NORM)
    assert run.exit_code == 1
    assert [finding["sites"] for finding in run.record["findings"]] == [["final_norm"]]


def test_a_port_without_a_past_says_what_decoding_needs(judge: Any) -> None:
    source = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids):
        return super().forward(input_ids, attention_mask, position_ids)[0]
"""
    refused = judge(source)
    assert refused.exit_code == 3
    assert "cannot decode: its forward does not accept past_key_values" in refused.stderr
    run = judge(source, "--decode", 0)
    assert (run.exit_code, run.record["verdict"]) == (0, "pass")


def test_a_port_that_hides_its_layers_is_judged_and_none_runs_alone(judge: Any) -> None:
    run = judge(HIDDEN, WHOLE_PROMPTS)
    assert run.exit_code == 1
    assert run.record["findings"][0]["layer"] == 2
    assert run.record["isolated"] is None


def test_a_port_that_shows_no_layer_is_judged_by_its_logits(judge: Any) -> None:
    right = judge(f"{PLANTED}:Closed", has_report=True)
    assert (right.exit_code, right.record["verdict"]) == (0, "pass")
    assert (right.record["compared"], right.record["of"]) == (1, 71)
    assert_reported(right, "Not exposed by the port")
    wrong = judge(f"{PLANTED}:ClosedInDecoding")
    assert (wrong.exit_code, wrong.record["verdict"]) == (1, "fail")
    (found,) = wrong.record["findings"]
    assert found["number"] >= 1
    assert found["sites"] == ["logits"]


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        # Each layer's weights under the names of layer 0.
        (
            "{n.replace(f'layers.{layer_idx}.', 'layers.0.'): t for n, t in found.items()}",
            "the same weight twice",
        ),
        ("{} if layer_idx == 3 else found", "missing"),
        ("found | {'model.extra': torch.zeros(1)}", "unexpected: model.extra"),
    ],
)
def test_weights_that_do_not_fit_are_named(judge: Any, returned: str, error: str) -> None:
    run = judge(f"""
class Model(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        found = dict(super().convert_state_dict(tensors, config, layer_idx))
        return {returned}
""")
    assert run.exit_code == 3
    assert error in run.stderr
