"""Planning, cutting, fetching and verifying safetensors files load no torch, which takes seconds and 600 MB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A command in a fresh process, and the libraries that it has loaded at its end.
RUN = """
import sys
heavy = set(sys.argv.pop(1).split(","))
from minimax_tools.__main__ import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, f"exit code {stop.code}"
loaded = sorted(heavy & set(sys.modules))
assert not loaded, f"loads {', '.join(loaded)}"
"""
NODES = ("--node", "a:memory=800MB", "--node", "b:memory=200MB", "--context-length", "64")

Split = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def split(tmp_path: Path, hub: Any) -> Split:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub")}

    def run(*words: str, heavy: str = "torch,numpy,numba,transformers") -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", RUN, heavy, *words]
        return subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


@pytest.mark.parametrize(
    ("model", "commands"),
    [
        ("FOLDER", (("extract", "--all-nodes"), ("verify", "--slices", "model_shards"))),
        ("me/toy", (("fetch", "--node", "b"), ("verify", "--node", "b"))),
    ],
)
def test_a_model_is_planned_cut_fetched_and_verified_without_torch(
    model: str, commands: tuple[tuple[str, ...], ...], split: Split, toy: Path, hub: Any
) -> None:
    hub.add("me/toy", toy)
    source = str(toy) if model == "FOLDER" else model
    planning = ("plan", "--model", source, *NODES, "--output", "plan.json")
    for words in (planning, *((name, "--plan", "plan.json", *options) for name, *options in commands)):
        done = split(*words)
        assert done.returncode == 0, done.stderr


def test_library_that_a_command_loads_is_named(split: Split, toy: Path) -> None:
    done = split("plan", "--model", str(toy), *NODES, heavy="torch,click,json")
    assert "AssertionError: loads click, json" in done.stderr
