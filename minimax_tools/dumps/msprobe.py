"""Dumps of Ascend's msprobe, of modules: `step{N}/rank{R}/dump_tensor_data/Module.{path}.{Class}.forward.{n}.….pt`.

The name ends in `output.{i}`, `input.{i}` or `kwargs.{name}`; n counts the module's calls within a step. Calls of
functions (`Torch.…`, `Functional.…`) and backward passes are left out.
Written against mindstudio-probe 26.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from minimax_tools.dumps.format_names import MSPROBE
from minimax_tools.dumps.piece import Dump, DumpPiece, list_pieces, order_steps
from minimax_tools.errors import CaptureError

LAYOUT = "step<N>/rank<R>/dump_tensor_data/Module.<path>.<Class>.forward.0.output.0.pt"
_STEP = re.compile(r"step(\d+)")
# A process without a rank, `proc1234`, counts as rank 0; a run has one such process.
_RANK = re.compile(r"rank(\d+)|proc\d+")
_DATA = "dump_tensor_data"
_FILE = re.compile(
    r"Module\.(?P<path>.*)\.(?P<class>[^.]+)\.forward\.(?P<call>\d+)\."
    r"(?P<point>input|output|kwargs)(\.(?P<element>.+))?\.pt"
)


def recognises(directory: Path) -> bool:
    """Decide whether the folder holds steps with tensors of ranks in them, or is one."""
    return bool(_data_folders(directory))


def read_dump(directory: Path) -> Dump:
    """List the tensors of a folder."""
    pieces = tuple(
        piece
        for step, rank, folder in _data_folders(directory)
        for path in sorted(folder.glob("Module.*.pt"))
        if (match := _FILE.fullmatch(path.name)) is not None
        for piece in _pieces(directory, path, match, step=step, rank=rank)
    )
    return Dump(
        directory=directory,
        format=MSPROBE,
        pieces=pieces,
        steps=order_steps(pieces),
        num_ranks=1 + max((piece.rank for piece in pieces), default=0),
    )


def _pieces(
    directory: Path, path: Path, match: re.Match[str], *, step: int, rank: int
) -> Iterator[DumpPiece]:
    point = "output" if match["point"] == "output" else "input"
    # A further call of a module in the same step is taken for the next pass of a model that generates.
    label = str(step) if match["call"] == "0" else f"{step}.{int(match['call'])}"
    return list_pieces(
        path,
        directory=directory,
        module=match["path"],
        point=point,
        element=match["element"] or "",
        step=label,
        rank=rank,
    )


def _data_folders(directory: Path) -> list[tuple[int, int, Path]]:
    """Return step, rank and folder of the tensors; a directory without steps in it counts as step 0."""
    steps = {int(match[1]): path for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}
    found = []
    for step, folder in sorted((steps or {0: directory}).items()):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = _RANK.fullmatch(path.name)
            if match is not None and (path / _DATA).is_dir():
                found.append((step, int(match[1] or 0), path / _DATA))
            elif match is not None and (not path.is_dir() or (path / _DATA).exists()):
                raise CaptureError(
                    f"{path if not path.is_dir() else path / _DATA} is no folder",
                    next_step="Copy it again from the host that wrote it, or run the capture again.",
                )
    return found
