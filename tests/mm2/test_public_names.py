from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mm2


def test_every_public_name_is_there() -> None:
    assert [name for name in mm2.__all__ if not hasattr(mm2, name)] == []
    assert set(mm2.__all__) <= set(dir(mm2))


def test_import_does_not_wait_for_torch() -> None:
    code = "import sys, mm2, mm2.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mm2' has no attribute 'recrod'"):
        _ = mm2.recrod  # type: ignore[attr-defined]
