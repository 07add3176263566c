"""Formats: the layouts of other tools' dumps, recognised and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from minimax_tools.dumps import model_debugger, msprobe, nxdi, sglang, vllm_neuron
from minimax_tools.dumps.format_names import MODEL_DEBUGGER, MSPROBE, NXDI, SGLANG, VLLM_NEURON
from minimax_tools.dumps.piece import Dump
from minimax_tools.errors import CaptureError

_RANK = "rank"
# These tools keep the tensors of one rank. Users let each rank write into a folder of its own: rank0, rank1 and so on.
_ONE_RANK = (NXDI, MODEL_DEBUGGER)


class Format(Protocol):
    """A module that reads the layout of one tool's dumps."""

    LAYOUT: str  # its files in words, for messages

    def recognises(self, directory: Path) -> bool:
        """Decide by file names whether a folder has this layout."""

    def read_dump(self, directory: Path) -> Dump:
        """List the tensors of a folder by file names and headers."""


# By name, a value of `--format`, in the order in which a folder is held against them.
FORMATS: Mapping[str, Format] = {
    NXDI: nxdi,
    VLLM_NEURON: vllm_neuron,
    MSPROBE: msprobe,
    SGLANG: sglang,
    MODEL_DEBUGGER: model_debugger,
}


def find_format(directory: Path) -> str | None:
    """Return the name of a folder's format; None if no format fits."""
    return next((name for name in FORMATS if _fits(directory, name)), None)


def read_dump(directory: Path, name: str) -> Dump:
    """List the tensors of a folder that has a format, or holds a folder of it for each rank."""
    format_ = FORMATS[name]
    if not directory.is_dir() or not _fits(directory, name):
        raise CaptureError(
            f"{directory} holds no {name} capture",
            expected=format_.LAYOUT,
            next_step="Name the folder that holds these files, or another --format.",
        )
    if format_.recognises(directory):
        return format_.read_dump(directory)
    return _join(
        directory, {rank: format_.read_dump(path) for rank, path in _rank_folders(directory).items()}
    )


def _fits(directory: Path, name: str) -> bool:
    """Decide whether a folder has a format itself, or holds a folder of it for each rank."""
    if FORMATS[name].recognises(directory):
        return True
    folders = _rank_folders(directory) if name in _ONE_RANK else {}
    return bool(folders) and all(FORMATS[name].recognises(path) for path in folders.values())


def _rank_folders(directory: Path) -> dict[int, Path]:
    """Return the folders rank0, rank1 and so on, by rank."""
    numbered = {path.name.removeprefix(_RANK): path for path in directory.glob(f"{_RANK}*") if path.is_dir()}
    return {int(number): numbered[number] for number in sorted(numbered) if number.isdecimal()}


def _join(directory: Path, dumps: Mapping[int, Dump]) -> Dump:
    """Join the dumps of several ranks, given by rank, in folders of `directory`."""
    first = next(iter(dumps.values()))
    return replace(
        first,
        directory=directory,
        pieces=tuple(
            replace(piece, rank=rank, file=f"{_RANK}{rank}/{piece.file}")
            for rank, dump in dumps.items()
            for piece in dump.pieces
        ),
        num_ranks=1 + max(dumps),
        is_one_rank=False,
    )
