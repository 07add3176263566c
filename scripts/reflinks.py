"""Reflinks, for full_size_checkpoint.py: files that share another file's data, and an XFS image for disks without them.

A clone points to the data of its source, so it takes neither disk space nor time. XFS and btrfs have reflinks. On other
file systems root can keep an XFS in a sparse file, the image, and mount it through a loop device.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import CannotRunError, UsageError

_log = logging.getLogger(__name__)

# Clones begin and end on a multiple of this, in both files.
BLOCK_BYTES = 4096

_FICLONERANGE = 0x4020940D  # linux/fs.h; Python's fcntl has a name for it since 3.13 only
_CLONE_RANGE = struct.Struct("=qQQQ")  # source's descriptor, its offset, the size, the target's offset
# Error numbers of a file system without reflinks.
_NO_REFLINKS = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)
# Label of the image's file system, by which this script knows its own images.
_LABEL = "mm2full"
_XFS_MAGIC, _XFS_LABEL_OFFSET, _XFS_LABEL_BYTES = b"XFSB", 108, 12
# Tools by name, each with its Debian package.
_TOOLS = {"mkfs.xfs": "xfsprogs", "losetup": "mount", "mount": "mount", "umount": "mount"}
_LEAST_IMAGE_BYTES = 512 << 20  # mkfs.xfs refuses less than 300 MB


def clone_range(
    source: Path, target: Path, *, source_offset: int, target_offset: int, size_bytes: int
) -> None:
    """Let `target` share bytes of `source`, and grow as needed; both files lie on one file system.

    Raises:
        ValueError: An offset or the size is no multiple of `BLOCK_BYTES`.
        CannotRunError: The file system has no reflinks.
    """
    numbers = {"source_offset": source_offset, "target_offset": target_offset, "size_bytes": size_bytes}
    for name, value in numbers.items():
        if value % BLOCK_BYTES:
            raise ValueError(
                f"{name} is {value}: blocks of {BLOCK_BYTES} bytes are cloned, never parts of one"
            )
    if size_bytes == 0:
        return  # to the kernel a size of 0 means: up to the end
    import fcntl  # not at the top: other systems than Linux may lack it

    with source.open("rb") as source_file, target.open("rb+") as target_file:
        request = _CLONE_RANGE.pack(source_file.fileno(), source_offset, size_bytes, target_offset)
        try:
            fcntl.ioctl(target_file.fileno(), _FICLONERANGE, request)
        except OSError as error:
            if error.errno not in _NO_REFLINKS:
                raise
            raise CannotRunError(
                f"{target} cannot share data of {source}",
                expected="a file system with reflinks: XFS or btrfs",
                found=str(error),
                next_step="Name an --output there, or let root make an image: --image FILE.",
            ) from error


def has_reflinks(folder: Path) -> bool:
    """Decide whether files of the folder can share data, by a trial with two small files."""
    if sys.platform != "linux":
        return False
    with tempfile.TemporaryDirectory(dir=folder, prefix=".reflinks-") as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "target")
        source.write_bytes(bytes(BLOCK_BYTES))
        target.touch()
        try:
            clone_range(source, target, source_offset=0, target_offset=0, size_bytes=BLOCK_BYTES)
        except CannotRunError:
            return False
    return True


def require_room(folder: Path, size_bytes: int) -> None:
    """Check that the disk of the folder has enough room.

    Raises:
        CannotRunError: Less than `size_bytes` are free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes:
        raise CannotRunError(
            f"too little disk at {folder}",
            expected=f"{size_bytes} bytes free",
            found=f"{free_bytes}",
            next_step="Name another --output and --image, or ask for fewer --distinct-layers.",
        )


def require_image_tools() -> None:
    """Check that an image can be made here; only a forbidden loop mount shows later.

    Raises:
        CannotRunError: This is not Linux, or not root, or tools are missing; the message lists them.
    """
    if sys.platform != "linux":
        raise CannotRunError("an image with reflinks needs Linux", found=sys.platform)
    missing = [] if os.geteuid() == 0 else ["this is not root, and only root may mount"]
    missing += [
        f"no {tool} (Debian: apt-get install {package})"
        for tool, package in _TOOLS.items()
        if shutil.which(tool) is None
    ]
    if missing:
        raise CannotRunError(
            "no image with reflinks can be made here",
            found="; ".join(missing),
            next_step="Mend that, or name an --output on XFS or btrfs, where no image is needed.",
        )


