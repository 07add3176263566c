"""Control characters in text of captures and ports reach no terminal."""

from __future__ import annotations

import json
import unicodedata

import pytest

from minimax_tools.printable import printable, printable_json

HOSTILE = "a\x1b]0;owned\x07b\x9b31mc\u202ed\r\ud800"


def has_control(text: str) -> bool:
    return any(unicodedata.category(char).startswith("C") for char in text if char not in "\n\t")


@pytest.mark.parametrize("text", ["", "plain", "ρ 0.97 ≤ 1.32 · µs 中文 🙂", "two\nlines\tof text"])
def test_text_of_letters_and_lines_stays(text: str) -> None:
    assert printable(text) == text


def test_control_characters_are_escapes() -> None:
    assert has_control(HOSTILE)
    assert printable(HOSTILE) == r"a\x1b]0;owned\x07b\x9b31mc\u202ed\r\ud800"
    assert printable("a\nb", keep="") == r"a\nb"


def test_json_means_the_same() -> None:
    value = {HOSTILE: [HOSTILE, 1.5, None, "中文"]}
    text = printable_json(value)
    assert not has_control(text)
    assert json.loads(text) == value
    assert "中文" in text
