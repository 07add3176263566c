from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.cli import mm2_split
from minimax_tools.errors import RemoteError
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.cache import CAPTURES, RemoteCache, check_room


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteCache:
    monkeypatch.setenv("MM2_CACHE", str(tmp_path / "cache"))
    return RemoteCache.from_environment()


def test_versions_of_an_address_have_folders_of_their_own(cache: RemoteCache) -> None:
    address = RemoteAddress.parse("s3://lab/goldens/m2 7")
    first, second = (cache.place(CAPTURES, address, version) for version in ("a", "b"))
    assert first != second
    assert first.name.startswith("m2_7-")


def test_the_cache_is_listed_and_cleared(cache: RemoteCache, command: Any) -> None:
    folder = cache.place(CAPTURES, RemoteAddress.parse("s3://lab/golden"), "1")
    folder.mkdir(parents=True)
    (folder / "layer_0.safetensors").write_bytes(bytes(1000))
    (cache.folder / "other").mkdir()
    shown = command(mm2_split, "cache")
    assert "1.0 kB  captures  golden-" in shown.stdout
    record = json.loads(command(mm2_split, "cache", "--json").stdout)
    assert [(one["kind"], one["size_bytes"]) for one in record["folders"]] == [("captures", 1000)]
    assert command(mm2_split, "cache", "--clear").exit_code == 0
    assert not folder.exists()
    assert (cache.folder / "other").exists()
    assert json.loads(command(mm2_split, "cache", "--json").stdout)["folders"] == []


def test_a_disk_that_is_too_small_is_told_before_a_file_comes(tmp_path: Path) -> None:
    with pytest.raises(
        RemoteError, match=r"is too small for layer_0.*mm2-split cache --clear, or set MM2_CACHE"
    ):
        check_room(tmp_path, 1 << 60, what="layer_0")
