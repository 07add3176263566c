"""Formats: the layouts of other tools' dumps, recognised and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.dumps import model_debugger, msprobe, nxdi, sglang, vllm_neuron
from minimax_tools.dumps.format_names import (
    FORMAT_NAMES,
    MODEL_DEBUGGER,
    MSPROBE,
    NXDI,
    SGLANG,
    VLLM_NEURON,
)
from minimax_tools.dumps.piece import Dump
from minimax_tools.errors import CaptureError

_RANK = "rank"
_TOOLS = {
    NXDI: nxdi,
    VLLM_NEURON: vllm_neuron,
    MSPROBE: msprobe,
    SGLANG: sglang,
    MODEL_DEBUGGER: model_debugger,
}
# These tools keep the tensors of one rank. Users let each rank write into a folder of its own: rank0, rank1 and so on.
_ONE_RANK = (NXDI, MODEL_DEBUGGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The layout of one tool's dumps."""

    name: str  # its name, a value of `--format`
    layout: str  # its files in words, for messages
    recognises: Callable[[Path], bool]  # decides by file names whether a folder has this layout
    read_dump: Callable[[Path], Dump]  # lists the tensors of a folder by file names and headers


FORMATS: Mapping[str, Format] = {
    name: Format(
        name=name,
        layout=_TOOLS[name].LAYOUT,
        recognises=_TOOLS[name].recognises,
        read_dump=_TOOLS[name].read_dump,
    )
    for name in FORMAT_NAMES
}


def find_format(directory: Path) -> Format | None:
    """Return the format of a folder; None if no format fits."""
    return next((format_ for format_ in FORMATS.values() if _fits(directory, format_)), None)


def read_dump(directory: Path, format_: Format) -> Dump:
    """List the tensors of a folder that has a format, or holds a folder of it for each rank."""
    if not directory.is_dir() or not _fits(directory, format_):
        raise CaptureError(
            f"{directory} holds no {format_.name} capture",
            expected=format_.layout,
            next_step="Name the folder that holds these files, or another --format.",
        )
    if format_.recognises(directory):
        return format_.read_dump(directory)
    return _join(
        directory, {rank: format_.read_dump(path) for rank, path in _rank_folders(directory).items()}
    )


def _fits(directory: Path, format_: Format) -> bool:
    """Decide whether a folder has a format itself, or holds a folder of it for each rank."""
    if format_.recognises(directory):
        return True
    folders = _rank_folders(directory) if format_.name in _ONE_RANK else {}
    return bool(folders) and all(format_.recognises(path) for path in folders.values())


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
