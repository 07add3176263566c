from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from minimax_tools.cli import mm2_split
from minimax_tools.partition.plan import PartitionPlan

Command = Callable[..., click.testing.Result]

NODES = ("--node", "a:memory=800MB", "--node", "b:memory=200MB", "--context-length", "64")
TITLES = (
    "NODE SLICE ASSIGNMENT VERIFICATION",
    "SLICE LOADING VERIFICATION",
    "DOWNLOAD VERIFICATION",
    "DOWNLOAD COMPLETED VERIFICATION",
)


def titles(text: str) -> tuple[str, ...]:
    return tuple(line.split("===")[1].strip() for line in text.splitlines() if "===" in line)


@pytest.fixture
def plan_file(toy: Path, command: Command, tmp_path: Path) -> Path:
    result = command(mm2_split, "plan", "--model", toy, *NODES, "--output", tmp_path / "plan.json", "--quiet")
    assert result.exit_code == 0, result.output
    return tmp_path / "plan.json"


def test_the_command_says_where_the_files_are(
    toy: Path, plan_file: Path, command: Command, tmp_path: Path
) -> None:
    result = command(mm2_split, "fetch", "--plan", plan_file, "--node", "b")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"b: {toy}, ")
    assert "===" not in result.output
    refused = command(mm2_split, "fetch", "--plan", plan_file, "--node", "b", "--output", tmp_path / "b")
    assert refused.exit_code == 2
    assert "--output needs --byte-ranges" in refused.output
    unknown = command(mm2_split, "fetch", "--plan", plan_file, "--node", "c", "--model", toy)
    assert unknown.exit_code == 2
    assert "the plan has no node 'c'" in unknown.output


def test_debug_11_shows_what_is_fetched_and_what_came_in_the_words_of_verify(
    plan_file: Path,
) -> None:
    def run(name: str, *arguments: str, level: str = "11") -> click.testing.Result:
        words = [name, "--plan", str(plan_file), "--node", "b", *arguments]
        return click.testing.CliRunner().invoke(mm2_split, words, env={"DEBUG": level})

    fetched = run("fetch", "--json")
    assert fetched.exit_code == 0, fetched.output
    assert json.loads(fetched.stdout)["node"] == "b"
    assert titles(fetched.stderr) == TITLES
    verified = run("verify").stdout
    for block in fetched.stderr.split("\n\n"):
        assert block.strip() in verified
    assert "Status:   ✅ Complete" in fetched.stderr
    assert titles(run("fetch", level="10").output) == ()


@pytest.mark.slow
def test_the_command_fetches_by_ranges_and_says_what_came(toy: Path, hub: Any, tmp_path: Path) -> None:
    hub.add("owner/toy", toy)
    # huggingface_hub reads its environment once, when it is imported.
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "DEBUG": "11",
        "PYTHONUTF8": "1",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", "from minimax_tools.__main__ import main; main()", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    run("plan", "--model", "owner/toy", *NODES, "--output", "plan.json")
    plan = PartitionPlan.read(tmp_path / "plan.json")
    done = run("fetch", "--plan", "plan.json", "--node", "b", "--byte-ranges", "--json")
    values = json.loads(done.stdout)
    slice_bytes = sum(tensor.size_bytes for tensor in plan.slice_of("b").tensors)
    assert values["folder"] == "model_shards/b"
    assert values["bytes_fetched"] == slice_bytes
    assert "File 1 (" in done.stderr
    assert titles(done.stderr) == TITLES
    assert f"Shard: {plan.model} layers 3" in done.stderr
    assert f"   Actual:   {slice_bytes / 1e6:.2f} MB" in done.stderr
    assert "   Status:   ✅ Complete" in done.stderr
    proof = run("verify", "--plan", "plan.json", "--node", "b", "--slices", "model_shards")
    assert "✅ digests_match" in proof.stdout
