"""Versions of libraries that are known to make wrong goldens, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenVersions:
    """The versions of a package before the first good one."""

    package: str
    first_good: str
    why: str

    def is_among(self, version: str) -> bool:
        """Whether a version is one of them."""
        return _numbers(version) < _numbers(self.first_good)


BROKEN_VERSIONS = (
    BrokenVersions(
        package="transformers",
        first_good="5.23",
        why="it ignores rotary_dim and rotates whole heads (transformers#48241)",
    ),
)


def find_broken(versions: Mapping[str, str]) -> list[str]:
    """Each recorded version that is known to be broken, in words."""
    return [
        f"{broken.package} {versions[broken.package]}: {broken.why}"
        for broken in BROKEN_VERSIONS
        if broken.package in versions and broken.is_among(versions[broken.package])
    ]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()
