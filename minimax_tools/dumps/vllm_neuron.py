"""Dumps of vLLM Neuron's accuracy tools: `dp{d}/{prefill_s{S}_{n}|decode_b{B}_{n}}/{module}/rank{r}.pt`.

The first output of each module is kept, no inputs. The tokens of all requests of a pass lie one after another, padded
to the bucket S at the end. A pass is named by its folder; with several replicas, `dp1/prefill_…`. In that folder,
`{pass}_meta.json` tells the requests and every row's position, by which a prompt's passes are joined.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from minimax_tools.dumps.piece import Dump, list_pieces
from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.errors import CaptureError

NAME = "vllm-neuron"
LAYOUT = "dp0/prefill_s<S>_<n>/<module>/rank0.pt"

_REPLICA = re.compile(r"dp(\d+)")
_PASS = re.compile(r"(?P<phase>prefill_s|decode_b)(?P<size>\d+)_(?P<number>\d+)")
_FILE = re.compile(r"rank(\d+)\.pt")


def recognises(directory: Path) -> bool:
    """Decide whether the folder holds replicas with passes in them, or is one."""
    return bool(_passes(directory))


def read_dump(directory: Path) -> Dump:
    """List the tensors of a folder.

    Raises:
        CaptureError: A file is damaged.
    """
    passes = _passes(directory)
    pieces = tuple(
        piece
        for step, folder in passes
        for path in sorted(folder.glob("*/rank*.pt"))
        if (match := _FILE.fullmatch(path.name)) is not None
        for piece in list_pieces(
            path, directory=directory, module=path.parent.name, step=step, rank=int(match[1])
        )
    )
    return Dump(
        directory=directory,
        format=NAME,
        pieces=pieces,
        steps=tuple(step for step, _ in passes),
        num_ranks=1 + max((piece.rank for piece in pieces), default=0),
        is_packed=True,
        records=_read_records(passes),
    )


def _read_records(passes: list[tuple[str, Path]]) -> tuple[PassRecord, ...]:
    """Read the metadata beside each pass; nothing if any pass has none."""
    paths = [(step, folder / f"{folder.name}_meta.json") for step, folder in passes]
    if not all(path.exists() for _, path in paths):
        return ()
    return tuple(_read_record(step, path) for step, path in paths)


def _read_record(step: str, path: Path) -> PassRecord:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        return PassRecord(
            step=step,
            requests=tuple(str(request) for request in meta["req_ids"]),
            positions=tuple(int(position) for position in meta["positions"]),
            is_decode=path.parent.name.startswith("decode_b"),
        )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CaptureError(
            f"{path} is damaged",
            expected="a JSON object with req_ids and positions",
            found=f"{type(error).__name__}: {error}",
            next_step="Copy it again from the host that wrote it, or run the capture again.",
        ) from error


def _passes(directory: Path) -> list[tuple[str, Path]]:
    """Return labels and folders of the passes, prefills first."""
    replicas = {
        int(match[1]): path for path in _folders(directory) if (match := _REPLICA.fullmatch(path.name))
    }
    if not replicas:
        replicas = {0: directory}
    found = []
    for replica, folder in sorted(replicas.items()):
        for path in _folders(folder):
            match = _PASS.fullmatch(path.name)
            if match is not None:
                label = f"dp{replica}/{path.name}" if len(replicas) > 1 else path.name
                is_decode = match["phase"] == "decode_b"
                order = (is_decode, replica, int(match["number"]), int(match["size"]))
                found.append((order, label, path))
    return [(label, path) for _, label, path in sorted(found)]


def _folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())
