"""A folder of S3, against moto's server on this machine."""

from __future__ import annotations

import importlib.metadata
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.errors import MissingExtraError, NetworkLossError, RemoteError
from minimax_tools.remote.address import RemoteAddress, RemoteFile
from minimax_tools.remote.s3_folder import S3Folder

LARGE = bytes(range(256)) * 400
S3FS_RELEASE = tuple(int(number) for number in importlib.metadata.version("s3fs").split(".")[:2])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Files to be put, and a manifest, each with its name in it."""
    files = {name: tmp_path / name for name in ("a", "manifest.json", "z")}
    for name, path in files.items():
        path.write_text(name)
    return files


@pytest.fixture
def without_credentials(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forget() -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    return forget


@pytest.fixture
def folder(s3: Any) -> S3Folder:
    s3.objects.put_object(Bucket="lab", Key="golden/large.bin", Body=LARGE)
    s3.objects.put_object(Bucket="lab", Key="golden/deep/small.json", Body=b"{}")
    return at("s3://lab/golden")


def at(text: str, **fields: Any) -> S3Folder:
    return S3Folder(address=RemoteAddress.parse(text), range_bytes=8000, **fields)


def found(folder: S3Folder, name: str = "large.bin") -> RemoteFile:
    file = folder.find(name)
    assert file is not None
    return file


def fault(folder: S3Folder, name: str = "large.bin") -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        folder.find(name)
    assert caught.value.next_step
    return caught.value


def test_files_are_listed_with_their_sizes(folder: S3Folder) -> None:
    assert {name: file.size_bytes for name, file in folder.files().items()} == {
        "deep/small.json": 2,
        "large.bin": len(LARGE),
    }
    assert folder.find("other") is None


def test_names_that_lead_elsewhere_are_left_out(folder: S3Folder, s3: Any) -> None:
    before = folder.files().keys()
    s3.objects.put_object(Bucket="lab", Key="golden/../../elsewhere.json", Body=b"{}")
    s3.objects.put_object(Bucket="lab", Key="golden/deep/./elsewhere.json", Body=b"{}")
    assert folder.files().keys() == before


def test_a_file_comes_in_ranges(folder: S3Folder, s3: Any, tmp_path: Path) -> None:
    file = found(folder)
    s3.forget()
    folder.fetch(file, tmp_path / "x" / "large.bin")
    assert (tmp_path / "x" / "large.bin").read_bytes() == LARGE
    assert len(s3.asked("GET")) == len(LARGE) // 8000 + 1
    assert list((tmp_path / "x").iterdir()) == [tmp_path / "x" / "large.bin"]


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_named() -> None:
    assert "there is no bucket 'nowhere', or no such file in it" in str(fault(at("s3://nowhere/golden")))


def test_refused_credentials_are_told(folder: S3Folder, s3: Any) -> None:
    s3.plant("HEAD", "large.bin", status=403, times=5)
    assert "the credentials are not valid for it" in str(fault(folder))


@pytest.mark.usefixtures("folder")
def test_absent_credentials_read_a_public_bucket_and_are_told_of_a_private_one(
    s3: Any, without_credentials: Callable[[], None]
) -> None:
    without_credentials()
    s3.objects.put_bucket_policy(
        Bucket="lab",
        Policy='{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*", '
        '"Action": "s3:*", "Resource": "arn:aws:s3:::lab/*"}]}',
    )
    s3.objects.put_object_acl(Bucket="lab", Key="golden/large.bin", ACL="public-read")
    s3.forget()
    assert found(at("s3://lab/golden"))
    assert not any(one.is_signed for one in s3.requests)
    s3.plant("HEAD", "large.bin", status=403, times=5)
    error = fault(at("s3://lab/golden"))
    assert "this machine has no credentials of AWS, and the bucket is not public" in str(error)
    assert "AWS_PROFILE" in str(error)


def test_a_server_that_is_away_is_told(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{taken.getsockname()[1]}")
        error = fault(at("s3://lab/golden"))
    assert "S3 does not answer, or breaks off" in str(error)
    assert isinstance(error, NetworkLossError)


def test_a_file_that_cannot_be_stored_is_told(folder: S3Folder, tmp_path: Path) -> None:
    file = found(folder)
    (tmp_path / "large.bin" / "taken").mkdir(parents=True)
    with pytest.raises(RemoteError, match=r"large.bin of s3://lab/golden cannot be stored in .*MM2_CACHE"):
        folder.fetch(file, tmp_path / "large.bin")


def test_only_other_files_under_a_manifest_need_the_right_to_delete(s3: Any, files: dict[str, Path]) -> None:
    s3.plant("DELETE", "manifest.json", status=403, times=9)
    assert len(at("s3://lab/new").put(files, last="manifest.json")) == 3
    files["manifest.json"].write_text("another")
    assert at("s3://lab/new").put(files, last="manifest.json") == ("manifest.json",)
    for path in files.values():
        path.write_text("a third")
    with pytest.raises(RemoteError, match="manifest.json of s3://lab/new could not be removed"):
        at("s3://lab/new").put(files, last="manifest.json")


def test_a_place_is_asked_for_before_anything_is_put(
    s3: Any, without_credentials: Callable[[], None]
) -> None:
    at("s3://lab/new").check_place()
    with pytest.raises(RemoteError, match="s3://nowhere/new could not be written to: there is no bucket"):
        at("s3://nowhere/new").check_place()
    # A bucket that anybody may read is no place to write to without credentials.
    without_credentials()
    with pytest.raises(RemoteError, match="this machine has no credentials of AWS"):
        at("s3://lab/new").check_place()
    assert all(one.method == "HEAD" for one in s3.requests)


def test_a_body_that_breaks_off_is_asked_for_again(folder: S3Folder, s3: Any, tmp_path: Path) -> None:
    file = found(folder)
    s3.plant("GET", "large.bin", breaks_off=True, times=2)
    folder.fetch(file, tmp_path / "large.bin")
    assert (tmp_path / "large.bin").read_bytes() == LARGE


@pytest.mark.skipif(
    S3FS_RELEASE < (2026, 7),
    reason=f"s3fs {'.'.join(map(str, S3FS_RELEASE))} does not compare bytes with S3's checksum; s3fs 2026.7 does",
)
def test_a_body_that_comes_damaged_is_asked_for_once_more(folder: S3Folder, s3: Any, tmp_path: Path) -> None:
    file = found(folder, "deep/small.json")
    s3.plant("GET", "small.json", is_corrupt=True)
    folder.fetch(file, tmp_path / "small.json")
    assert (tmp_path / "small.json").read_bytes() == b"{}"
    s3.plant("GET", "small.json", is_corrupt=True, times=2)
    with pytest.raises(RemoteError, match=r"^deep/small.json of s3://lab/golden .* came damaged twice"):
        folder.fetch(file, tmp_path / "small.json")


def test_files_are_put_once_and_the_last_one_last(s3: Any, files: dict[str, Path]) -> None:
    folder = at("s3://lab/new/golden")
    assert set(folder.put(files, last="manifest.json")) == set(files)
    assert [one.path.rpartition("/")[2] for one in s3.asked("PUT")] == ["a", "z", "manifest.json"]
    s3.forget()
    assert folder.put(files, last="manifest.json") == ()
    assert s3.asked("PUT") == []


def test_what_is_put_partly_has_no_manifest(s3: Any, files: dict[str, Path]) -> None:
    folder = at("s3://lab/golden")
    folder.put(files, last="manifest.json")
    for name, path in files.items():
        path.write_text(f"new {name}")
    # What is there is the old golden's; a new one that breaks off leaves none.
    s3.plant("PUT", "/z", status=403, times=9)
    with pytest.raises(RemoteError, match="z of s3://lab/golden could not be put there"):
        folder.put(files, last="manifest.json")
    assert sorted(folder.files()) == ["a", "z"]
    s3.faults.clear()
    s3.forget()
    assert sorted(folder.put(files, last="manifest.json")) == ["manifest.json", "z"]
    assert [one.path.rpartition("/")[2] for one in s3.asked("PUT")] == ["z", "manifest.json"]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_server_that_fails_is_told_and_keeps_what_was_received_or_sent(
    folder: S3Folder, s3: Any, tmp_path: Path, status: int
) -> None:
    file = found(folder)
    (tmp_path / "new.bin").write_bytes(b"new")
    s3.plant("GET", "large.bin", status=status, times=9)
    s3.plant("PUT", "new.bin", status=status, times=9)
    with pytest.raises(NetworkLossError, match="S3 fails, or has too much to do") as fetching:
        folder.fetch(file, tmp_path / "large.bin")
    with pytest.raises(NetworkLossError, match="S3 fails, or has too much to do") as putting:
        folder.put({"new.bin": tmp_path / "new.bin"}, last="manifest.json")
    s3.plant("HEAD", "large.bin", status=status, times=9)
    assert "S3 fails, or has too much to do" in str(fault(at("s3://lab/golden")))
    assert fetching.value.next_step == putting.value.next_step == "Run again: whole files are not sent twice."


def test_a_machine_without_s3fs_is_told_what_to_install(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match="pip install 's3fs"):
        at("s3://lab/golden").find("x")


def test_two_captures_that_are_put_at_once_do_not_mix(s3: Any, files: dict[str, Path]) -> None:
    class Crossed(S3Folder):
        def _put_file(self, name: str, path: Path, sha256: str) -> None:
            super()._put_file(name, path, sha256)
            if name == "z":
                s3.objects.put_object(Bucket="lab", Key="new/a", Body=b"another's")

    crossed = Crossed(address=RemoteAddress.parse("s3://lab/new"))
    fault = "another process puts files at s3://lab/new at the same time: .* a"
    with pytest.raises(RemoteError, match=fault):
        crossed.put(files, last="manifest.json")
    assert sorted(crossed.files()) == ["a", "z"]
    assert sorted(at("s3://lab/new").put(files, last="manifest.json")) == ["a", "manifest.json"]
