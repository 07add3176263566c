"""Glossary: the words and sites that the page explains where they stand, as docs/sites.md has them.

An installed mm2 has no docs/: `assets/sites.md` is that page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from markupsafe import Markup, escape

_PAGE = Path(__file__).with_name("assets").joinpath("sites.md").read_text(encoding="utf-8")


def _read_rows(row: str) -> Mapping[str, str]:
    """Return words and meanings, without their marks, of the page's rows with this pattern."""
    rows = re.findall(rf"^\| {row} \|$", _PAGE, re.MULTILINE)
    return MappingProxyType({word: re.sub("[*`]", "", meaning) for word, meaning in rows})


GLOSSARY = _read_rows(r"\*\*(.+?)\*\* \| (.+)")
# Between a site and its meaning stands its shape, behind that the places where it is found.
SITE_MEANINGS = _read_rows(r"`(\w+)` \| \[[^|]+\] \| ([^|]+) \| [^|]+")
# A name before a dot is a weight's, such as `q_proj.weight`.
_NAMES = re.compile(rf"(?<![\w.])({'|'.join(SITE_MEANINGS)})(?!\w|\.\w)")


def explain_place(text: str) -> Markup:
    """Return a place as HTML, each site in it with its meaning."""
    return Markup("").join(
        _explain(part) if part in SITE_MEANINGS else escape(part) for part in _NAMES.split(text)
    )


def explain_sentence(text: str) -> Markup:
    """Return a sentence as HTML, each site with its meaning; `output` and the like may be plain words there."""
    return Markup("").join(
        _explain(part) if "_" in part and part in SITE_MEANINGS else escape(part)
        for part in _NAMES.split(text)
    )


def _explain(site: str) -> Markup:
    tip = f"{site}: {SITE_MEANINGS[site]}"
    return Markup('<abbr class="site-name" data-tip="{}">{}</abbr>').format(tip, site)
