from __future__ import annotations

import inspect

import pytest

import minimax_tools.errors
from minimax_tools.errors import CannotRunError, MissingExtraError, Mm2Error, UsageError


def test_message_joins_what_expected_found_and_next_step() -> None:
    error = CannotRunError("layer 5 differs", expected="one", found="two", next_step="Look there.")
    assert str(error) == "layer 5 differs: expected one, found two. Look there."
    assert (error.what, error.expected, error.found, error.next_step) == (
        "layer 5 differs",
        "one",
        "two",
        "Look there.",
    )


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


def test_every_error_exits_with_2_or_3() -> None:
    classes = [
        value
        for _, value in inspect.getmembers(minimax_tools.errors, inspect.isclass)
        if issubclass(value, Mm2Error)
    ]
    assert len(classes) > 8
    assert {error.__name__ for error in classes if error.exit_code == 2} == {"UsageError"}
    assert {error.exit_code for error in classes} == {2, 3}


def test_every_error_stands_in_the_tree_of_the_docstring() -> None:
    tree = inspect.getdoc(minimax_tools.errors) or ""
    for name, value in inspect.getmembers(minimax_tools.errors, inspect.isclass):
        if issubclass(value, Mm2Error):
            assert f"{name} " in tree or f"{name}\n" in tree, name


def test_missing_extra_says_how_to_install_it() -> None:
    error = MissingExtraError("transformers", extra="golden", needed_for="a golden capture")
    assert str(error).startswith("a golden capture needs the package 'transformers', which is not installed")
    assert "pip install" in str(error)
