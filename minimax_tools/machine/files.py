"""Files and folders that are written whole or not at all, kept through a power loss, and locked by living processes.

| function | gives | its errors |
|---|---|---|
| `whole_path` | a path, for libraries that write files themselves | OSError |
| `whole_file` | a text file | OSError |
| `whole_capture_file` | a path, for files of a capture | for the user |
| `new_folder` | a folder | for the user |

What is being written lies in a hidden folder beside its final name, and is on the disk before it is renamed:

    .NAME.1f0c44ab.tmp/.NAME.tmp    a file or a folder; a search for files finds it by no pattern
    .NAME.1f0c44ab.tmp/.lock        locked by its writer

A killed writer leaves the folder without its lock, so whoever writes the same name next removes it. A lock tells more
than a process number in the name: it also holds between containers, on a shared file system and after a restart.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from minimax_tools.errors import CaptureError, CheckpointError, UsageError

# A file system or its permissions do not let a folder's entries be flushed: nothing more can be done.
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def sync_path(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk.

    Raises:
        OSError: They cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush all files and folders below a folder, and the folder itself.

    Raises:
        OSError: They cannot be written.
    """
    for path in (*folder.rglob("*"), folder):
        if path.is_dir() or path.is_file():
            sync_path(path)


def put_in_place(written: Path, path: Path) -> None:
    """Rename a written file or folder, which is on the disk, to `path`, and flush that name too.

    Raises:
        OSError: It cannot be renamed, or the name cannot be written.
    """
    written.replace(path)
    try:
        sync_path(path.parent)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and flush the names of those that are new.

    Raises:
        OSError: One cannot be made.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(new):
        with suppress(OSError):
            sync_path(path.parent)


