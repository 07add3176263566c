"""The schemas of docs/schema hold every JSON output: here each command runs once on a small toy, with --json."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.printable import SCHEMA_VERSION
from neuron.cli import main as mm2_test

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: it is in the extra dev")

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "schema"
NAMES = sorted(path.name.removesuffix(".schema.json") for path in FOLDER.glob("*.schema.json"))
PROGRAMS: dict[str, click.Command] = {
    "mm2-compare": mm2_compare,
    "mm2-diagnose": mm2_diagnose,
    "mm2-gpu": mm2_gpu,
    "mm2-split": mm2_split,
    "mm2-test": mm2_test,
}
Output = tuple[str, str, dict[str, Any]]
SMALL = (
    "--num-hidden-layers 2 --vocab-size 300 --hidden-size 64 --num-local-experts 8 --num-experts-per-tok 2"
)
PORTS = REPOSITORY / "scripts" / "examples"

# Schema, exit code and command, in an order in which each finds what it needs; words in braces are folders.
COMMANDS = f"""
synthesize 0 mm2-split synthesize --output {{model}} {SMALL}
plan 0 mm2-split plan --model {{model}} --node a:memory=1GB --node b:memory=1GB --output {{here}}/plan.json
extract 0 mm2-split extract --plan {{here}}/plan.json --all-nodes --output {{here}}/slices
extract 0 mm2-split extract --plan-of-names {{here}}/names.json --model {{model}} --node a --output {{here}}/named
fetch 0 mm2-split fetch --plan {{here}}/plan.json --node a
verify 0 mm2-split verify --plan {{here}}/plan.json --slices {{here}}/slices
verify 0 mm2-split verify --plan {{here}}/plan.json
golden 0 mm2-gpu full --model {{model}} --seq-len 24,17 --max-new-tokens 2 --output-dir {{golden}}
golden 0 mm2-gpu single-layer --model {{model}} --layer 0 --seq-len 8 --no-save
certificate 0 mm2-gpu certify --model {{model}} --golden {{golden}}
golden 0 mm2-gpu show {{golden}}
capture 0 mm2-test show {{golden}}
dump 0 mm2-test show {{here}}/dump
run 0 mm2-test single-layer --layer 0 --model {{model}} --seq-len 8 --check-capture --output-dir {{here}}/alone
run 0 mm2-test full --model {{model}} --golden {{golden}} --output-dir {{here}}/full
run 1 mm2-test sweep --model {{model}} --golden {{golden}} --target {{swapped}} --output-dir {{run}}
run 1 mm2-test multi-layer --model {{model}} --golden {{golden}} --target {{swapped}} --output-dir {{here}}/chain
weights 1 mm2-test weights --model {{model}} --target {{swapped}} --layer 1
weights 0 mm2-test weights --model {{model}} --target {{port}} --no-load
weights-of-layers 1 mm2-test weights --model {{model}} --target {{swapped}} --all-layers --no-load
bisection 1 mm2-test bisect --model {{model}} --golden {{golden}} --target {{swapped}} --output-dir {{here}}/bisect
check 0 mm2-test check --model {{model}}
readiness 0 mm2-gpu check --model {{model}} --captures {{here}}
readiness 0 mm2-gpu check --gpus 8x80GB --memory 1TB
memory 0 mm2-split memory --model {{model}}
cache 0 mm2-split cache
trace 0 mm2-test trace --model {{model}} --layer 0 --golden {{golden}} --target {{port}} \
 --output {{here}}/layer_0.pt2
comparison 1 mm2-compare --golden {{golden}} --run {{run}} --model {{model}} --report-path {{here}}/reports
comparison 1 mm2-compare --golden {{golden}} --run {{here}}/chain --criteria classic
comparison-summary 1 mm2-compare --golden {{golden}} --run {{run}} --json=summary
comparison-summary 1 mm2-test sweep --model {{model}} --golden {{golden}} --target {{swapped}} \
 --output-dir {{here}}/brief --json=summary
