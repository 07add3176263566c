"""`mm2-test model`: a whole port, judged from its embedding to its tokens; what is wrong first, placed and named."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"

COMMON = ("--backend", "cpu", "--json", "--quiet")

IMPORTS = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch
from torch import nn
from model_port import Model as Right
"""

SWAPPED = """
class Model(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx == 2:
            tensors = tensors.copy()
            for expert in range(config.num_local_experts):
                gate, up = (f"block_sparse_moe.experts.{expert}.{name}.weight" for name in ("w1", "w3"))
                tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return super().convert_state_dict(tensors, config, layer_idx)
"""

# The forward of the right port, with the layers in another order.
ORDERED = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        states = self.model.embed_tokens(input_ids)
        cache = [None] * len(self.model.layers)
        for index in {order}:
            past = None if past_key_values is None else past_key_values[index]
            states, cache[index] = self.model.layers[index](
                states, attention_mask, position_ids, past_key_value=past
            )
        return self.lm_head(self.model.norm(states)), [kept or cache[0] for kept in cache]
"""

RESTARTED = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        if past_key_values is not None:
            position_ids = torch.zeros_like(position_ids)
        return super().forward(input_ids, attention_mask, position_ids, past_key_values)
"""

WRONG_ROW = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return {"logits": logits, "past_key_values": cache, "tokens": logits[:, -1].argmax(-1)}
"""

# transformers' own models have this name for their past since 5.24.
CACHE = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids, cache=None, **kwargs):
        assert not kwargs, kwargs
        logits, cache = super().forward(input_ids, attention_mask, position_ids, cache)
        return {"logits": logits, "cache": cache}
"""

LIVE_PADDING = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache = super().forward(input_ids, attention_mask, position_ids, past_key_values)
        return torch.cat((logits, torch.full_like(logits[..., :8], PADDING)), dim=-1), cache
"""

HEAD_ROWS = """
class Model(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            weight = tensors["lm_head.weight"].clone()
            weight[[3, 7]] = weight[[7, 3]]
            tensors["lm_head.weight"] = weight
        return super().convert_state_dict(tensors, config, layer_idx)
"""

# Keeps its cache itself, and lets tokens of the prompts before stay visible.
STALE = """
class Model(Right):
    keeps_cache = True

    def __init__(self, config):
        super().__init__(config)
        self.kept, self.mask = None, None

    def forward(self, input_ids, attention_mask, position_ids):
        begins_anew = position_ids.shape[1] > 1
        if self.kept is None or (begins_anew and RESETS):
            self.kept, self.mask = None, torch.zeros_like(attention_mask[:, :0])
        new = attention_mask[:, -input_ids.shape[1]:]
        self.mask = torch.cat((self.mask, new), dim=1)
        logits, self.kept = super().forward(input_ids, self.mask, position_ids, self.kept)
        return logits

    def read_cache(self, past):
        return self.kept
"""


# Shows none of its layers: they are reached without being registered under a list.
CLOSED = """
class Closed(nn.Module):
    def __init__(self, config):
        super().__init__()
        right = Right(config)
        object.__setattr__(self, "right", right)
        for name, parameter in right.named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)
        for name, buffer in right.named_buffers():
            self.register_buffer(name.replace(".", "_"), buffer)

    def convert_state_dict(self, tensors, config, layer_idx):
        converted = self.right.convert_state_dict(tensors, config, layer_idx)
        return {name.replace(".", "_"): tensor for name, tensor in converted.items()}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        return self.right(input_ids, attention_mask, position_ids, past_key_values)
"""
CLOSED_RIGHT = CLOSED + "\nModel = Closed\n"
CLOSED_WRONG = (
    CLOSED
    + """
class Model(Closed):
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        logits, cache = self.right(input_ids, attention_mask, position_ids, past_key_values)
        # In decoding alone, the rows of the head are one off.
        return (logits if past_key_values is None else logits.roll(1, dims=-1)), cache
"""
)

# Ports with a report each, and what it tells.
REPORTED = {
    SWAPPED: r"layer 2, moe\_delta",
    ORDERED.format(order="(0, 1, 3)"): "layer 2",
    RESTARTED: "To blame",
    WRONG_ROW: "To blame",
    CLOSED_RIGHT: "Not exposed by the port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run of a whole port: its exit code, JSON and capture, and its report."""

    exit_code: int
    record: dict[str, Any]
    capture: Path
    report: Path


@pytest.fixture
def run_model(command: Any, tmp_path: Path, on_small: tuple[object, ...]) -> Any:
    """Runs a whole port on the small model: the result, and its JSON."""

    def run_source(source: str, *options: object) -> tuple[Any, dict[str, Any]]:
        words = ("model", *on_small, "--target", write_whole(tmp_path, source))
        result = command(mm2_test, *words, *COMMON, "--output-dir", tmp_path / "run", "--overwrite", *options)
        return result, json.loads(result.stdout) if result.stdout else {}

    return run_source


