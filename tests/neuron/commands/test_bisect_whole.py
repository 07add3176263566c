"""`mm2-test bisect --whole`: the last wrong part of whole ports of which no layer runs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main as mm2_gpu

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"

PORTS = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import os
import torch
from torch import nn
from model_port import Model as Right

class Closed(nn.Module):
    # Nobody sees its layers; it takes another stream itself, as a compiled graph with a mask would.
    layer, tensor = None, "model.layers.0.self_attn.o_proj.weight"

    def __init__(self, config):
        super().__init__()
        self.inner = (Right(config),)
        for name, parameter in self.inner[0].named_parameters():
            self.register_parameter(name.replace(".", "_"), parameter)
        for name, buffer in self.inner[0].named_buffers():
            self.register_buffer(name.replace(".", "_"), buffer)
        self.replaced = None, None
        body = self.inner[0].model
        for point, module in enumerate([*body.layers, body.norm]):
            module.register_forward_pre_hook(self.taking(point))

    def taking(self, point):
        def take(module, inputs):
            at, states = self.replaced
            return (states, *inputs[1:]) if at == point else None

        return take

    def replace_stream(self, point, states):
        self.replaced = point, states

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx == self.layer:
            tensors = tensors.copy()
            tensors[self.tensor] = tensors[self.tensor].roll(1, 0)
        converted = self.inner[0].convert_state_dict(tensors, config, layer_idx)
        return {{name.replace(".", "_"): tensor for name, tensor in converted.items()}}

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        if os.environ.get("FAIL"):
            raise RuntimeError("out of luck")
        return self.inner[0](input_ids, attention_mask, position_ids, past_key_values)

class ClosedRight(Closed):
    layer = -1

class ClosedWrong(Closed):
    layer, tensor = 2, "self_attn.o_proj.weight"

class Deaf(ClosedWrong):
    # Takes another stream, it says, and computes with its own.
    def replace_stream(self, point, states):
        pass

class Headless(ClosedRight):
    # Its head got no weights: no stream moves its logits.
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
        return super().convert_state_dict(tensors, config, layer_idx)

class Mute(ClosedRight):
    # Shows no layer, and takes no other stream.
    replace_stream = None

class Compiled(Right):
    # Its layers are seen, and never called: a compiled graph has taken their weights.
    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        hooked = [dict(layer._forward_pre_hooks) for layer in self.model.layers]
        for layer in self.model.layers:
            layer._forward_pre_hooks.clear()
        try:
            return super().forward(input_ids, attention_mask, position_ids, past_key_values)
        finally:
            for layer, hooks in zip(self.model.layers, hooked):
                layer._forward_pre_hooks.update(hooks)

class Swapped(Right):
    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx == 2:
            tensors = tensors.copy()
            for expert in range(config.num_local_experts):
                gate, up = (f"block_sparse_moe.experts.{{expert}}.{{name}}.weight" for name in ("w1", "w3"))
                tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return super().convert_state_dict(tensors, config, layer_idx)

def moved(name):
    class Moved(Right):
        def convert_state_dict(self, tensors, config, layer_idx):
            if layer_idx is None:
                tensors[name] = tensors[name].roll(1, 0)
            return super().convert_state_dict(tensors, config, layer_idx)
    return Moved

Head, Embedding = moved("lm_head.weight"), moved("model.embed_tokens.weight")
"""


@pytest.fixture
def bisect(run: Any, tmp_path: Path, on_small: tuple[object, ...]) -> Any:
    """Bisects a port of this file: the result, and its JSON."""
    path = tmp_path / "whole_ports.py"
    path.write_text(PORTS)

    def bisect_port(name: str, *options: object) -> tuple[Any, dict[str, Any]]:
        arguments = ("bisect", "--whole", *on_small, "--target", f"{path}:{name}")
        arguments += ("--backend", "cpu", "--quiet", "--output-dir", tmp_path / "search")
        result = run(*arguments, "--json", *options)
        return result, json.loads(result.stdout) if result.stdout.startswith("{") else {}

    return bisect_port


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Right", ()),
        ("ClosedRight", ("--exhaustive",)),
        ("ClosedRight", ("--decode", 0)),
    ],
)
def test_right_port_is_not_blamed(bisect: Any, name: str, options: tuple[object, ...]) -> None:
    result, record = bisect(name, *options)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    assert (record["blame"], record["compared"], record["of"]) == ([], 6, 6)
    assert len(record["runs"]) == (6 if options == ("--exhaustive",) else 4)


