"""README.zh-CN.md has the commands, links, tables and figures of README.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_SPAN = re.compile(r"`(?P<text>[^`\n]+)`")
_FIGURE = re.compile(r"\d+(?:\.\d+)*")


def differences(english: str, chinese: str) -> Iterator[str]:
    """Yield what one page has and the other has not, words of sentences aside."""
    for what, of_page in {
        "commands": _commands,
        "code": _code,
        "outputs": _outputs,
        "links": _links,
        "code spans": _spans,
        "first cells": _first_cells,
        "figures": _figures,
    }.items():
        ours, theirs = Counter(of_page(english)), Counter(of_page(chinese))
        for text in [*(ours - theirs), *(theirs - ours)]:
            yield f"{what}: {text!r} is {ours[text]} times in English, {theirs[text]} times in Chinese"
    if _links(english) != _links(chinese):
        yield "links: their order differs"


def _blocks(page: str, language: str) -> Iterator[str]:
    yield from (block["text"] for block in _BLOCK.finditer(page) if block["language"] == language)


def _commands(page: str) -> list[str]:
    """Return the lines of the bash blocks, without their comments."""
    lines = [line for block in _blocks(page, "bash") for line in block.splitlines()]
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))]


def _code(page: str) -> list[str]:
    return [ast.dump(ast.parse(block)) for block in _blocks(page, "python")]


def _outputs(page: str) -> list[str]:
    return list(_blocks(page, "text"))


def _links(page: str) -> list[str]:
    """Return where the links lead; the pages' links to each other are one."""
    targets = [link["target"] for link in _LINK.finditer(page)]
    return ["the other README" if target.startswith("README") else target for target in targets]


def _spans(page: str) -> list[str]:
    return [span["text"] for span in _SPAN.finditer(_BLOCK.sub("", page))]


def _first_cells(page: str) -> list[str]:
    """Return the first cells of the tables of commands and exit codes, and how many rows all tables have."""
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]
    return [*(row for row in rows if re.match(r"[`\d]", row)), f"{len(rows)} rows"]


def _figures(page: str) -> set[str]:
    return set(_FIGURE.findall(_BLOCK.sub("", page)))


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_chinese_readme_says_what_the_english_one_says() -> None:
    assert list(differences(read("README.md"), read("README.zh-CN.md"))) == []


def test_chinese_readme_has_the_headings_of_the_english_one() -> None:
    levels = [
        re.findall(r"^#+(?= )", _BLOCK.sub("", read(name)), re.MULTILINE)
        for name in ("README.md", "README.zh-CN.md")
    ]
    assert levels[0] == levels[1]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("mm2-diagnose --golden full_model", "mm2-diagnose --golden ./golden", "commands: 'mm2-diagnose"),
        ("| 2 | ", "| 4 | ", "first cells: '2'"),
        ("低于 1.32", "低于 1.31", "figures: '1.32' is 1 times in English, 0 times"),
    ],
)
def test_difference_is_named(old: str, new: str, fault: str) -> None:
    chinese = read("README.zh-CN.md")
    assert old in chinese
    found = list(differences(read("README.md"), chinese.replace(old, new, 1)))
    assert any(text.startswith(fault) for text in found), found
