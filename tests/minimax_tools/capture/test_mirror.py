"""A capture at an address is read as a local one is, file by file, and never half or damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
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


@pytest.fixture
def published(s3: Any) -> Any:
    for path in OLD.iterdir():
        s3.objects.put_object(Bucket="lab", Key=f"goldens/toy/{path.name}", Body=path.read_bytes())
    s3.forget()
    return s3


def here(capture: Capture) -> set[str]:
    return {path.name for path in capture.directory.iterdir() if not path.name.startswith(".")}


def read_in_a_process(_: int) -> float:
    capture = Capture.open(ADDRESS)
    return float(capture.read(1, Site.OUTPUT).double().sum())


def test_a_capture_at_an_address_is_the_local_one(published: Any) -> None:
    local, remote = Capture.open(OLD), Capture.open(ADDRESS)
    assert remote.manifest == local.manifest
    for layer in local.layers:
        for site in local.sites(layer):
            assert torch.equal(remote.read(layer, site), local.read(layer, site))
    assert remote.read_generation() == local.read_generation()
    assert remote.read_inputs().digest() == local.read_inputs().digest()


def test_only_the_files_of_a_layer_that_is_read_come(published: Any) -> None:
    capture = Capture.open(ADDRESS)
    assert here(capture) == {"manifest.json", "generation.json"}
    capture.read(1, Site.OUTPUT)
    assert published.fetched() == ["manifest.json", "generation.json", "layer_1.safetensors"]
    capture.read_twin(1, Site.OUTPUT)
    assert here(capture) == {
        *("manifest.json", "generation.json", "layer_1.safetensors", "layer_1.fp32.safetensors")
    }


def test_the_folder_of_a_mirror_serves_other_processes(published: Any) -> None:
    directory = Capture.open(ADDRESS).directory
    again = Capture.open(directory)
    assert torch.equal(again.read(0, Site.OUTPUT), Capture.open(OLD).read(0, Site.OUTPUT))
    assert address_of(directory) == ADDRESS


@pytest.mark.slow
def test_two_processes_share_the_cache(published: Any) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sums = pool.map(read_in_a_process, range(4), chunksize=1)
    assert len(set(sums)) == 1
    assert len(published.asked("GET", "layer_1.safetensors")) == 1


def test_a_damaged_file_is_fetched_once_more(published: Any, caplog: pytest.LogCaptureFixture) -> None:
    published.plant("GET", "layer_1.safetensors", is_corrupt=True)
    value = Capture.open(ADDRESS).read(1, Site.OUTPUT)
    assert torch.equal(value, Capture.open(OLD).read(1, Site.OUTPUT))
    assert "layer_1.safetensors of s3://lab/goldens/toy came damaged" in caplog.text


def test_a_file_that_is_damaged_there_is_refused_by_name(published: Any) -> None:
    damaged = bytearray((OLD / "layer_1.safetensors").read_bytes())
    damaged[-1] ^= 1
    published.objects.put_object(Bucket="lab", Key="goldens/toy/layer_1.safetensors", Body=bytes(damaged))
    capture = Capture.open(ADDRESS)
    with pytest.raises(
        CaptureError,
        match="^layer_1.safetensors of s3://lab/goldens/toy came damaged twice.*publish it again",
    ):
        capture.read(1, Site.OUTPUT)
    assert "layer_1.safetensors" not in here(capture)
    assert torch.equal(capture.read(0, Site.OUTPUT), Capture.open(OLD).read(0, Site.OUTPUT))
    shutil.rmtree(capture.directory)
    published.objects.put_object(Bucket="lab", Key="goldens/toy/generation.json", Body=b"{}")
    with pytest.raises(CaptureError, match="generation.json of s3://lab/goldens/toy came damaged twice"):
        Capture.open(ADDRESS)


def test_a_manifest_never_names_a_file_elsewhere(published: Any, tmp_path: Path) -> None:
    record = json.loads((OLD / MANIFEST_NAME).read_text())
    for entry in record["entries"]:
        entry["file"] = f"../../../{entry['file']}"
    published.objects.put_object(
        Bucket="lab", Key=f"goldens/toy/{MANIFEST_NAME}", Body=json.dumps(record).encode()
    )
    with pytest.raises(
        CaptureError,
        match=r"^manifest\.json of s3://lab/goldens/toy is damaged, or of .* no file of a capture's folder",
    ):
        Capture.open(ADDRESS).read(1, Site.OUTPUT)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_file_that_the_address_lacks_is_named(published: Any) -> None:
    published.objects.delete_object(Bucket="lab", Key="goldens/toy/layer_1.safetensors")
    with pytest.raises(CaptureError, match="holds no layer_1.safetensors, which its manifest lists"):
        Capture.open(ADDRESS).read(1, Site.OUTPUT)


def test_a_half_published_golden_is_not_read(published: Any) -> None:
    published.objects.delete_object(Bucket="lab", Key=f"goldens/toy/{MANIFEST_NAME}")
    with pytest.raises(CaptureError, match="is not whole: manifest.json comes last, and is not there yet"):
        Capture.open(ADDRESS)


def test_the_captures_below_an_address_are_named(published: Any) -> None:
    with pytest.raises(CaptureError, match="Name one of the captures in it: toy"):
        Capture.open("s3://lab/goldens")


def test_a_replaced_golden_gets_a_folder_of_its_own(published: Any) -> None:
    old = Capture.open(ADDRESS)
    record = json.loads((OLD / MANIFEST_NAME).read_text())
    record["provenance"]["device"] = "another"
    published.objects.put_object(
        Bucket="lab", Key=f"goldens/toy/{MANIFEST_NAME}", Body=json.dumps(record).encode()
    )
    new = Capture.open(ADDRESS)
    assert new.directory != old.directory
    assert new.description.provenance.device == "another"


def test_what_was_read_before_is_read_without_the_server(
    published: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Capture.open(ADDRESS).read(1, Site.OUTPUT)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    again = Capture.open(ADDRESS)
    assert "does not answer: taking what it was when it was read last" in caplog.text
    assert torch.equal(again.read(1, Site.OUTPUT), Capture.open(OLD).read(1, Site.OUTPUT))
    with pytest.raises(RemoteError, match=r"layer_0.safetensors of .* S3 does not answer"):
        again.read(0, Site.OUTPUT)
    shutil.rmtree(os.environ["MM2_CACHE"])
    with pytest.raises(RemoteError, match="S3 does not answer"):
        Capture.open(ADDRESS)


def test_a_copy_that_is_damaged_here_is_fetched_again_once_it_is_removed(published: Any) -> None:
    capture = Capture.open(ADDRESS)
    capture.read(1, Site.OUTPUT)
    here = capture.directory / "layer_1.safetensors"
    here.write_bytes(here.read_bytes()[:100])
    with pytest.raises(
        CaptureError, match=rf"^the copy of the golden {ADDRESS} on this machine is damaged"
    ) as caught:
        Capture.open(ADDRESS).read(1, Site.OUTPUT)
    assert caught.value.next_step == f"Remove the file from {capture.directory}: it is fetched again."
    here.unlink()
    assert torch.equal(Capture.open(ADDRESS).read(1, Site.OUTPUT), Capture.open(OLD).read(1, Site.OUTPUT))


def test_a_mirror_without_a_right_manifest_or_address_is_made_again(published: Any) -> None:
    directory, manifest = Capture.open(ADDRESS).directory, Capture.open(OLD).manifest
    records = (directory / MANIFEST_NAME, directory / ".address.json")
    for text in ("{}", "[1]", "3", "null", '{"asked": 1, "address": 2, "directory": 3, "tag": 4}'):
        for record in records:
            record.write_text(text)
            capture = Capture.open(ADDRESS)
            assert capture.directory == directory, (record, text)
            assert capture.manifest == manifest, (record, text)
            assert address_of(directory) == ADDRESS, (record, text)


def test_a_mirror_whose_address_cannot_be_read_is_refused_by_name(published: Any) -> None:
    directory = Capture.open(ADDRESS).directory
    (directory / ".address.json").write_text('{"asked": "/x", "address": "/x"}')
    assert address_of(directory) == str(directory)
    with pytest.raises(CaptureError, match=r"\.address\.json cannot be read") as caught:
        Capture.open(directory).read(1, Site.OUTPUT)
    assert caught.value.next_step == "Name the capture by its address, not by this folder of the cache."


def test_the_same_golden_at_two_addresses_has_two_mirrors(published: Any) -> None:
    for path in OLD.iterdir():
        published.objects.put_object(Bucket="lab", Key=f"copies/toy/{path.name}", Body=path.read_bytes())
    first, second = Capture.open(ADDRESS), Capture.open("s3://lab/copies/toy")
    assert first.directory != second.directory
    assert address_of(second.directory) == "s3://lab/copies/toy"
    published.forget()
    second.read(1, Site.OUTPUT)
    assert published.asked("GET", "/copies/toy/layer_1.safetensors")


def test_a_text_may_be_a_folder(tmp_path: Path) -> None:
    assert Capture.open(str(OLD)).manifest == Capture.open(OLD).manifest
    with pytest.raises(UsageError, match="is no address that mm2 reads"):
        Capture.open("gs://lab/golden")