comparison-summary 0 mm2-test model --model {{model}} --golden {{golden}} --target {{whole}} \
 --captures {{here}}/summary --json=summary
diagnosis 1 mm2-diagnose --golden {{golden}} --run {{run}} --model {{model}}
diagnosis 1 mm2-diagnose --golden {{golden}} --run {{run}} --model {{model}} --mistake rope_missing
catalogue 0 mm2-diagnose --list
proof 0 mm2-test single-layer --layer 1 --model {{model}} --golden {{golden}} --target {{swapped}} \
 --output-dir {{here}}/undone --undo gate_up_swapped
model 0 mm2-test model --model {{model}} --golden {{golden}} --target {{whole}} --captures {{here}}/captures
golden-logits 0 mm2-test prompts --model {{model}} --golden {{golden}} --captures {{here}}/captures
prompts 0 mm2-test prompts --model {{model}} --golden {{golden}} --target {{whole}} --captures {{here}}/captures
golden 0 mm2-gpu full --model {{model}} --seq-len 24,17 --dtype float32 --output-dir {{here}}/golden32
export 0 mm2-gpu export --format vllm-neuron --golden {{golden}} --float32-golden {{here}}/golden32 \
 --output-dir {{here}}/export --allow-uncertified
port 3 mm2-test port --model {{model}} --golden {{golden}} --target {{broken}} --output-dir {{here}}/port
stream-search 0 mm2-test bisect --whole --model {{model}} --golden {{golden}} --target {{whole}} \
 --captures {{here}}/captures
stream-search 3 mm2-test replacement --format vllm-neuron --model {{model}} --golden {{golden}} \
 --output-dir {{here}}/replaced --captures {{here}}/captures
error 3 mm2-compare --golden {{here}}/nowhere --run {{run}}
error 2 mm2-test sweep --model {{model}} --golden {{golden}} --layers 0:1 --start-layer 0 --end-layer 1
"""

# A file of NxD Inference's own capture.
DUMPED = "captured_tensors_cte_step_1_module_layers.0.mlp_output.pt"

SWAPPED_PORT = f"""
import sys
sys.path.insert(0, {str(PORTS)!r})
import port
import torch


