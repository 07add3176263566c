from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.cli import mm2_split
from minimax_tools.errors import RemoteError
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.cache import CAPTURES, MODELS, RemoteCache, check_room


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteCache:
    monkeypatch.setenv("MM2_CACHE", str(tmp_path / "cache"))
    return RemoteCache.from_environment()


def fill(
    cache: RemoteCache, name: str, *, kind: str = CAPTURES, size_bytes: int = 1000, day: int = 1
) -> Path:
    """Make a folder of the cache that was used last on a day of January 2026."""
    folder = cache.place(kind, RemoteAddress.parse(f"s3://lab/{name}"), "1")
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "layer_0.safetensors").write_bytes(bytes(size_bytes))
    used_s = datetime(2026, 1, day, tzinfo=timezone.utc).timestamp()
    os.utime(folder, (used_s, used_s))
    return folder


def folders(command: Any, *options: object) -> list[dict[str, Any]]:
    done = command(mm2_split, "cache", *options, "--json")
    assert done.exit_code == 0, done.output
    listed: list[dict[str, Any]] = json.loads(done.stdout)["folders"]
    return listed


def test_the_cache_is_listed_and_cleared(cache: RemoteCache, command: Any) -> None:
    folder = fill(cache, "golden", day=7)
    (folder / ".address.json").write_text('{"asked": "s3://lab/golden", "address": "s3://lab/golden"}')
    (cache.folder / "other").mkdir()
    shown = command(mm2_split, "cache").stdout
    assert "s3://lab/golden" in shown
    (listed,) = folders(command)
    assert listed["address"] == "s3://lab/golden"
    assert (listed["kind"], listed["removed"]) == ("captures", False)
    (cleared,) = folders(command, "--clear")
    assert (cleared["address"], cleared["removed"]) == ("s3://lab/golden", True)
    assert not folder.exists()
    assert (cache.folder / "other").exists()
    assert folders(command) == []


def test_what_was_used_least_lately_is_removed_first(cache: RemoteCache, command: Any) -> None:
    old, new = fill(cache, "old", day=1), fill(cache, "new", day=3)
    middle = fill(cache, "middle", kind=MODELS, day=2)
    assert [one["removed"] for one in folders(command, "--keep", "2kB")] == [False, False, True]
    assert (new.exists(), middle.exists(), old.exists()) == (True, True, False)
    assert [one["removed"] for one in folders(command, "--keep", "2kB")] == [False, False]
    assert "middle" in command(mm2_split, "cache", "--keep", "1kB").stdout
    assert (new.exists(), middle.exists()) == (True, False)


def test_a_file_that_folders_share_is_counted_once(cache: RemoteCache, command: Any) -> None:
    old, new = fill(cache, "old", day=1), fill(cache, "new", day=3)
    file = Path("run", "layer_0.safetensors")
    for name in ("certified", "again"):
        shared = fill(cache, name, size_bytes=10, day=2)
        (shared / file).unlink()
        os.link(new / file, shared / file)
        os.utime(shared, (new.stat().st_mtime - 1,) * 2)
    # Of one content in three folders: what was used last has the bytes.
    assert [one["size_bytes"] for one in folders(command)] == [1000, 0, 0, 1000]
    # All is within the limit, and nothing goes; then the oldest file of its own is enough.
    assert not any(one["removed"] for one in folders(command, "--keep", "2kB"))
    assert [one["removed"] for one in folders(command, "--keep", "1kB")] == [False, False, False, True]
    assert (old.exists(), (shared / file).stat().st_size) == (False, 1000)


def test_a_disk_that_is_too_small_is_told_before_a_file_comes(tmp_path: Path) -> None:
    with pytest.raises(
        RemoteError, match=r"is too small for layer_0.*mm2-split cache --keep SIZE, or set MM2_CACHE"
    ):
        check_room(tmp_path, 1 << 60, what="layer_0")