def hold_file(path: Path, *, waits: bool = False) -> TextIO:
    """Make a file if it is missing, and lock it until the returned file is closed, or its process ends.

    Raises:
        BlockingIOError: Another process, or another call in this one, holds it, and this one does not wait.
        OSError: It cannot be made, or its file system knows no locks.
    """
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between `open` and `flock`: its lock protects nothing.
            if _is_same_file(file.fileno(), path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


_LOCK_NAME = ".lock"
_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
# A file system that knows no locks. Nobody can tell there whether a writer lives, so nothing is removed.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
# Attempts to make a folder that nobody removes before it is locked.
_NUM_ATTEMPTS = 10


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path in a new temporary folder beside `path`; nothing is at it yet.

    It is removed at the end of the block, and those that killed writers of `path` left are removed first.

    Raises:
        OSError: The folder cannot be made.
    """
    remove_abandoned(path.parent, name=path.name)
    with ExitStack() as held:
        folder = _make_held(path, held)
        try:
            yield folder / f".{path.name}.tmp"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folder: Path, *, name: str | None = None) -> None:
    """Remove the temporary folders in `folder` that no living writer holds; with `name`, only those of that name."""
    try:
        present = [
            path
            for path in folder.iterdir()
            if (match := _NAME.fullmatch(path.name)) and name in (None, match["name"])
        ]
    except OSError:
        return  # missing, or not to be listed
    for path in present:
        if path.is_dir() and not path.is_symlink():
            _remove_unless_held(path)


def is_temporary(path: Path) -> bool:
    """Decide whether a path has the name of a temporary folder, which a killed run leaves behind."""
    return _NAME.fullmatch(path.name) is not None


def _make_held(path: Path, held: ExitStack) -> Path:
    for _ in range(_NUM_ATTEMPTS):
        folder = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        folder.mkdir()
        try:
            held.enter_context(hold_file(folder / _LOCK_NAME))
        except (BlockingIOError, FileNotFoundError):
            continue  # a writer of the same name took the folder for abandoned before it was locked
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return folder
    raise OSError(errno.EBUSY, "its temporary folder was removed by another process", str(path))


def _remove_unless_held(folder: Path) -> None:
    try:
        with hold_file(folder / _LOCK_NAME):
            shutil.rmtree(folder)
    except OSError:
        return  # its writer lives, another process removes it right now, or it cannot be told


# The disk, a quota or a limit on the file size is used up.
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def new_folder(output: Path, *, size_bytes: int, remedy: str) -> Iterator[Path]:
    """Yield an empty temporary folder. Rename it to `output` if the block succeeds, else remove it.

    Its files are on the disk before it gets its name. What killed writers of `output` left is removed first.

    Args:
        output: A folder that is absent or empty.
        size_bytes: Bytes that will be written to it.
        remedy: Next step of the error if the disk is too small.

    Raises:
        UsageError: `output` is not empty.
        CheckpointError: The disk is too small, the folder cannot be written, or a file that the block reads cannot be
            read.
    """
    # If `output` is a link to an empty folder, that folder is replaced.
    output = output.resolve()
    refuse_occupied(output)
    try:
        if _free_bytes(output) < size_bytes:
            raise _no_room(output, size_bytes, reason="", remedy=remedy)
        make_folder(output.parent)
        with temporary_beside(output) as folder:
            folder.mkdir()
            yield folder
            sync_tree(folder)
            put_in_place(folder, output)
    except OSError as error:
        if error.errno in _FULL_DISK:
            raise _no_room(output, size_bytes, reason=f", {error}", remedy=remedy) from error
        if _is_elsewhere(error, output):
            raise CheckpointError(
                f"{error.filename} cannot be read",
                found=error.strerror,
                next_step="Check that the file exists and that you may read it.",
            ) from error
        raise CheckpointError(
            f"{output} cannot be written", found=str(error), next_step="Name another --output."
        ) from error


def refuse_occupied(output: Path) -> None:
    """Raise unless `output` is absent or an empty folder; what killed writers of it left is removed before.

    Raises:
        UsageError: Something is there.
    """
    remove_abandoned(output.parent, name=output.name)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(
            f"{output} exists",
            expected="a new or empty folder",
            next_step="Name another folder, or remove it.",
        )


def _free_bytes(output: Path) -> int:
    existing_parent = next(parent for parent in output.parents if parent.exists())
    return shutil.disk_usage(existing_parent).free


def _is_elsewhere(error: OSError, output: Path) -> bool:
    """Decide whether an error concerns a file that is neither `output`, nor beside it, nor below it."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
    return bool(names) and all(output.parent not in Path(name).absolute().parents for name in names)


def _no_room(output: Path, size_bytes: int, *, reason: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{output} cannot be written",
        expected=f"{size_bytes} bytes",
        found=f"{_free_bytes(output)} bytes free{reason}",
        next_step=remedy,
    )


LOCK_NAME = ".lock"


@contextmanager
def locked_directory(directory: Path, *, owner: str = "") -> Iterator[None]:
    """Make a capture directory if it is missing, and keep other runs out of it during the block.

    `owner` is the name of this run. Its other processes read it by `read_owner`.

    Raises:
        CaptureError: Another run holds the lock, or the directory cannot be made or written to.
    """
    path = directory / LOCK_NAME
    with ExitStack() as stack:
        try:
            make_folder(directory)
            _write_owner(stack.enter_context(hold_file(path)), owner)
        except BlockingIOError:
            raise CaptureError(
                f"the output directory {directory} is in use by another run",
                next_step="Wait for it, or choose another --output-dir.",
            ) from None
        except OSError as error:
            raise CaptureError(
                f"cannot make or lock the capture directory {directory}",
                found=error.strerror,
                next_step="Choose another --output-dir.",
            ) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def read_owner(directory: Path) -> str | None:
    """Return the name of the run that holds the lock, or of a killed run that held it last; None without a lock."""
    try:
        return (directory / LOCK_NAME).read_text(encoding="utf-8")
    except OSError:
        return None


def _write_owner(file: TextIO, owner: str) -> None:
    # Only with the lock held: until then the file names the run that holds it.
    file.truncate(0)
    file.write(owner)
    file.flush()
    os.fsync(file.fileno())


_CHUNK_BYTES = 1 << 24  # in memory at a time


def digest_file(path: Path) -> str:
    """Return the sha256 over a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# Bytes asked for at a time: systems cut off longer wishes, some of them at their disk's longest transfer.
_PIECE_BYTES = 1 << 19


def read_ahead(files: Sequence[Path]) -> None:
    """Ask the system to read files into its page cache, in order, on a thread that ends with the process.

    It is a wish: files that are missing are passed over, and a system without such wishes is left alone.
    """
    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=_ask_for, args=(tuple(files),), name="mm2-read-ahead", daemon=True).start()


def _ask_for(files: Sequence[Path]) -> None:
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
                # It waits where the disk's queue is full; so the thread is as fast as the disk.
                os.posix_fadvise(descriptor, offset, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            continue
        finally:
            os.close(descriptor)


# As Linux's; of bytes, not of characters.
_MAX_BYTES = 255


def is_plain_name(name: str) -> bool:
    """Decide whether a text is the name of a file in a folder: no path, no control character, at most 255 bytes."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(name.encode(errors="surrogatepass")) <= _MAX_BYTES
    )


# The disk, or a quota, is used up.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file. Rename it to `path` once the block has ended well.

    Raises:
        OSError: The file cannot be written. A file that was at `path` before is still there.
    """
    with temporary_beside(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        # safetensors makes files that only their owner may read, but captures travel between people.
        temporary.chmod(mode)
        sync_path(temporary)
        put_in_place(temporary, path)


@contextmanager
def whole_file(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a temporary UTF-8 file for writing. Rename it to `path` once the block has ended well.

    Args:
        path: The file, in a folder that exists.
        newline: End of each line, as the parameter of that name of Python's `open`.

    Raises:
        OSError: The file cannot be written. A file that was at `path` before is still there.
    """
    with whole_path(path) as temporary, temporary.open("w", encoding="utf-8", newline=newline) as file:
        yield file


@contextmanager
def whole_capture_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file for a capture's file. Rename it once the block has ended well.

    Raises:
        CaptureError: The disk is full, or cannot be written to.
    """
    # Loaded here: declarations of commands reach this file.
    from safetensors import SafetensorError

    try:
        with whole_path(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> CaptureError:
    if _errno(error) not in _FULL:
        return CaptureError(
            f"cannot write {path}",
            found=str(error),
            next_step="Mend the disk or its permissions, or choose another --output-dir.",
        )
    free = shutil.disk_usage(path.parent).free
    return CaptureError(
        f"no space left to write {path}",
        found=f"{free / 1e6:.1f} MB free",
        next_step="Free some space and run the same command again: it resumes after what is stored. "
        "Or choose another --output-dir. A capture takes less with --sites layer or --noise-floor stats.",
    )


def _errno(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors gives the number in its text only.
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number else None