class DecoderLayer(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx == 1:
            state["moe.gate_up_proj"] = torch.cat(state["moe.gate_up_proj"].chunk(2, dim=1)[::-1], dim=1)
        return state
"""


def read_schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))
    return schema


def faults(name: str, record: object) -> list[str]:
    validator = jsonschema.Draft202012Validator(read_schema(name))
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(record)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Output]:
    """For each command its schema, its line and the object that it printed."""
    here = tmp_path_factory.mktemp("outputs")
    (here / "names.json").write_text('{"a": ["model.norm.weight"]}')
    (here / "dump").mkdir()
    torch.save(torch.zeros(2, 24, 64, dtype=torch.bfloat16), here / "dump" / DUMPED)
    (here / "swapped.py").write_text(SWAPPED_PORT)
    (here / "broken.py").write_text(
        "def DecoderLayer(config, layer_idx):\n    raise RuntimeError('broken')\n"
    )
    places = {
        **{"here": here, "model": here / "model", "golden": here / "golden", "run": here / "run"},
        "swapped": f"{here}/swapped.py:DecoderLayer",
        "broken": f"{here}/broken.py:DecoderLayer",
        "port": f"{PORTS}/port.py:DecoderLayer",
        "whole": f"{PORTS}/model_port.py:Model",
    }
    printed = []
    for line in COMMANDS.replace(" \\\n", " ").strip().splitlines():
        name, code, command = line.split(maxsplit=2)
        program, *arguments = shlex.split(command.format(**places))
        takes_backend = program == "mm2-test" and arguments[0] not in ("show", "weights", "replacement")
        as_json = [] if "--json=summary" in arguments else ["--json"]
        options = [*(["--backend", "cpu"] if takes_backend else []), *as_json, "--quiet"]
        done = CliRunner().invoke(PROGRAMS[program], [*arguments, *options], prog_name=program)
        assert done.exit_code == int(code), f"{command}\n{done.output}\n{done.exception!r}"
        printed.append((name, command, json.loads(done.stdout)))
    for file, name in (("comparison_report", "comparison"), ("comparison_summary", "comparison-summary")):
        printed.append((name, file, json.loads((here / "reports" / f"{file}.json").read_text())))
    return printed


def test_every_output_keeps_its_schema(outputs: list[Output]) -> None:
    found = {command: faults(name, record) for name, command, record in outputs}
    assert {command: list_ for command, list_ in found.items() if list_} == {}


def test_every_schema_is_that_of_an_output(outputs: list[Output]) -> None:
    # tests/gpu_reference/publication has the server that this one needs.
    assert {name for name, _, _ in outputs} | {"publication"} == set(NAMES)


def test_every_output_says_what_to_run_next(outputs: list[Output]) -> None:
    for _, command, record in outputs:
        assert record["schema_version"] == SCHEMA_VERSION
        for line in record["next"]:
            program, *arguments = shlex.split(line)
            assert_is_complete(PROGRAMS[program], arguments, f"{command}\n{line}")


def assert_is_complete(program: click.Command, arguments: list[str], line: str) -> None:
    """Assert that click takes a command: every option is known, and none that is required is missing."""
    assert not {"…", "DIR", "GOLDEN", "RUN"} & {*arguments}, line
    while isinstance(program, click.Group):
        name, *arguments = arguments
        program = program.get_command(click.Context(program), name)
    if "--help" in arguments:
        return
    values, _, _ = program.make_parser(click.Context(program)).parse_args(list(arguments))
    absent = [option.name for option in program.params if option.required and not values.get(option.name)]
    assert absent == [], line


def next_of(outputs: list[Output], start: str) -> list[str]:
    record = next(record for _, command, record in outputs if command.startswith(start))
    return [" ".join(line.split()[:2]) for line in record["next"]]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("mm2-split synthesize", ["mm2-gpu extract-all"]),
        ("mm2-gpu full", ["mm2-gpu certify", "mm2-test sweep"]),
        ("mm2-gpu certify", ["mm2-test sweep"]),
        ("mm2-test sweep", ["mm2-test weights", "mm2-diagnose --model"]),
        ("mm2-compare --golden {golden} --run {run}", ["mm2-test weights", "mm2-diagnose --model"]),
        ("comparison_report", ["mm2-test weights", "mm2-diagnose --model"]),
        ("mm2-test multi-layer", ["mm2-test weights", "mm2-test single-layer"]),
        ("mm2-test weights --model {model} --target {swapped}", ["mm2-test weights"]),
        ("mm2-test single-layer --layer 1", ["mm2-test sweep"]),
        ("mm2-test full", []),
        ("mm2-test model", []),
        ("mm2-diagnose --golden {golden} --run {run} --model {model}", ["mm2-diagnose --model"]),
        ("mm2-compare --golden {here}/nowhere", []),
        ("mm2-test sweep --model {model} --golden {golden} --layers 0:1", ["mm2-test sweep"]),
    ],
)
def test_next_commands_are_those_of_the_recipe(
    outputs: list[Output], start: str, expected: list[str]
) -> None:
    assert next_of(outputs, start) == expected


def test_schemas_are_up_to_date(load_module: Callable[[Path], Any], command: Any) -> None:
    done = command(load_module(REPOSITORY / "scripts" / "write_schemas.py").main, "--check")
    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_sound_and_every_object_in_it_is_closed_or_has_keys_that_are_data(name: str) -> None:
    schema = read_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert [part for part in parts_of(schema) if part.get("additionalProperties") is not False] == []


def parts_of(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects with properties in a schema."""
    if isinstance(value, dict) and value.get("type") == "object" and "properties" in value:
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts_of(item)
