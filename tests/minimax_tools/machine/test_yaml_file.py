"""YAML that a user wrote: plain values, one kind of error, and bounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.machine.yaml_file import compose_yaml, read_yaml

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "file.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_plain_values_are_read(write: Write) -> None:
    assert read_yaml(write("a: [1, x, true, null]\nb: {c: 1.5}")) == {
        "a": [1, "x", True, None],
        "b": {"c": 1.5},
    }
    assert read_yaml(write("")) is None
    assert compose_yaml(write("# nothing")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "is not valid YAML"),
        ("[" * 65 + "]" * 65, "line 1, column 65: values nested more than 64 deep"),
        ("a: &x [1]\nb: *x", "line 2, column 4: the alias *x, which mm2 does not read"),
        ("a: &x [*x]", "alias"),
        ("a: 1\na: 2", "names 'a' twice: found the second in line 2"),
        ("a: 2026-99-99", "is not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("a: [", "is not valid YAML"),
        ("a: \x07", "is not valid YAML"),
    ],
)
def test_mistake_is_one_error_that_names_the_file(write: Write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_depth_that_is_allowed_is_read(write: Write) -> None:
    assert read_yaml(write("[" * 64 + "]" * 64)) is not None
