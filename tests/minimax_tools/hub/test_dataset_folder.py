"""Goldens in a hub's dataset: read file by file, and put in one commit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CheckpointError, RemoteError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.dataset_folder import DatasetFolder
from minimax_tools.model.sites import Site
from minimax_tools.remote.address import RemoteAddress

OLD = Path(__file__).parents[2] / "old_files" / "golden"
FILES = {path.name: path for path in OLD.iterdir()}
CONTENT = {name: path.read_bytes() for name, path in FILES.items()}
GOLDEN = "hf://datasets/owner/golden"

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
def access(access: HubAccess, hub: Any, monkeypatch: pytest.MonkeyPatch) -> HubAccess:
    # The hub of the tests does not speak xet.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return replace(access, token=hub.good_token, num_attempts=2)


@pytest.fixture
def commit(hub: Any) -> str:
    """The commit of a dataset that holds the golden."""
    return str(hub.add("datasets/owner/golden", CONTENT).commit)


@pytest.fixture
def read(hub: Any, tmp_path: Path, forked_python: Any) -> Callable[..., list[str]]:
    """Reads a layer's output in a process of its own: its sum, and the capture's folder."""
    places = {"HF_HOME": str(tmp_path / "home"), "MM2_CACHE": str(tmp_path / "cache")}

    def run(capture: str, layer: int, **more: str) -> list[str]:
        done = forked_python(READ, capture, layer, HF_ENDPOINT=hub.endpoint, **places, **more)
        assert done.returncode == 0, done.stderr
        return str(done.stdout).split()

    return run


def folder(access: HubAccess, text: str = GOLDEN, **fields: Any) -> DatasetFolder:
    return DatasetFolder(RemoteAddress.parse(text), access=replace(access, **fields))


def fetch(dataset: DatasetFolder, name: str, target: Path) -> Path:
    file = dataset.find(name)
    assert file is not None
    dataset.fetch(file, target)
    return target


def test_files_are_those_of_the_folder(hub: Any, access: HubAccess) -> None:
    inside = {f"m2/{name}": content for name, content in CONTENT.items()}
    made = hub.add("datasets/owner/golden", {**inside, "README.md": b"#"})
    dataset = folder(access, f"{GOLDEN}@v2/m2")
    assert dataset.files().keys() == FILES.keys()
    assert dataset.find("README.md") is None
    assert str(dataset.address) == f"{GOLDEN}@{made.commit}/m2"


@pytest.mark.usefixtures("commit")
def test_a_file_is_a_link_into_the_hub_s_cache(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    dataset, name = folder(access), "layer_1.safetensors"
    here = fetch(dataset, name, tmp_path / "here" / name)
    assert here.read_bytes() == CONTENT[name]
    assert (access.cache_dir / "datasets--owner--golden" / "blobs").is_dir()
    dataset.forget(dataset.files()[name], here)
    assert not here.exists()
    fetch(dataset, name, here)
    assert len(hub.asked("GET", name)) == 2


def test_a_dataset_that_is_not_there_is_named(access: HubAccess) -> None:
    with pytest.raises(CheckpointError, match="there is no dataset of that id, or it is private"):
        folder(access).files()


@pytest.mark.usefixtures("commit")
def test_a_golden_comes_by_the_layer_of_one_commit_and_heals(
    hub: Any, tmp_path: Path, read: Callable[..., list[str]]
) -> None:
    totals = [float(Capture.open(OLD).read(layer, Site.OUTPUT).double().sum()) for layer in (0, 1)]
    total, mirror = read(GOLDEN, 1)
    assert float(total) == totals[1]
    fetched = {one.file for one in hub.asked("GET") if "/resolve/" in one.path or "/content/" in one.path}
    assert fetched == {"manifest.json", "generation.json", "layer_1.safetensors"}
    # Without the hub, what was read is here still.
    assert read(GOLDEN, 1, HF_HUB_OFFLINE="1")[0] == total
    # The hub's cache, to which the mirror links, may be cleared.
    shutil.rmtree(tmp_path / "home" / "hub")
    generation = Path(mirror) / "generation.json"
    assert not generation.exists()
    assert read(GOLDEN, 1) == [total, mirror]
    assert generation.read_bytes() == CONTENT["generation.json"]
    # The dataset may go on: a mirror stays at its commit.
    hub.add("datasets/owner/golden", {**CONTENT, "layer_0.safetensors": CONTENT["layer_1.safetensors"]})
    assert float(read(mirror, 0)[0]) == totals[0]


@pytest.mark.usefixtures("commit")
def test_a_file_that_is_not_here_is_told_where_the_hub_is_not_asked(access: HubAccess) -> None:
    offline = folder(access, is_offline=True)
    with pytest.raises(CheckpointError, match=r"lacks manifest\.json of owner/golden, and the hub is not as"):
        offline.find("manifest.json")
    fetch(folder(access), "manifest.json", access.cache_dir / "manifest.json")
    offline = folder(access, is_offline=True)
    assert offline.find("manifest.json") is not None
    with pytest.raises(CheckpointError, match=r"lacks layer_0.safetensors of owner/golden"):
        offline.find("layer_0.safetensors")


def test_a_golden_is_put_in_one_commit(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    assert set(folder(access, f"{GOLDEN}/m2").put(FILES, last="manifest.json")) == set(FILES)
    assert sum("/commit/" in one.path for one in hub.asked("POST")) == 1
    for name, content in CONTENT.items():
        assert fetch(folder(access, f"{GOLDEN}/m2"), name, tmp_path / name).read_bytes() == content


@pytest.mark.usefixtures("commit")
def test_what_a_dataset_has_is_not_put_again(hub: Any, access: HubAccess, tmp_path: Path) -> None:
    assert folder(access).put(FILES, last="manifest.json") == ()
    assert hub.asked("POST") == []
    other = tmp_path / "generation.json"
    other.write_text("{}")
    assert folder(access).put({**FILES, other.name: other}, last="manifest.json") == (other.name,)
    assert hub.asked("PUT") == []


def test_a_commit_that_fails_leaves_nothing_and_sends_nothing_twice(hub: Any, access: HubAccess) -> None:
    hub.plant("POST", "/commit/", status=500, times=9)
    with pytest.raises(RemoteError, match="does not answer, or breaks off"):
        folder(access).put(FILES, last="manifest.json")
    assert folder(access).files() == {}
    hub.faults.clear()
    hub.forget()
    folder(access).put(FILES, last="manifest.json")
    assert hub.asked("PUT") == []
    assert folder(access).files().keys() == FILES.keys()


def test_a_token_that_may_not_write_is_told(access: HubAccess) -> None:
    with pytest.raises(RemoteError, match="the hub wants a token that may write there"):
        folder(access, token="hf_other").put(FILES, last="manifest.json")


def test_a_place_is_asked_for_before_anything_is_put(access: HubAccess, commit: str, tmp_path: Path) -> None:
    folder(access).check_place()
    folder(access, "hf://datasets/owner/new").check_place()  # it is made when something is put there
    with pytest.raises(RemoteError, match=r"a commit stays as it is\. Name a branch: hf://.*@main/m2\."):
        folder(access, f"{GOLDEN}@{commit}/m2").check_place()
    with pytest.raises(RemoteError, match=r"nothing can be put at hf://.*/golden@main: the hub is not asked"):
        folder(access, is_offline=True).check_place()
    # What the cache has does not stand for a hub that is away.
    fetch(folder(access), "manifest.json", tmp_path / "fetched")
    away = folder(access, endpoint="http://127.0.0.1:1")
    assert away.find("manifest.json") is not None
    with pytest.raises(RemoteError, match=r"nothing could be put at .*: http://127.0.0.1:1 does not answer"):
        away.check_place()
