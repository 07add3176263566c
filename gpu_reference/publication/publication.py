"""Publication: a golden put at a remote address, after it was checked; its manifest comes last."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_reference.certification.trust import refuse_no_golden, refuse_uncertified
from gpu_reference.publication.card import CARD_NAME, write_card
from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.manifest import Certificate
from minimax_tools.capture.mirror import mirror_capture, share_files
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, RemoteError, list_faults
from minimax_tools.hub.dataset_folder import open_remote
from minimax_tools.hub.faults import NoRepositoryError
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.remote_folder import RemoteFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A golden at a remote address."""

    address: RemoteAddress
    files: tuple[str, ...]  # names of its files, the card too
    size_bytes: int
    num_put: int  # number of files that were not there already
    is_certified: bool


def publish_golden(
    directory: Path, address: RemoteAddress, *, allows_uncertified: bool, replaces: bool
) -> Publication:
    """Check a golden and put it at an address, with a card.

    What an interrupted call has put is not put again. Nobody reads a half: the manifest comes last, or on a hub all
    files come in one commit.

    Args:
        directory: Folder of the golden.
        address: Address of a folder in a bucket or a dataset.
        allows_uncertified: Whether a golden without a certificate, or certified without its model, is put.
        replaces: Whether another capture at the address may be replaced.

    Raises:
        CaptureError: It is incomplete or damaged.
        IncomparableError: It is no golden, or is not certified, or failed.
        RemoteError: Another capture is at the address, or it cannot be put there.
    """
    golden = Capture.open(directory)
    refuse_no_golden(golden)
    refuse_uncertified(golden, allows_uncertified=allows_uncertified)
    folder = open_remote(address)
    folder.check_place()
    if not replaces:
        _refuse_other(folder, address, directory / MANIFEST_NAME)
    # All tensors are read: what can be told before is told before.
    _refuse_damage(golden)
    files = {name: golden.directory / name for name in golden.manifest.file_names()}
    size_bytes = sum(path.stat().st_size for path in files.values())
    with tempfile.TemporaryDirectory() as temporary:
        card = Path(temporary) / CARD_NAME
        card.write_text(write_card(golden, address=str(address), size_bytes=size_bytes), encoding="utf-8")
        files[CARD_NAME] = card
        put = folder.put(files, last=MANIFEST_NAME)
    return Publication(
        address=address,
        files=tuple(sorted(files)),
        size_bytes=size_bytes,
        num_put=len(put),
        is_certified=golden.certificate is not None,
    )


def publish_certificate(golden: Capture, certificate: Certificate) -> None:
    """Put a certificate into the manifest at a golden's address, and then a card that tells it.

    Args:
        golden: The golden as it was checked, by its mirror.
        certificate: The result of its check.

    Raises:
        RemoteError: Another golden is at the address now, or it cannot be written to.
    """
    address = RemoteAddress.parse(address_of(golden.directory))
    folder = open_remote(address)
    if not _is_there(folder, golden.directory / MANIFEST_NAME):
        raise RemoteError(
            f"{address} was replaced while it was checked: the certificate is not put there",
            next_step="Run the check again.",
        )
    certified = Capture(golden.directory, replace(golden.manifest, certificate=certificate))
    with tempfile.TemporaryDirectory() as temporary:
        files = {name: Path(temporary) / name for name in (CARD_NAME, MANIFEST_NAME)}
        size_bytes = sum((golden.directory / name).stat().st_size for name in golden.manifest.file_names())
        files[CARD_NAME].write_text(
            write_card(certified, address=str(address), size_bytes=size_bytes), encoding="utf-8"
        )
        files[MANIFEST_NAME].write_text(certified.manifest.as_text(), encoding="utf-8")
        # One by one: the manifest is replaced in one step then, and the golden can be read all the time.
        for name in (MANIFEST_NAME, CARD_NAME):
            folder.put({name: files[name]}, last=name)
    share_files(golden.directory, mirror_capture(address))


def _refuse_damage(golden: Capture) -> None:
    faults = inspect_capture(golden).faults
    if faults:
        raise CaptureError(
            f"the golden {golden.directory} is damaged",
            found=list_faults(list(faults)),
            next_step="Copy it again from where it was made, or make it again: mm2-gpu extract-all.",
        )


def _refuse_other(folder: RemoteFolder, address: RemoteAddress, manifest: Path) -> None:
    """Raise if another capture is at the address."""
    try:
        file = folder.find(MANIFEST_NAME)
    except NoRepositoryError:
        # A new dataset, or a new branch of one.
        return
    if file is not None and not _is_there(folder, manifest):
        raise RemoteError(
            f"another capture is at {address}",
            next_step="Choose another address, or give --replace.",
        )


def _is_there(folder: RemoteFolder, manifest: Path) -> bool:
    """Decide whether a folder has this very manifest."""
    file = folder.find(MANIFEST_NAME)
    if file is None:
        return False
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary) / MANIFEST_NAME
        folder.fetch(file, there)
        return there.read_bytes() == manifest.read_bytes()
