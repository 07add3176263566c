"""Bash blocks of all pages: each is run by a test, or excused by name in `test_docs_commands.py`."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
# The blocks of this page are those of another one, and a test says so.
CHINESE = "README.zh-CN.md"
# Every fence of a page, indented ones too.
_FENCE = re.compile(r"^[ >]*(?:```|~~~).*$", re.MULTILINE)
FENCES = {
    "```",
    *(f"```{language}" for language in ("bash", "json", "mermaid", "python", "text", "toml", "yaml")),
}


@pytest.fixture(scope="module")
def tables(load_module: Any) -> Any:
    """The tables of `test_docs_commands.py`, and what reads a page by them."""
    return load_module(TESTS / "test_docs_commands.py")


def pages(root: Path) -> dict[str, str]:
    """Return the text of every page, by its path."""
    files = (*root.glob("README*.md"), *root.glob("docs/**/*.md"), *root.glob("skills/**/*.md"))
    return {str(file.relative_to(root)): file.read_text() for file in sorted(files)}


def unaccounted(root: Path, tables: Any) -> Iterator[str]:
    """Yield blocks that are neither run nor excused, and words of the tables that no page has."""
    texts = pages(root)
    for page, text in texts.items():
        yield from _unseen_blocks(page, text)
        yield from _blocks_not_run(page, text, tables)
    yield from _idle_words(texts, tables)


def _unseen_blocks(page: str, text: str) -> Iterator[str]:
    fences = Counter(_FENCE.findall(text))
    for fence in sorted(set(fences) - FENCES):
        yield f"{page}: a block begins with {fence!r}, which no test sees"
    if fences["```"] * 2 != sum(fences.values()):
        yield f"{page}: a block names no language, so no test sees it"


def _blocks_not_run(page: str, text: str, tables: Any) -> Iterator[str]:
    blocks = [block for block in tables.bash_blocks(text) if not tables.excuses(page, block)]
    if blocks and page not in tables.RUN_BY:
        yield f"{page}: no test runs {blocks[0].splitlines()[0]!r}"
    commands = "".join(tables.here(page, block) for block in blocks)
    for word in () if page == CHINESE else tables.NOT_HERE:
        if word in commands and not re.search(rf"^cp .* {re.escape(word)}$", commands, re.MULTILINE):
            yield f"{page}: a block that is run needs {word!r}: excuse it, or give a stand-in"


def _idle_words(texts: dict[str, str], tables: Any) -> Iterator[str]:
    blocks = {page: tables.bash_blocks(text) for page, text in texts.items()}
    for excuse in tables.EXCUSED:
        found = [block for block in blocks.get(excuse.page, ()) if excuse.phrase in block]
        if len(found) != 1:
            yield f"{excuse.page}: {len(found)} blocks have the excused {excuse.phrase!r}"
    tests = "".join(file.read_text() for file in TESTS.glob("test_docs*.py"))
    for page, test in tables.RUN_BY.items():
        if not blocks.get(page):
            yield f"{page}: no such page, or one without commands"
        if f"def {test}(" not in tests:
            yield f"{page}: there is no {test}"
    for page, words in tables.STAND_INS.items():
        for word in words:
            if word not in "".join(blocks.get(page, ())):
                yield f"{page}: no block has {word!r}, which has a stand-in"
    for page, begin in tables.OF_ANOTHER_RUN.items():
        if f"```text\n{begin}" not in texts.get(page, ""):
            yield f"{page}: no output begins with {begin!r}"


def test_every_block_is_run_or_excused(tables: Any) -> None:
    assert list(unaccounted(REPOSITORY, tables)) == []


def test_every_excuse_says_why(tables: Any) -> None:
    assert all(excuse.reason for excuse in tables.EXCUSED)
    assert len(set(tables.EXCUSED)) == len(tables.EXCUSED)


NEW_BLOCK = "```bash\nmm2-gpu show golden\n```\n"


@pytest.mark.parametrize(
    ("page", "old", "new", "fault"),
    [
        ("docs/new.md", "", f"# New\n{NEW_BLOCK}", "docs/new.md: no test runs"),
        ("docs/command-line.md", "--model model", "--model MiniMaxAI/MiniMax-M2", "needs 'MiniMaxAI/'"),
        ("docs/splitting.md", "```bash\nmm2-split memory", "```sh\nmm2-split memory", "begins with '```sh'"),
        ("docs/whole-ports.md", "FAIL: prefill, layer 2", "FAIL: prefill, layer 3", "no output begins with"),
    ],
)
def test_block_that_is_neither_is_named(
    tmp_path: Path, tables: Any, page: str, old: str, new: str, fault: str
) -> None:
    for folder in ("docs", "skills"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    for readme in REPOSITORY.glob("README*.md"):
        shutil.copy(readme, tmp_path)
    (tmp_path / page).parent.mkdir(exist_ok=True)
    text = (tmp_path / page).read_text() if old else ""
    assert old in text
    (tmp_path / page).write_text(text.replace(old, new, 1) if old else new)
    assert any(found.startswith(f"{page}: ") and fault in found for found in unaccounted(tmp_path, tables))
