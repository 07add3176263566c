"""LICENSE, CITATION.cff and CONTRIBUTING.md say what pyproject.toml, the Makefile and the checks do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
import yaml

REPOSITORY = Path(__file__).parents[1]
# sha256 of the license as apache.org publishes it.
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
FILES = ("LICENSE", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "pyproject.toml")


def find_faults(root: Path) -> Iterator[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    if hashlib.sha256((root / "LICENSE").read_bytes()).hexdigest() != APACHE_2:
        yield "LICENSE is not the Apache License 2.0 as published"
    if (project["license"], project["license-files"]) != ("Apache-2.0", ["LICENSE"]):
        yield f"pyproject.toml: license {project['license']}"
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    for key in ("version", "license"):
        if citation[key] != project[key]:
            yield f"CITATION.cff: {key} {citation[key]}, pyproject.toml has {project[key]}"
    missing = {"cff-version", "message", "title", "authors"} - citation.keys()
    if missing:
        yield f"CITATION.cff: no {', '.join(sorted(missing))}"
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    guide = (root / "CONTRIBUTING.md").read_text()
    for target in sorted(set(re.findall(r"\bmake ([a-z]+)\b", guide)) - targets):
        yield f"CONTRIBUTING.md: there is no make {target}"
    for path in re.findall(r"-m pytest (tests/\S*\w)", guide):
        if not (REPOSITORY / path).exists():
            yield f"CONTRIBUTING.md: there is no {path}"
    if "[Apache License 2.0](LICENSE)" not in guide:
        yield "CONTRIBUTING.md does not name the license"


def test_project_files_agree() -> None:
    assert list(find_faults(REPOSITORY)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("LICENSE", "APPENDIX", "Appendix", "LICENSE is not the Apache License 2.0"),
        ("pyproject.toml", 'license = "Apache-2.0"', 'license = "MIT"', "pyproject.toml: license MIT"),
        ("CITATION.cff", "version: 0.1.0", "version: 9.9.9", "version 9.9.9, pyproject.toml has"),
        ("CITATION.cff", "message:", "massage:", "no message"),
        ("CONTRIBUTING.md", "make fix", "make tidy", "there is no make tidy"),
        ("CONTRIBUTING.md", "tests/compare/noise", "tests/compare/nose", "there is no tests/compare/nose"),
    ],
)
def test_planted_fault_is_named(tmp_path: Path, file: str, old: str, new: str, fault: str) -> None:
    for name in FILES:
        text = (REPOSITORY / name).read_text()
        assert name != file or old in text
        (tmp_path / name).write_text(text.replace(old, new) if name == file else text)
    assert any(fault in found for found in find_faults(tmp_path))
