"""Golden requests over the toy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_reference.golden.golden import GoldenRequest

sys.path.append(str(Path(__file__).parent))
from goldens import golden_request

Ask = Callable[..., GoldenRequest]
Measure = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def ask(toy: Path) -> Ask:
    """Makes a golden request, as `golden_request` does: of the toy, unless told otherwise."""

    def make(*, folder: Path = toy, **options: Any) -> GoldenRequest:
        return golden_request(folder, **options)

    return make


@pytest.fixture(scope="session")
def measure(toy: Path) -> Measure:
    """Makes goldens one by one in another process, as `measured_golden.py` says, and tells what memory each took."""

    def run(folder: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
        script = Path(__file__).with_name("measured_golden.py")
        measured = subprocess.run(
            [sys.executable, str(script), str(folder), json.dumps(cases), str(toy)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert measured.returncode == 0, measured.stderr
        return [json.loads(line) for line in measured.stdout.splitlines()]

    return run
