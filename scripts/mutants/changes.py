"""Changes: the lines of the working tree that differ from another branch, by git."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_FILE = re.compile(r"^\+\+\+ b/(.+)$")
_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")


def changed_lines(root: Path, base: str) -> Mapping[Path, frozenset[int]]:
    """Return the lines of each file, by its path in the repository, that were added or changed since `base`.

    Changes of the base since the two parted do not count. Files that git does not know yet count whole.

    Raises:
        subprocess.CalledProcessError: There is no such branch.
    """
    parted = _git(root, "merge-base", base, "HEAD").strip()
    lines: dict[Path, set[int]] = {}
    for line in _git(root, "diff", "--unified=0", "--no-color", "--no-ext-diff", parted).splitlines():
        if named := _FILE.match(line):
            file = Path(named[1])
        elif hunk := _HUNK.match(line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(file, set()).update(range(start, start + count))
    for name in _git(root, "ls-files", "--others", "--exclude-standard").splitlines():
        if name.endswith(".py"):
            lines[Path(name)] = set(range(1, len((root / name).read_text().splitlines()) + 1))
    return {file: frozenset(numbers) for file, numbers in lines.items()}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
