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


@pytest.fixture(scope="session")
def default_golden(small_fp8: Path, make_golden: Any) -> Path:
    """A golden of the default rows."""
    golden: Path = make_golden(small_fp8)
    return golden


@pytest.fixture
def untested(small_fp8: Path, run: Any) -> Judge:
    """Returns what a run leaves out, by kind."""

    def judge(golden: Path, *words: object) -> dict[str, dict[str, str]]:
        given = ("--model", small_fp8, "--golden", golden, "--backend", "cpu", "--json", "--quiet")
        record = json.loads(run(*words, *given).stdout)
        return {one["what"]: one for one in record["untested"]}

    return judge


def test_last_line_of_a_pass_says_it_with_the_command(
    default_golden: Path, small_fp8: Path, run: Any
) -> None:
    given = ("--model", small_fp8, "--golden", default_golden, "--backend", "cpu", "--quiet")
    lines = run("sweep", *given).stdout.partition("\nNext\n")[0].splitlines()
    last = [line for line in lines if line][-1]
    assert last.startswith("Not tested: layers on each other's outputs")
    assert "rows longer than 144 tokens (mm2-gpu extract-all --seq-len 4200 --last-tokens 16)" in last
    assert last.endswith("decoding, chunks behind a cache (mm2-test model); several ranks (--tp-degree 2).")


def test_default_rows_leave_little_out(default_golden: Path, untested: Judge) -> None:
    assert set(untested(default_golden, "sweep")) == {"chain", "long_rows", "decode", "chunks", "ranks"}


def test_chain_has_no_expert_tokens(default_golden: Path, untested: Judge) -> None:
    found = untested(default_golden, "full")
    assert "chain" not in found
    # What natural tokens do not choose, a sweep tests.
    assert found.get("experts", {"by": "mm2-test sweep"})["by"] == "mm2-test sweep"


def test_some_layers_leave_out_the_others(default_golden: Path, untested: Judge) -> None:
    found = untested(default_golden, "single-layer", "--layer", 1)["layers"]
    assert found["detail"] == "layers 0, 2-3"
    assert shlex.split(found["command"])[:2] == ["mm2-test", "sweep"]


def test_one_row_has_no_padding_and_no_second_call(
    small_fp8: Path, make_golden: Any, untested: Judge
) -> None:
    golden = make_golden(small_fp8, "--seq-len", "3")
    found = untested(golden, "sweep")
    assert {"left_padding", "second_call", "experts"} <= set(found)
    assert "that no token chose" in found["experts"]["detail"]
    assert found["experts"]["detail"].endswith(", but for their weights")
    assert found["left_padding"]["command"] == shlex.join(
        ("mm2-gpu", "extract-all", "--model", str(small_fp8))
    )


def test_short_rows_are_told_in_every_verdict(
    small_fp8: Path, make_golden: Any, untested: Judge, run: Any
) -> None:
    golden = make_golden(small_fp8, "--quick")
    assert "default_rows" in untested(golden, "sweep")
    given = ("--model", small_fp8, "--golden", golden, "--backend", "cpu", "--quiet")
    assert "--quick" in run("single-layer", "--layer", 0, *given).stdout


def test_failure_has_no_line_and_json_has_the_list(
    default_golden: Path, small_fp8: Path, untested: Judge, run: Any, tmp_path: Path
) -> None:
    swapped = (EXAMPLES / "swapped_port.py").read_text().replace("layer_idx == 5", "layer_idx == 1")
    (tmp_path / "swapped_port.py").write_text(swapped)
    (tmp_path / "port.py").write_text((EXAMPLES / "port.py").read_text())
    target = ("--target", f"{tmp_path / 'swapped_port.py'}:DecoderLayer")
    given = ("--model", small_fp8, "--golden", default_golden, "--backend", "cpu", "--quiet")
    result = run("sweep", *given, *target)
    assert result.exit_code == 1
    assert "Not tested" not in result.stdout
    assert "long_rows" in untested(default_golden, "sweep", *target)


def test_sites_that_are_not_shown_are_counted(default_golden: Path, untested: Judge) -> None:
    found = untested(default_golden, "sweep", "--sites", "layer")
    assert "sites" not in found
    target = f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer"
    assert untested(default_golden, "sweep", "--target", target)["sites"]["detail"].endswith(" of 68 sites")


def test_whole_port_decodes_and_takes_chunks(default_golden: Path, untested: Judge) -> None:
    target = f"{EXAMPLES / 'model_port.py'}:Model"
    found = untested(default_golden, "model", "--target", target)
    assert not {"decode", "chunks", "second_call", "chain"} & set(found)
    left_out = untested(default_golden, "model", "--target", target, "--no-chunks")
    assert "chunks" in left_out


@pytest.mark.parametrize(("name", "divides"), [("tensor_parallel_port.py", True), ("port.py", False)])
def test_ranks_that_share_nothing_are_told(
    default_golden: Path, small_fp8: Path, forked_ranks: Any, name: str, divides: bool
) -> None:
    given = ("--model", small_fp8, "--golden", default_golden, "--backend", "cpu", "--json", "--quiet")
    done = forked_ranks("single-layer", "--layer", 0, *given, "--target", f"{EXAMPLES / name}:DecoderLayer")
    record = json.loads(done.stdout)
    assert record["verdict"] == "pass", done.stderr
    details = [one["detail"] for one in record["untested"] if one["what"] == "ranks"]
    assert details == ([] if divides else ["ranks that divide the weights: each holds all of them"])