@pytest.fixture(scope="module")
def judged(on_small: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judged]:
    """Runs a whole port, some with a report; the same port only once for all tests, which change nothing."""

    @functools.cache
    def judge(source: str) -> Judged:
        folder = tmp_path_factory.mktemp("judged")
        words = ("model", *on_small, "--target", write_whole(folder, source), *COMMON)
        places: tuple[object, ...] = ("--output-dir", folder / "run")
        # The charts of a report take long.
        places += ("--report-path", folder / "report") if source in REPORTED else ()
        result = click.testing.CliRunner().invoke(mm2_test, [str(word) for word in (*words, *places)])
        return Judged(
            exit_code=result.exit_code,
            record=json.loads(result.stdout),
            capture=folder / "run",
            report=folder / "report",
        )

    return judge


def write_whole(folder: Path, source: str) -> str:
    """Write a whole port's file, and return its `--target`."""
    path = folder / "whole_port.py"
    path.write_text(IMPORTS + source)
    return f"{path}:Model"


RIGHT_PORTS = {
    "eager": "Model = Right",
    "compiled": "def Model(config):\n    return torch.compile(Right(config), backend='eager')\n",
    "sampling": WRONG_ROW.replace(
        "logits[:, -1].argmax(-1)",
        "logits[torch.arange(len(logits)), (attention_mask[:, -input_ids.shape[1]:].cumsum(1)).argmax(1)].argmax(-1)",
    ),
    "masked padding": LIVE_PADDING.replace("PADDING", "-1e9"),
    "past by another name": CACHE,
    "own cache": STALE.replace("RESETS", "True"),
}


@pytest.mark.parametrize(
    "name",
    [
        # Seconds of it are torch.compile's.
        pytest.param(name, marks=pytest.mark.slow if name == "compiled" else ())
        for name in RIGHT_PORTS
    ],
)
def test_right_ports_pass_whole(judged: Callable[[str], Judged], name: str) -> None:
    run = judged(RIGHT_PORTS[name])
    assert (run.exit_code, run.record["verdict"]) == (0, "pass")
    assert (run.record["compared"], run.record["of"]) == (71, 71)
    assert "findings" not in run.record


def test_an_input_is_stored_only_where_another_layer_did_not_make_it(judged: Callable[[str], Judged]) -> None:
    # Layers 1 to 3 each get the output of another layer than the one before.
    capture = Capture.open(judged(ORDERED.format(order="(0, 2, 1, 3)")).capture)
    stored = [entry.layer for entry in capture.manifest.entries if entry.site == "input"]
    assert stored == [0, 1, 2, 3]
    capture = Capture.open(judged(RIGHT_PORTS["eager"]).capture)
    stored = [entry.layer for entry in capture.manifest.entries if entry.site == "input"]
    assert stored == [0]
    assert torch.equal(capture.read(2, Site.INPUT), capture.read(1, Site.OUTPUT))


@pytest.mark.slow
def test_the_suspect_layer_runs_alone_and_its_mistake_is_named(judged: Callable[[str], Judged]) -> None:
    run = judged(SWAPPED)
    record = run.record
    assert (run.exit_code, record["verdict"]) == (1, "fail")
    first = record["findings"][0]
    assert (first["number"], first["layer"], first["sites"]) == (0, 2, ["moe_delta"])
    assert first["mistake"] == "gate_up_swapped"
    assert record["isolated"]["verdict"] == "fail"
    assert record["isolated"]["blame"][0]["layer"] == 2


