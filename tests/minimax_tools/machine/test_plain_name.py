"""Names of files that a hostile file gives."""

from __future__ import annotations

import pytest

from minimax_tools.machine.files import is_plain_name


@pytest.mark.parametrize("name", ["a", "model-00001-of-00004.safetensors", "ü b", "x" * 255])
def test_name_in_a_folder_is_plain(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\0", "a\nb", "\x1b[31m", "x" * 256, "ü" * 128]
)
def test_name_that_leads_elsewhere_or_that_no_folder_holds_is_not(name: str) -> None:
    assert not is_plain_name(name)
