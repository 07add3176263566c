from __future__ import annotations

import re
from pathlib import Path

from reports.page.glossary import GLOSSARY

REPOSITORY = Path(__file__).parents[3]
_ROW = re.compile(r"^\| \*\*(?P<word>.+?)\*\* \| (?P<meaning>.+) \|$", re.MULTILINE)


def test_page_explains_words_as_the_glossary_does() -> None:
    text = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
    told = {row["word"]: re.sub("[*`]", "", row["meaning"]) for row in _ROW.finditer(text)}
    assert dict(GLOSSARY) == told


def test_template_explains_known_words_only() -> None:
    template = (REPOSITORY / "reports" / "page" / "assets" / "report.html.j2").read_text(encoding="utf-8")
    used = set(re.findall(r"term\('([^']+)'", template))
    assert len(used) > 5
    assert used <= set(GLOSSARY)
