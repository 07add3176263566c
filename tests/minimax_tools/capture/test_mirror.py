"""A capture at an address is read as a local one is, file by file, and never half or damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, RemoteError, UsageError
from minimax_tools.model.sites import Site

OLD = Path(__file__).parents[2] / "old_files" / "golden"
ADDRESS = "s3://lab/goldens/toy"
LAYER = "layer_1.safetensors"

Put = Callable[[str, bytes], None]


@pytest.fixture
def put(s3: Any) -> Put:
    """Puts a file into the published golden."""

    def put_file(name: str, content: bytes) -> None:
        s3.objects.put_object(Bucket="lab", Key=f"goldens/toy/{name}", Body=content)

    return put_file


@pytest.fixture
def published(s3: Any, put: Put) -> Any:
    for path in OLD.iterdir():
        put(path.name, path.read_bytes())
    s3.forget()
    return s3


def here(capture: Capture) -> set[str]:
    return {path.name for path in capture.directory.iterdir() if not path.name.startswith(".")}


def read_layer(place: Path | str) -> torch.Tensor:
    return Capture.open(place).read(1, Site.OUTPUT)


def sum_in_a_process(_: int) -> float:
    return float(read_layer(ADDRESS).double().sum())


def edited_manifest(edit: Callable[[Any], None]) -> bytes:
    record = json.loads((OLD / MANIFEST_NAME).read_text())
    edit(record)
    return json.dumps(record).encode()


def test_capture_at_an_address_is_the_local_one_and_files_come_when_they_are_read(published: Any) -> None:
    local, remote = Capture.open(OLD), Capture.open(ADDRESS)
    assert here(remote) == {"manifest.json", "generation.json"}
    assert torch.equal(remote.read(1, Site.OUTPUT), local.read(1, Site.OUTPUT))
    assert published.fetched() == ["manifest.json", "generation.json", LAYER]
    remote.read_twin(1, Site.OUTPUT)
    assert here(remote) == {"manifest.json", "generation.json", LAYER, "layer_1.fp32.safetensors"}
    assert remote.manifest == local.manifest
    assert remote.read_generation() == local.read_generation()
    assert remote.read_inputs().digest() == local.read_inputs().digest()
    # The folder serves other processes.
    assert torch.equal(Capture.open(remote.directory).read(0, Site.OUTPUT), local.read(0, Site.OUTPUT))
    assert address_of(remote.directory) == ADDRESS


@pytest.mark.slow
def test_two_processes_share_the_cache(published: Any) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sums = pool.map(sum_in_a_process, range(4), chunksize=1)
    assert len(set(sums)) == 1
    assert len(published.asked("GET", LAYER)) == 1


def test_damaged_file_is_fetched_once_more(published: Any, caplog: pytest.LogCaptureFixture) -> None:
    published.plant("GET", LAYER, is_corrupt=True)
    assert torch.equal(read_layer(ADDRESS), read_layer(OLD))
    assert f"{LAYER} of {ADDRESS} came damaged" in caplog.text


def test_file_that_is_damaged_there_is_refused_by_name(published: Any, put: Put) -> None:
    damaged = bytearray((OLD / LAYER).read_bytes())
    damaged[-1] ^= 1
    put(LAYER, bytes(damaged))
    capture = Capture.open(ADDRESS)
    with pytest.raises(CaptureError, match=f"^{LAYER} of {ADDRESS} came damaged twice.*publish it again"):
        capture.read(1, Site.OUTPUT)
    assert LAYER not in here(capture)
    shutil.rmtree(capture.directory)
    put("generation.json", b"{}")
    with pytest.raises(CaptureError, match=f"generation.json of {ADDRESS} came damaged twice"):
        Capture.open(ADDRESS)


def test_manifest_never_names_a_file_elsewhere(s3: Any, put: Put, tmp_path: Path) -> None:
    def move(record: Any) -> None:
        for entry in record["entries"]:
            entry["file"] = f"../../../{entry['file']}"

    put(MANIFEST_NAME, edited_manifest(move))
    with pytest.raises(
        CaptureError, match=rf"^manifest\.json of {ADDRESS} is damaged, or of .* no file of a"
    ):
        read_layer(ADDRESS)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_not_there_is_named(published: Any) -> None:
    with pytest.raises(CaptureError, match="Name one of the captures in it: toy"):
        Capture.open("s3://lab/goldens")
    published.objects.delete_object(Bucket="lab", Key=f"goldens/toy/{LAYER}")
    with pytest.raises(CaptureError, match=f"holds no {LAYER}, which its manifest lists"):
        read_layer(ADDRESS)
    published.objects.delete_object(Bucket="lab", Key=f"goldens/toy/{MANIFEST_NAME}")
    with pytest.raises(CaptureError, match="is not whole: manifest.json comes last, and is not there yet"):
        Capture.open(ADDRESS)


def test_replaced_golden_gets_a_folder_of_its_own(published: Any, put: Put) -> None:
    old = Capture.open(ADDRESS)
    put(MANIFEST_NAME, edited_manifest(lambda record: record["provenance"].update(device="another")))
    new = Capture.open(ADDRESS)
    assert new.directory != old.directory
    assert new.description.provenance.device == "another"


def test_what_was_read_before_is_read_without_the_server(
    published: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_layer(ADDRESS)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    again = Capture.open(ADDRESS)
    assert "does not answer: taking what it was when it was read last" in caplog.text
    assert torch.equal(again.read(1, Site.OUTPUT), read_layer(OLD))
    with pytest.raises(RemoteError, match=r"layer_0.safetensors of .* S3 does not answer"):
        again.read(0, Site.OUTPUT)
    shutil.rmtree(os.environ["MM2_CACHE"])
    with pytest.raises(RemoteError, match="S3 does not answer"):
        Capture.open(ADDRESS)


def test_copy_that_is_damaged_here_is_fetched_again_once_it_is_removed(published: Any) -> None:
    capture = Capture.open(ADDRESS)
    capture.read(1, Site.OUTPUT)
    copy = capture.directory / LAYER
    copy.write_bytes(copy.read_bytes()[:100])
    with pytest.raises(
        CaptureError, match=rf"^the copy of the golden {ADDRESS} on this machine is damaged"
    ) as caught:
        read_layer(ADDRESS)
    assert caught.value.next_step == f"Remove the file from {capture.directory}: it is fetched again."
    copy.unlink()
    assert torch.equal(read_layer(ADDRESS), read_layer(OLD))


def test_mirror_without_a_right_manifest_or_address_is_made_again(published: Any) -> None:
    directory, manifest = Capture.open(ADDRESS).directory, Capture.open(OLD).manifest
    for name in (MANIFEST_NAME, ".address.json"):
        for text in ("[1]", '{"asked": 1, "address": 2, "directory": 3, "tag": 4}'):
            (directory / name).write_text(text)
            capture = Capture.open(ADDRESS)
            assert capture.directory == directory, (name, text)
            assert capture.manifest == manifest, (name, text)
            assert address_of(directory) == ADDRESS, (name, text)


def test_mirror_whose_address_cannot_be_read_is_refused_by_name(published: Any) -> None:
    directory = Capture.open(ADDRESS).directory
    (directory / ".address.json").write_text('{"asked": "/x", "address": "/x"}')
    assert address_of(directory) == str(directory)
    with pytest.raises(CaptureError, match=r"\.address\.json cannot be read") as caught:
        read_layer(directory)
    assert caught.value.next_step == "Name the capture by its address, not by this folder of the cache."


def test_same_golden_at_two_addresses_has_two_mirrors(published: Any) -> None:
    first, other = Capture.open(ADDRESS), "s3://lab/copies/toy"
    for name in (MANIFEST_NAME, "generation.json", LAYER):
        content = (OLD / name).read_bytes()
        published.objects.put_object(Bucket="lab", Key=f"copies/toy/{name}", Body=content)
    second = Capture.open(other)
    assert first.directory != second.directory
    assert address_of(second.directory) == other
    second.read(1, Site.OUTPUT)
    assert published.asked("GET", f"/copies/toy/{LAYER}")


def test_text_may_be_a_folder_but_no_other_address() -> None:
    assert Capture.open(str(OLD)).manifest == Capture.open(OLD).manifest
    with pytest.raises(UsageError, match="is no address that mm2 reads"):
        Capture.open("gs://lab/golden")
