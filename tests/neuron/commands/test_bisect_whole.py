"""`mm2-test bisect --whole`: the last wrong part of whole ports of which no layer runs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main as mm2_gpu

PORTS = Path(__file__).parents[2] / "ports" / "prompt_ports.py"
NOT_TAKEN = "did not take the stream that was to replace its own at point 2"


@pytest.fixture
def bisect(run: Any, tmp_path: Path, on_small: tuple[object, ...]) -> Any:
    """Bisects a whole port: the result, and its JSON."""

    def bisect_port(name: str, *options: object) -> tuple[Any, dict[str, Any]]:
        arguments = ("bisect", "--whole", *on_small, "--target", f"{PORTS}:{name}")
        arguments += ("--backend", "cpu", "--quiet", "--output-dir", tmp_path / "search")
        result = run(*arguments, "--json", *options)
        return result, json.loads(result.stdout) if result.stdout.startswith("{") else {}

    return bisect_port


@pytest.mark.parametrize(
    ("name", "options"), [("Model", ()), ("Closed", ("--exhaustive",)), ("Closed", ("--decode", 0))]
)
def test_right_port_is_not_blamed(bisect: Any, name: str, options: tuple[object, ...]) -> None:
    result, record = bisect(name, *options)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    assert (record["blame"], record["compared"], record["of"]) == ([], 6, 6)
    assert len(record["runs"]) == (6 if options == ("--exhaustive",) else 4)


@pytest.mark.parametrize("name", ["SwappedGateUp", "ClosedWrong"])
def test_wrong_layer_is_named(bisect: Any, name: str) -> None:
    result, record = bisect(name)
    assert (result.exit_code, record["verdict"]) == (1, "fail")
    (blame,) = record["blame"]
    assert (blame["layer"], blame["sites"]) == (2, ["output"])
    assert "at layer 3's input they are right" in blame["reason"]
    assert any("not judged" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("MovedHead", "the final norm or the head"),
        ("MovedEmbedding", "what comes before layer 0"),
        # No stream moves its logits.
        ("Headless", "the final norm or the head"),
    ],
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
    _, record = bisect("Closed", "--golden", tmp_path / "left", "--exhaustive")
    assert (record["verdict"], len(record["runs"])) == ("pass", 6)


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("Mute", ("does not show its layers", "replace_stream(layer, states)")),
        ("Compiled", (NOT_TAKEN,)),
        ("Deaf", (NOT_TAKEN, "found the same in every bit")),
    ],
)
def test_port_that_takes_no_other_stream_gets_no_verdict(
    bisect: Any, name: str, messages: tuple[str, ...]
) -> None:
    result, _ = bisect(name)
    assert result.exit_code == 3
    assert [message for message in messages if message not in result.stderr] == []


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
    result, _ = bisect("Model", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_decode_belongs_to_whole_ports(run: Any, on_small: tuple[object, ...]) -> None:
    result = run("bisect", *on_small, "--decode", 2)
    assert result.exit_code == 2
    assert "Add --whole" in result.stderr


def test_golden_of_another_model_is_refused(
    bisect: Any, copies: dict[torch.dtype, Path], float32_golden: Path
) -> None:
    result, _ = bisect("Model", "--golden", float32_golden, "--model", copies[torch.float32])
    assert result.exit_code == 3
    assert "expected float32, found bfloat16" in result.stderr
