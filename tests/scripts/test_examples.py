from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from neuron.cli import main as mm2_test
from neuron.ports.targets import find_target

Command = Callable[..., click.testing.Result]

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
RIGHT = [
    "minimal_port.py:DecoderLayer",
    "port.py:DecoderLayer",
    "cached_port.py:DecoderLayer",
    "tensor_parallel_port.py:DecoderLayer",
    "transformers_port.py:Same",
    "transformers_port.py:Eager",
    "transformers_port.py:BatchedExperts",
]


@pytest.mark.parametrize("target", RIGHT[1:])
def test_right_example_passes_a_layer(
    target: str, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    _require_pass(_sweep(command, target, toy, golden, tmp_path, "--layers", "2:3"))


@pytest.mark.slow
@pytest.mark.parametrize("target", RIGHT[1:])
def test_right_example_passes_every_layer(
    target: str, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    _require_pass(_sweep(command, target, toy, golden, tmp_path))


def test_swapped_device_layer_is_blamed_on_the_experts(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    result = _sweep(command, "swapped_device_layer.py:SwappedDeviceLayer", toy, golden, tmp_path)
    record = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [
        (layer, ["moe_delta"]) for layer in range(4)
    ]
    # As its docstring says: mm2 expects no converted copy of a layer in memory.
    example = find_target(f"{EXAMPLES / 'swapped_device_layer.py'}:SwappedDeviceLayer")
    assert example.fills_storage


def test_minimal_example_passes_every_layer_by_what_is_found_by_name(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    record = _require_pass(_sweep(command, RIGHT[0], toy, golden, tmp_path))
    assert (record["compared"], record["of"]) == (4 * 13, 4 * 17)


def test_cached_example_decodes(toy: Path, golden: Path, command: Command, tmp_path: Path) -> None:
    arguments = ("--layers", "1:2", "--decode", 3)
    result = _sweep(command, "cached_port.py:DecoderLayer", toy, golden, tmp_path, *arguments)
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (0, "pass")


def test_example_without_a_cache_says_what_decoding_needs(
    toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    result = _sweep(command, "port.py:DecoderLayer", toy, golden, tmp_path, "--layers", "1:2", "--decode", 3)
    assert result.exit_code == 3
    assert "does not accept past_key_value" in result.stderr


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensor_parallel_example_passes_on_several_ranks(
    degree: int, toy: Path, golden: Path, forked: Any
) -> None:
    # Of the toy's two kv heads each of 4 ranks holds a copy.
    done = _run_ranks(EXAMPLES / "tensor_parallel_port.py", degree, toy, golden, forked)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["verdict"], record["compared"], record["of"]) == ("pass", 17, 17)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "wrong", "sites"),
    [
        ("        dist.all_reduce(squares)\n", "", ["q_norm", "k_norm"]),
        ('part(tensors[name + "w1.weight"], 0)', 'part(tensors[name + "w1.weight"], 0, 0)', ["moe_delta"]),
    ],
)
def test_mistake_of_a_rank_is_blamed(
    line: str, wrong: str, sites: list[str], toy: Path, golden: Path, tmp_path: Path, forked: Any
) -> None:
    source = (EXAMPLES / "tensor_parallel_port.py").read_text()
    assert line in source
    port = tmp_path / "wrong_port.py"
    port.write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n" + _without_future(source, line, wrong)
    )
    done = _run_ranks(port, 2, toy, golden, forked)
    assert done.returncode == 1, done.stderr
    assert [blame["sites"] for blame in json.loads(done.stdout)["blame"]] == [[site] for site in sites]


def _require_pass(result: click.testing.Result) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    assert record["compared"] > 0
    return record


def _without_future(source: str, line: str, wrong: str) -> str:
    """The example with a mistake, to stand behind other lines."""
    return source.replace("from __future__ import annotations\n", "").replace(line, wrong)


def _run_ranks(
    port: Path, degree: int, toy: Path, golden: Path, forked: Any
) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = forked(
        *("single-layer", "--layer", 1, "--tp-degree", degree, "--model", toy, "--golden", golden),
        *("--target", f"{port}:DecoderLayer", "--backend", "cpu", "--output-dir", "run", "--json", "--quiet"),
    )
    return done


def _sweep(
    command: Command, target: str, toy: Path, golden: Path, tmp_path: Path, *arguments: object
) -> click.testing.Result:
    return command(
        mm2_test,
        *("sweep", "--model", toy, "--golden", golden, "--target", EXAMPLES / target),
        *("--backend", "cpu", "--output-dir", tmp_path / "run", "--json", "--quiet"),
        *arguments,
    )