@pytest.mark.parametrize("name", ["Swapped", "ClosedWrong"])
def test_wrong_layer_is_named(bisect: Any, name: str) -> None:
    result, record = bisect(name)
    assert (result.exit_code, record["verdict"]) == (1, "fail")
    (blame,) = record["blame"]
    assert (blame["layer"], blame["sites"]) == (2, ["output"])
    assert "at layer 3's input they are right" in blame["reason"]
    assert any("not judged" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("name", "part"), [("Head", "the final norm or the head"), ("Embedding", "what comes before layer 0")]
)
def test_part_outside_the_layers_is_named(bisect: Any, name: str, part: str) -> None:
    result, record = bisect(name)
    assert result.exit_code == 1
    (blame,) = record["blame"]
    assert (blame["layer"], blame["sites"]) == (None, [])
    assert blame["part"].startswith(part)


def test_interrupted_search_goes_on(bisect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = bisect("ClosedWrong")
    # The runs are in the journal: the port does not run again.
    monkeypatch.setenv("FAIL", "1")
    assert bisect("ClosedWrong")[1]["runs"] == first["runs"]
    result, _ = bisect("ClosedWrong", "--anew")
    assert result.exit_code == 3
    assert "out of luck" in result.stderr


def test_right_port_on_left_padded_prompts_is_not_blamed(
    bisect: Any, command: Any, small_fp8: Path, tmp_path: Path
) -> None:
    """A row's logits are those of its own tokens, wherever its padding lies."""
    rows = ("--input-ids", "5,6,7,8,9,10,11,12", "--input-ids", "20,21,22,23", "--padding-side", "left")
    made = ("--sites", "layer", "--output-dir", tmp_path / "left", "--quiet")
    command(mm2_gpu, "extract-all", "--model", small_fp8, *rows, *made)
    _, record = bisect("ClosedRight", "--golden", tmp_path / "left", "--exhaustive")
    assert (record["verdict"], len(record["runs"])) == ("pass", 6)


def test_port_that_takes_no_other_stream_is_refused(bisect: Any) -> None:
    result, _ = bisect("Mute")
    assert result.exit_code == 3
    assert "does not show its layers" in result.stderr
    assert "replace_stream(layer, states)" in result.stderr


def test_stream_that_was_not_taken_is_no_verdict(bisect: Any) -> None:
    result, _ = bisect("Compiled")
    assert result.exit_code == 3
    assert "did not take the stream that was to replace its own at point 2" in result.stderr


def test_port_that_drops_the_stream_it_is_given_is_no_verdict(bisect: Any) -> None:
    result, _ = bisect("Deaf")
    assert result.exit_code == 3
    assert "did not take the stream that was to replace its own at point 2" in result.stderr
    assert "found the same in every bit" in result.stderr


def test_head_that_no_stream_moves_is_named(bisect: Any) -> None:
    _, record = bisect("Headless")
    assert record["blame"][0]["part"].startswith("the final norm or the head")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chain-length", 2), "--chain-length and --whole were both given"),
        (("--all", "--layers", "0:2"), "--layers, --all and --whole were both given"),
        (("--compile", "eager"), "--compile and --whole were both given"),
        (("--dtype", "float32"), "expected --dtype bfloat16, found float32"),
        (("--decode", 40), "of a prompt of 15 tokens 40 cannot be decoded"),
    ],
)
def test_options_that_contradict_a_whole_port(bisect: Any, options: Any, message: str) -> None:
    result, _ = bisect("Right", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_decode_belongs_to_whole_ports(run: Any, small_fp8: Path, small_golden: Path) -> None:
    result = run("bisect", "--model", small_fp8, "--golden", small_golden, "--decode", 2)
    assert result.exit_code == 2
    assert "Add --whole" in result.stderr


def test_golden_of_another_model_is_refused(
    bisect: Any, copies: dict[torch.dtype, Path], float32_golden: Path
) -> None:
    result, _ = bisect("Right", "--golden", float32_golden, "--model", copies[torch.float32])
    assert result.exit_code == 3
    assert "expected float32, found bfloat16" in result.stderr
