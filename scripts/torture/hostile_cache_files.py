"""Files of mm2's own caches, to be damaged: a damaged one is taken as absent, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.mirror import CaptureMirror, MirrorRecord
from minimax_tools.machine.compiled import CompiledCache
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.cache import ADDRESS_NAME
from torture.hostile_file import HostileFile, finding, reading

_ADDRESS = RemoteAddress.parse("hf://datasets/owner/goldens@main/toy")
_LOOP = "loop.compute-"


def cache_files(manifest: Manifest, folder: Path) -> Iterator[HostileFile]:
    """Yield the files of caches, written into an empty folder."""
    yield _mirror(manifest, folder)
    yield _compiled(folder)


def _mirror(manifest: Manifest, folder: Path) -> HostileFile:
    MirrorRecord(address=_ADDRESS.at("0" * 40), asked=_ADDRESS).write(folder)
    return HostileFile(
        name="address of a mirror",
        path=folder / ADDRESS_NAME,
        command=reading(lambda: CaptureMirror.find(folder, manifest)),
    )


def _compiled(folder: Path) -> HostileFile:
    cache = CompiledCache(folder, _LOOP)
    code = folder / f"{_LOOP}1.nbc"
    code.touch()
    cache.note()
    (path,) = folder.glob(f"{_LOOP}*.json")

    def find() -> bool | None:
        code.touch()  # a proof that failed removed it
        cache.prove()
        return code.exists() or None

    return HostileFile(name="record of machine code", path=path, command=finding(path, find))
