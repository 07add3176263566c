from __future__ import annotations

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.remote.address import RemoteAddress, is_remote


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("hf://datasets/owner/name", "hf://datasets/owner/name@main"),
        ("hf://datasets/owner/name@v2", "hf://datasets/owner/name@v2"),
        ("hf://datasets/owner/name@v2/m2.7/full_model", "hf://datasets/owner/name@v2/m2.7/full_model"),
    ],
)
def test_an_address_reads_as_it_is_shown(text: str, shown: str) -> None:
    address = RemoteAddress.parse(text)
    assert str(address) == shown
    assert RemoteAddress.parse(shown) == address


@pytest.mark.parametrize(
    "text",
    [
        *(
            "gs://bucket/x",
            "s3://",
            "s3://bucket/../x",
            "hf://owner/name",
            "hf://datasets/name",
            "https://x/y",
        ),
        *("s3:/bucket/x", "hf:datasets/owner/name", "S3://bucket/x", "hf://datasets/owner/name@"),
        *("hf://datasets/owner/../name", "hf://datasets/../name"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    assert is_remote(text)
    with pytest.raises(UsageError, match="expected s3://bucket/folder or hf://datasets/owner/name@revision"):
        RemoteAddress.parse(text)


@pytest.mark.parametrize("text", ["folder", "/data/x", "owner/name@v2", "C:/data", "s3/x", "hf"])
def test_a_folder_is_no_address(text: str) -> None:
    assert not is_remote(text)