def backing_file(folder: Path) -> Path | None:
    """Find the file of the image that is mounted on the folder; None if no image is."""
    if not folder.is_mount():
        return None
    try:
        return Path((_loop(folder) / "backing_file").read_text().rstrip("\n"))
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflinkImage:
    """A sparse file that holds an XFS with reflinks.

    If possible, the loop device bypasses the page cache of `file`. Otherwise a clone would be warm (in that cache) once
    its source was read.
    """

    file: Path

    def make(self, *, size_bytes: int) -> None:
        """Write an empty file system for `size_bytes` of data; the file takes disk as it fills.

        Raises:
            CannotRunError: mkfs.xfs failed.
        """
        # An eighth more for the log and for metadata, such as reference counts of shared blocks.
        num_blocks = (_LEAST_IMAGE_BYTES + size_bytes + size_bytes // 8) // BLOCK_BYTES
        with self.file.open("xb") as file:
            file.truncate(num_blocks * BLOCK_BYTES)
        _run("mkfs.xfs", "-q", "-L", _LABEL, "-b", f"size={BLOCK_BYTES}", "-m", "reflink=1", self.file)

    def is_ours(self) -> bool:
        """Decide whether `make` wrote this file."""
        with self.file.open("rb") as file:
            block = file.read(_XFS_LABEL_OFFSET + _XFS_LABEL_BYTES)
        return block.startswith(_XFS_MAGIC) and block[_XFS_LABEL_OFFSET:].rstrip(b"\0") == _LABEL.encode()

    def mount(self, folder: Path, *, is_read_only: bool) -> None:
        """Mount the image on the folder, which is made if it is missing.

        Raises:
            CannotRunError: No loop mount is allowed here, or the image is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        try:
            device = _run("losetup", "--find", "--show", "--direct-io=on", self.file)
            try:
                _run("mount", "-t", "xfs", "-o", "ro" if is_read_only else "rw,noatime", device, folder)
            finally:
                # The kernel frees the device at the unmount, or now if the mount failed.
                _run("losetup", "--detach", device)
        except CannotRunError as error:
            raise CannotRunError(
                f"{self.file} cannot be mounted on {folder}",
                found=error.what,
                next_step="Where loop mounts are forbidden, as in most containers, run it on the host or in a "
                "privileged container, or name an --output on XFS or btrfs.",
            ) from error
        if not is_read_directly(folder):
            _log.warning("%s is cached by the file system below it: unread clones may be warm", self.file)


@contextmanager
def new_image(file: Path, *, size_bytes: int, scratch: Path) -> Iterator[Path]:
    """Make an image for `size_bytes` of data, mounted on `scratch` until the block ends.

    The image gets its name only if the block succeeds. What a killed run left is removed first.

    Raises:
        CannotRunError: The disk is too small, or no image can be made or mounted here.
    """
    partial = _partial(file)
    discard_partial(file, scratch=scratch)
    file.parent.mkdir(parents=True, exist_ok=True)
    require_room(file.parent, size_bytes)
    try:
        partial.make(size_bytes=size_bytes)
        partial.mount(scratch, is_read_only=False)
        yield scratch
        unmount(scratch)
        partial.file.replace(file)
    finally:
        discard_partial(file, scratch=scratch)


def discard_partial(file: Path, *, scratch: Path) -> None:
    """Unmount and delete what a killed `new_image` left.

    Raises:
        CannotRunError: The image is in use.
    """
    if backing_file(scratch) is not None:
        unmount(scratch)
    elif scratch.exists():
        shutil.rmtree(scratch)
    _partial(file).file.unlink(missing_ok=True)


def is_read_directly(folder: Path) -> bool:
    """Decide whether the image on the folder bypasses the cache of the file system below it."""
    return (_loop(folder) / "dio").read_text().strip() == "1"


def unmount(folder: Path) -> None:
    """Unmount the folder, which drops its cache, and remove the empty folder.

    Raises:
        CannotRunError: The folder is in use.
    """
    _run("umount", folder)
    folder.rmdir()


def refuse_foreign(image: ReflinkImage) -> None:
    """Refuse an image that this script did not make.

    Raises:
        UsageError: It did not make it.
    """
    if not image.is_ours():
        raise UsageError(
            f"{image.file} is not an image that this script made",
            expected=f"XFS with the label {_LABEL}",
            next_step="Name another --image.",
        )


def _partial(file: Path) -> ReflinkImage:
    """Return the image beside `file` that gets its name when it is complete."""
    return ReflinkImage(file=file.with_name(f".{file.name}.partial"))


def _loop(folder: Path) -> Path:
    """Return the kernel's folder of the loop device that is mounted on a folder."""
    device = folder.stat().st_dev
    return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/loop")


def _run(*words: str | Path) -> str:
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if result.returncode:
        # The messages of these tools begin with their names.
        raise CannotRunError(" ".join(result.stderr.split()) or f"{words[0]} ended with {result.returncode}")
    return result.stdout.strip()
