from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import minimax_tools.errors
from minimax_tools.errors import EXTRA_REQUIREMENTS, CannotRunError, MissingExtraError, Mm2Error, UsageError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_message_joins_what_expected_found_and_next_step() -> None:
    error = CannotRunError("layer 5 differs", expected="one", found="two", next_step="Look there.")
    assert str(error) == "layer 5 differs: expected one, found two. Look there."
    parts = (error.what, error.expected, error.found, error.next_step)
    assert parts == ("layer 5 differs", "one", "two", "Look there.")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "it broke"),
        ({"expected": "a"}, "it broke: expected a"),
        ({"found": "b"}, "it broke: found b"),
        ({"next_step": "Mend it."}, "it broke. Mend it."),
    ],
)
def test_missing_parts_leave_no_trace(parts: dict[str, str], message: str) -> None:
    assert str(UsageError("it broke", **parts)) == message


def test_every_error_exits_with_2_or_3_and_stands_in_the_tree_of_the_docstring() -> None:
    members = inspect.getmembers(minimax_tools.errors, inspect.isclass)
    classes = [value for _, value in members if issubclass(value, Mm2Error)]
    assert len(classes) > 8
    assert {error.__name__ for error in classes if error.exit_code == 2} == {"UsageError"}
    assert {error.exit_code for error in classes} == {2, 3}
    tree = inspect.getdoc(minimax_tools.errors) or ""
    assert [error for error in classes if not re.search(rf"{error.__name__}\s", tree)] == []


@pytest.mark.parametrize("extra", EXTRA_REQUIREMENTS)
def test_missing_extra_names_what_pyproject_asks_for(extra: str) -> None:
    declared = re.search(rf"^{extra} = \[(.*?)\]$", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL)
    assert declared is not None
    requirements = {text.partition(";")[0].strip() for text in re.findall(r'"([^"]+)"', declared[1])}
    assert set(EXTRA_REQUIREMENTS[extra]) == requirements


def test_missing_extra_ends_with_a_command_to_paste() -> None:
    error = MissingExtraError("torch_xla", extra="xla", needed_for="--backend xla-cpu")
    assert "torch_xla" in error.what
    assert "--backend xla-cpu" in error.what
    assert str(error).endswith("Install it with: pip install 'torch==2.9.*' 'torch_xla==2.9.*'")
    assert error.exit_code == 3
