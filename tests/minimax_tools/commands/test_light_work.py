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
from minimax_tools.__main__ import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, f"exit code {stop.code}"
loaded = sorted({"torch", "numpy", "numba", "transformers"} & set(sys.modules))
assert not loaded, f"loads {', '.join(loaded)}"
"""
NODES = ("--node", "a:memory=800MB", "--node", "b:memory=200MB", "--context-length", "64")

Split = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def split(tmp_path: Path, hub: Any) -> Split:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", RUN, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_folder_is_planned_cut_and_verified_without_torch(split: Split, toy: Path) -> None:
    for arguments in (
        ("plan", "--model", str(toy), *NODES, "--output", "plan.json"),
        ("extract", "--plan", "plan.json", "--all-nodes"),
        ("verify", "--plan", "plan.json", "--slices", "model_shards"),
    ):
        done = split(*arguments)
        assert done.returncode == 0, done.stderr


def test_a_model_of_a_hub_is_planned_and_fetched_without_torch(split: Split, toy: Path, hub: Any) -> None:
    hub.add("me/toy", toy)
    for arguments in (
        ("plan", "--model", "me/toy", *NODES, "--output", "plan.json"),
        ("fetch", "--plan", "plan.json", "--node", "b"),
        ("verify", "--plan", "plan.json", "--node", "b"),
    ):
        done = split(*arguments)
        assert done.returncode == 0, done.stderr


def test_a_slice_that_torch_writes_loads_it(split: Split, toy: Path) -> None:
    assert split("plan", "--model", str(toy), *NODES, "--output", "plan.json").returncode == 0
    done = split("extract", "--plan", "plan.json", "--all-nodes", "--format", "pth")
    assert "AssertionError: loads numpy, torch" in done.stderr
