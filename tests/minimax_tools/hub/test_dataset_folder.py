"""Goldens in a hub's dataset: read file by file, and put in one commit."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub import constants

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CheckpointError, RemoteError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.dataset_folder import DatasetFolder
from minimax_tools.model.sites import Site
from minimax_tools.remote.address import RemoteAddress

ROOT = Path(__file__).parents[3]
OLD = ROOT / "tests" / "old_files" / "golden"

# httpx2 warns of the way in which huggingface_hub uploads.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

# Runs with the hub's variables: huggingface_hub reads them when it is imported. Given are a capture and a layer.
READ = """
import sys
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
address, layer = sys.argv[1:]
capture = Capture.open(address)
print(float(capture.read(int(layer), Site.OUTPUT).double().sum()), capture.directory)
"""


@pytest.fixture
def access(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubAccess:
    # The hub of the tests does not speak xet.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return HubAccess(
        endpoint=hub.endpoint,
        cache_dir=tmp_path / "hub",
        token="hf_good",
        first_delay_s=0.01,
        num_attempts=2,
        timeout_s=60,
    )


def folder(access: HubAccess, text: str = "hf://datasets/owner/golden") -> DatasetFolder:
    return DatasetFolder(RemoteAddress.parse(text), access=access)


def golden_files(prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}{path.name}": path.read_bytes() for path in OLD.iterdir()}


def environment(hub: Any, tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "MM2_CACHE": str(tmp_path / "cache"),
        **more,
    }


def test_files_are_those_of_the_folder(hub: Any, access: HubAccess) -> None:
    made = hub.add("datasets/owner/golden", golden_files("m2/") | {"README.md": b"#"})
    inside = folder(access, "hf://datasets/owner/golden@v2/m2")
    assert set(inside.files()) == {path.name for path in OLD.iterdir()}
    assert inside.find("README.md") is None
    assert str(inside.address) == f"hf://datasets/owner/golden@{made.commit}/m2"


def test_a_file_is_a_link_into_the_hub_s_cache(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    hub.add("datasets/owner/golden", golden_files())
    dataset = folder(access)
    file = dataset.find("layer_1.safetensors")
    assert file is not None
    dataset.fetch(file, tmp_path / "here" / "layer_1.safetensors")
    assert (tmp_path / "here" / "layer_1.safetensors").read_bytes() == (
        OLD / "layer_1.safetensors"
    ).read_bytes()
    assert (access.cache_dir / "datasets--owner--golden" / "blobs").is_dir()
    dataset.forget(file, tmp_path / "here" / "layer_1.safetensors")
    assert not (tmp_path / "here" / "layer_1.safetensors").exists()
    dataset.fetch(file, tmp_path / "here" / "layer_1.safetensors")
    assert len(hub.asked("GET", "layer_1.safetensors")) == 2


def test_a_dataset_that_is_not_there_is_named(hub: Any, access: HubAccess) -> None:
    with pytest.raises(CheckpointError, match="there is no dataset of that id, or it is private"):
        folder(access).files()


def test_a_golden_of_a_dataset_comes_by_the_layer(hub: Any, read: Callable[..., list[str]]) -> None:
    hub.add("datasets/owner/golden", golden_files())
    value, _ = read("hf://datasets/owner/golden", 1)
    assert float(value) == float(Capture.open(OLD).read(1, Site.OUTPUT).double().sum())
    fetched = {one.file for one in hub.asked("GET") if "/resolve/" in one.path or "/content/" in one.path}
    assert fetched == {"manifest.json", "generation.json", "layer_1.safetensors"}
    # Without the hub, what was read is here still.
    assert read("hf://datasets/owner/golden", 1, HF_HUB_OFFLINE="1")[0] == value


def test_a_file_that_is_not_here_is_told_where_the_hub_is_not_asked(hub: Any, access: HubAccess) -> None:
    hub.add("datasets/owner/golden", golden_files())
    offline = dataclasses.replace(access, is_offline=True)
    with pytest.raises(
        CheckpointError, match=r"lacks manifest.json of owner/golden, and the hub is not asked"
    ):
        folder(offline).find("manifest.json")
    dataset = folder(access)
    file = dataset.find("manifest.json")
    assert file is not None
    dataset.fetch(file, access.cache_dir / "manifest.json")
    assert folder(offline).find("manifest.json") is not None
    with pytest.raises(CheckpointError, match=r"lacks layer_0.safetensors of owner/golden"):
        folder(offline).find("layer_0.safetensors")


def test_a_golden_is_put_in_one_commit(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    dataset = folder(access, "hf://datasets/owner/new/m2")
    dataset.put({path.name: path for path in OLD.iterdir()}, last="manifest.json")
    posts = [one.path for one in hub.asked("POST")]
    assert sum("/commit/" in path for path in posts) == 1
    read = folder(access, "hf://datasets/owner/new/m2")
    for path in OLD.iterdir():
        file = read.find(path.name)
        assert file is not None
        read.fetch(file, tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_what_a_dataset_has_is_not_put_again(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    files = {path.name: path for path in OLD.iterdir()}
    assert set(folder(access).put(files, last="manifest.json")) == set(files)
    hub.forget()
    assert folder(access).put(files, last="manifest.json") == ()
    assert hub.asked("POST") == []
    other = tmp_path / "generation.json"
    other.write_text("{}")
    assert folder(access).put(files | {other.name: other}, last="manifest.json") == (other.name,)
    assert hub.asked("PUT") == []


def test_a_commit_that_fails_leaves_nothing_and_sends_nothing_twice(hub: Any, access: HubAccess) -> None:
    files = {path.name: path for path in OLD.iterdir()}
    hub.plant("POST", "/commit/", hub_fault(hub, 500), times=9)
    with pytest.raises(RemoteError, match="does not answer, or breaks off"):
        folder(access).put(files, last="manifest.json")
    assert folder(access).files() == {}
    hub._faults.clear()
    hub.forget()
    folder(access).put(files, last="manifest.json")
    assert hub.asked("PUT") == []
    assert set(folder(access).files()) == set(files)


def test_a_token_that_may_not_write_is_told(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    stranger = dataclasses.replace(access, token="hf_other")
    with pytest.raises(RemoteError, match="the hub wants a token that may write there"):
        folder(stranger).put({path.name: path for path in OLD.iterdir()}, last="manifest.json")


def test_a_place_is_asked_for_before_anything_is_put(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    made = hub.add("datasets/owner/golden", golden_files())
    folder(access).check_place()
    folder(access, "hf://datasets/owner/new").check_place()  # it is made when something is put there
    with pytest.raises(RemoteError, match=r"a commit stays as it is\. Name a branch: hf://.*@main/m2\."):
        folder(access, f"hf://datasets/owner/golden@{made.commit}/m2").check_place()
    offline = folder(dataclasses.replace(access, is_offline=True))
    with pytest.raises(RemoteError, match=r"nothing can be put at hf://.*/golden@main: the hub is not asked"):
        offline.check_place()
    # What the cache has does not stand for a hub that is away.
    file = folder(access).find("manifest.json")
    assert file is not None
    folder(access).fetch(file, tmp_path / "fetched")
    away = folder(dataclasses.replace(access, endpoint="http://127.0.0.1:1"))
    assert away.find("manifest.json") is not None
    with pytest.raises(RemoteError, match=r"nothing could be put at .*: http://127.0.0.1:1 does not answer"):
        away.check_place()


def test_a_mirror_heals_where_the_hub_s_cache_was_cleared(
    hub: Any, tmp_path: Path, read: Callable[..., list[str]]
) -> None:
    hub.add("datasets/owner/golden", golden_files())
    first = read("hf://datasets/owner/golden", 1)
    shutil.rmtree(tmp_path / "home" / "hub")
    generation = Path(first[1]) / "generation.json"
    assert not generation.exists()
    assert read("hf://datasets/owner/golden", 1) == first
    assert generation.read_bytes() == (OLD / "generation.json").read_bytes()


def hub_fault(hub: Any, status: int) -> Any:
    module: ModuleType = sys.modules[type(hub).__module__]
    return module.Fault(status=status)


def test_a_mirror_is_pinned_to_a_commit(hub: Any, read: Callable[..., list[str]]) -> None:
    hub.add("datasets/owner/golden", golden_files())
    first = read("hf://datasets/owner/golden", 0)
    other = golden_files() | {"layer_1.safetensors": (OLD / "layer_0.safetensors").read_bytes()}
    hub.add("datasets/owner/golden", other)
    value, _ = read(first[1], 1)
    assert float(value) == float(Capture.open(OLD).read(1, Site.OUTPUT).double().sum())


@pytest.fixture
def read(hub: Any, tmp_path: Path, forked_python: Any) -> Callable[..., list[str]]:
    """Reads a layer's output in a process of its own: its sum, and the capture's folder."""

    def run(capture: str, layer: int, **more: str) -> list[str]:
        done = forked_python(READ, capture, layer, **environment(hub, tmp_path, **more))
        assert done.returncode == 0, done.stderr
        return str(done.stdout).split()

    return run
