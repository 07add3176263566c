"""Parts of a port that a verdict has not looked at: told for each kind, and left out where it was looked at."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
Judge = Callable[..., dict[str, dict[str, str]]]


@pytest.fixture(scope="module")
def quick_golden(small_fp8: Path, make_golden: Any) -> Path:
    """A golden of the short rows."""
    golden: Path = make_golden(small_fp8, "--quick")
    return golden


@pytest.fixture
def judged(small_fp8: Path, run: Any) -> Callable[..., Any]:
    """Judges a port on the CPU."""

    def judge(golden: Path, *words: object) -> Any:
        return run(*words, "--model", small_fp8, "--golden", golden, "--backend", "cpu", "--quiet")

    return judge


@pytest.fixture
def untested(judged: Callable[..., Any]) -> Judge:
    """Returns what a run leaves out, by kind."""

    def judge(golden: Path, *words: object) -> dict[str, dict[str, str]]:
        record = json.loads(judged(golden, *words, "--json").stdout)
        return {one["what"]: one for one in record["untested"]}

    return judge


def test_last_line_of_a_pass_on_default_rows_says_it_with_the_command(
    small_fp8: Path, make_golden: Any, judged: Callable[..., Any], untested: Judge
) -> None:
    golden = make_golden(small_fp8)
    lines = judged(golden, "sweep").stdout.partition("\nNext\n")[0].splitlines()
    last = [line for line in lines if line][-1]
    assert last.startswith("Not tested: layers on each other's outputs")
    assert "rows longer than 144 tokens (mm2-gpu extract-all --seq-len 4200 --last-tokens 16)" in last
    assert last.endswith("decoding, chunks behind a cache (mm2-test model); several ranks (--tp-degree 2).")
    kinds = {"chain", "long_rows", "decode", "chunks", "ranks"}
    assert set(untested(golden, "sweep", "--skip-compile")) == kinds


def test_one_row_has_no_padding_and_no_second_call(
    small_fp8: Path, make_golden: Any, untested: Judge
) -> None:
    found = untested(make_golden(small_fp8, "--seq-len", "3"), "sweep")
    assert {"left_padding", "second_call", "experts"} <= set(found)
    assert "that no token chose" in found["experts"]["detail"]
    assert found["experts"]["detail"].endswith(", but for their weights")
    assert shlex.split(found["left_padding"]["command"]) == [
        "mm2-gpu",
        "extract-all",
        "--model",
        str(small_fp8),
    ]


def test_chain_has_no_expert_tokens(quick_golden: Path, untested: Judge) -> None:
    found = untested(quick_golden, "full")
    assert "chain" not in found
    # What natural tokens do not choose, a sweep tests.
    assert found.get("experts", {"by": "mm2-test sweep"})["by"] == "mm2-test sweep"


def test_some_layers_leave_out_the_others_and_short_rows_the_default_ones(
    quick_golden: Path, judged: Callable[..., Any], untested: Judge
) -> None:
    layer = ("single-layer", "--layer", 1)
    found = untested(quick_golden, *layer)
    assert "sites" not in found
    assert found["layers"]["detail"] == "layers 0, 2-3"
    assert shlex.split(found["layers"]["command"])[:2] == ["mm2-test", "sweep"]
    assert "default_rows" in found
    assert "--quick" in judged(quick_golden, *layer, "--skip-compile").stdout
    # Sites that were not asked for are not missed, those that a port does not show are.
    assert "sites" not in untested(quick_golden, *layer, "--sites", "layer", "--overwrite")
    target = ("--target", f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer", "--overwrite")
    assert untested(quick_golden, *layer, *target)["sites"]["detail"].endswith(" of 17 sites")


def test_failure_has_no_line_and_json_has_the_list(
    quick_golden: Path, judged: Callable[..., Any], untested: Judge, tmp_path: Path
) -> None:
    swapped = (EXAMPLES / "swapped_port.py").read_text().replace("layer_idx == 5", "layer_idx == 1")
    (tmp_path / "swapped_port.py").write_text(swapped)
    (tmp_path / "port.py").write_text((EXAMPLES / "port.py").read_text())
    layer = ("single-layer", "--layer", 1, "--target", f"{tmp_path / 'swapped_port.py'}:DecoderLayer")
    result = judged(quick_golden, *layer)
    assert result.exit_code == 1
    assert "Not tested" not in result.stdout
    assert "long_rows" in untested(quick_golden, *layer, "--skip-compile")


def test_whole_port_decodes_and_takes_chunks(quick_golden: Path, untested: Judge) -> None:
    whole = ("model", "--target", f"{EXAMPLES / 'model_port.py'}:Model", "--decode", 1)
    assert not {"decode", "chunks", "second_call", "chain"} & set(untested(quick_golden, *whole))
    assert "chunks" in untested(quick_golden, *whole, "--no-chunks")


@pytest.mark.parametrize(
    ("name", "details"),
    [
        ("port.py", ["ranks that divide the weights: each holds all of them"]),
        pytest.param("tensor_parallel_port.py", [], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_nothing_are_told(
    on_small: tuple[object, ...], forked_ranks: Any, name: str, details: list[str]
) -> None:
    given = (*on_small, "--backend", "cpu", "--json", "--quiet")
    done = forked_ranks("single-layer", "--layer", 0, *given, "--target", f"{EXAMPLES / name}:DecoderLayer")
    record = json.loads(done.stdout)
    assert record["verdict"] == "pass", done.stderr
    assert [one["detail"] for one in record["untested"] if one["what"] == "ranks"] == details
