"""Changes to the files of a capture, with or without new digests in its manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minimax_tools.capture.manifest import Entry, Manifest, describe_tensor
from minimax_tools.capture.store import MANIFEST_NAME

Change = Callable[[torch.Tensor], torch.Tensor]


def change_tensor(directory: Path, file: str, name: str, change: Change) -> None:
    """Change one tensor of a file, and keep its old digest."""
    tensors = _load(directory / file)
    tensors[name] = change(tensors[name]).contiguous()
    _save(tensors, directory / file)


def change_tensors(directory: Path, file: str, change: Change) -> None:
    """Change all tensors of a file, and keep their old digests."""
    tensors = {name: change(tensor).contiguous() for name, tensor in _load(directory / file).items()}
    _save(tensors, directory / file)


def remove_tensor(directory: Path, file: str, name: str) -> None:
    """Remove one tensor from a file."""
    tensors = _load(directory / file)
    del tensors[name]
    _save(tensors, directory / file)


def exchange_files(directory: Path, file: str, other: str) -> None:
    """Exchange two files."""
    aside = directory / "aside"
    (directory / file).rename(aside)
    (directory / other).rename(directory / file)
    aside.rename(directory / other)


def cut_file(directory: Path, file: str) -> None:
    """Cut off the end of a file."""
    path = directory / file
    path.write_bytes(path.read_bytes()[:-40])


def flip_byte(directory: Path, file: str) -> None:
    """Change one bit near the end of a file."""
    path = directory / file
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def sign(directory: Path, *, with_statistics: bool = False) -> None:
    """Hide changes: write new digests of the files, and with `with_statistics` new statistics of the sites."""
    manifest = Manifest.read(directory)
    files = {path.name: _load(path) for path in directory.glob("*.safetensors")}
    entries = tuple(_signed(entry, files[entry.file], with_statistics) for entry in manifest.entries)
    digests = {
        file: {name: describe_tensor(tensor) for name, tensor in files[file].items()}
        for file in manifest.digests
    }
    write_manifest(directory, manifest.with_digests(digests, entries=entries))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest."""
    (directory / MANIFEST_NAME).write_text(manifest.as_text(), encoding="utf-8")


def _signed(entry: Entry, tensors: dict[str, torch.Tensor], with_statistics: bool) -> Entry:
    if entry.site not in tensors:
        return entry
    signed = Entry.of(entry.layer, entry.site, file=entry.file, tensor=tensors[entry.site])
    return signed if with_statistics else replace(signed, statistics=entry.statistics)


def _load(path: Path) -> dict[str, torch.Tensor]:
    # Copies: mapped tensors would change with their file.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    # A new file: the old one may be mapped elsewhere.
    path.unlink()
    save_file(tensors, path)