@pytest.mark.parametrize(("source", "told"), REPORTED.items())
def test_report_can_be_written_of_every_kind_of_run(
    judged: Callable[[str], Judged], source: str, told: str
) -> None:
    run = judged(source)
    markdown = (run.report / "report.md").read_text(encoding="utf-8")
    assert told in markdown
    report = json.loads((run.report / "comparison_report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report.get("findings")) == (run.record["verdict"], run.record.get("findings"))


@pytest.mark.parametrize(
    ("order", "layer", "mistake"),
    [
        ("(0, 1, 3)", 2, "layer_skipped"),
        ("(0, 1, 1, 2, 3)", 1, "layer_twice"),
        ("(0, 2, 1, 3)", 1, "layers_out_of_order"),
    ],
)
def test_the_order_of_layers_is_judged(
    judged: Callable[[str], Judged], order: str, layer: int, mistake: str
) -> None:
    run = judged(ORDERED.format(order=order))
    assert run.exit_code == 1
    first = run.record["findings"][0]
    assert (first["number"], first["layer"], first["mistake"]) == (0, layer, mistake)


def test_a_mistake_of_decoding_is_placed_at_its_first_step(judged: Callable[[str], Judged]) -> None:
    run = judged(RESTARTED)
    assert run.exit_code == 1
    first = run.record["findings"][0]
    assert (first["number"], first["layer"]) == (1, 0)
    assert first["sites"] in (["q_rope"], ["k_rope"])
    assert not any(finding["number"] == 0 for finding in run.record["findings"])


def test_a_token_chosen_at_padding_is_named(judged: Callable[[str], Judged]) -> None:
    run = judged(WRONG_ROW)
    assert run.exit_code == 1
    (finding,) = run.record["findings"]
    assert (finding["number"], finding["mistake"]) == (0, "padding_sampled")


@pytest.mark.slow
def test_live_padding_of_the_vocabulary_is_named(run_model: Any) -> None:
    result, record = run_model(LIVE_PADDING.replace("PADDING", "0.0"))
    assert result.exit_code == 1
    assert record["findings"][0]["mistake"] == "padded_logits_live"


def test_a_wrong_head_is_placed(run_model: Any) -> None:
    result, record = run_model(HEAD_ROWS)
    assert result.exit_code == 1
    first = record["findings"][0]
    assert (first["number"], first["layer"], first["sites"]) == (0, None, ["logits"])


def test_what_remains_of_earlier_prompts_is_found(run_model: Any) -> None:
    result, record = run_model(STALE.replace("RESETS", "False"))
    assert result.exit_code == 1
    (finding,) = record["findings"]
    assert (finding["sites"], finding["mistake"]) == (["repeated_run"], "cache_stale")


def test_a_port_without_a_past_says_what_decoding_needs(run_model: Any) -> None:
    source = """
class Model(Right):
    def forward(self, input_ids, attention_mask, position_ids):
        return super().forward(input_ids, attention_mask, position_ids)[0]
"""
    result, _ = run_model(source)
    assert result.exit_code == 3
    assert "cannot decode: its forward does not accept past_key_values" in result.stderr
    result, record = run_model(source, "--decode", 0)
    assert (result.exit_code, record["verdict"]) == (0, "pass")


def test_a_port_that_hides_its_layers_is_judged_and_none_runs_alone(run_model: Any) -> None:
    source = (
        SWAPPED.replace("class Model(Right)", "class Wrong(Right)")
        + """
class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.hidden = [Wrong(config)]

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
    )
    result, record = run_model(source)
    assert result.exit_code == 1
    assert record["findings"][0]["layer"] == 2
    assert record["isolated"] is None


def test_a_port_that_shows_no_layer_is_judged_by_its_logits(
    run_model: Any, judged: Callable[[str], Judged]
) -> None:
    right = judged(CLOSED_RIGHT)
    assert (right.exit_code, right.record["verdict"]) == (0, "pass")
    assert (right.record["compared"], right.record["of"]) == (1, 71)
    result, record = run_model(CLOSED_WRONG)
    assert (result.exit_code, record["verdict"]) == (1, "fail")
    (finding,) = record["findings"]
    assert finding["number"] >= 1
    assert finding["sites"] == ["logits"]


def test_a_class_that_only_the_cpu_gets_warns(run_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import os

class Model(Right):
    def __init__(self, config):
        super().__init__(config)
        if os.environ.get("NXD_CPU_MODE") != "1":
            self.model.norm = type("DeviceNorm", (type(self.model.norm),), {})(config.hidden_size, config.rms_norm_eps)
"""
    monkeypatch.setenv("NXD_CPU_MODE", "1")
    result, record = run_model(source)
    assert (result.exit_code, record["verdict"]) == (0, "warn")
    (finding,) = record["findings"]
    assert (finding["mistake"], finding["sites"]) == ("class_of_the_cpu", ["classes"])
    assert "DeviceNorm" in finding["reason"]
    monkeypatch.delenv("NXD_CPU_MODE")
    result, record = run_model(source)
    assert (result.exit_code, record["verdict"]) == (0, "pass")


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
def test_weights_that_do_not_fit_are_named(run_model: Any, returned: str, error: str) -> None:
    result, _ = run_model(f"""
class Model(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        found = dict(super().convert_state_dict(tensors, config, layer_idx))
        return {returned}
""")
    assert result.exit_code == 3
    assert error in result.stderr


def test_a_conversion_of_the_whole_model_serves_too(run_model: Any) -> None:
    result, record = run_model("""
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
""")
    assert (result.exit_code, record["verdict"]) == (0, "pass")


def test_nan_is_blamed_where_it_arises_and_not_on_earlier_prompts(run_model: Any) -> None:
    result, record = run_model("""
class Model(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
        return super().convert_state_dict(tensors, config, layer_idx)
""")
    assert result.exit_code == 1
    assert [finding["sites"] for finding in record["findings"]] == [["final_norm"]]
