from __future__ import annotations

import re
from pathlib import Path

import pytest

from minimax_tools.errors import EXTRA_REQUIREMENTS, MissingExtraError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("extra", EXTRA_REQUIREMENTS)
def test_error_names_what_pyproject_asks_for(extra: str) -> None:
    declared = re.search(rf"^{extra} = \[(.*?)\]$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    assert declared is not None
    requirements = {text.partition(";")[0].strip() for text in re.findall(r'"([^"]+)"', declared[1])}
    assert set(EXTRA_REQUIREMENTS[extra]) == requirements


def test_error_ends_with_a_command_to_paste() -> None:
    error = MissingExtraError("torch_xla", extra="xla", needed_for="--backend xla-cpu")
    assert str(error).endswith("Install it with: pip install 'torch==2.9.*' 'torch_xla==2.9.*'")
    assert error.exit_code == 3
