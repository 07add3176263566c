"""Dumps of vLLM Neuron's accuracy tools: `dp{d}/{prefill_s{S}_{n}|decode_b{B}_{n}}/{module}/rank{r}.pt`.

The first output of each module is kept. The tokens of all requests of a pass lie one after another, padded to the
bucket S; `{pass}_meta.json` tells the requests and every row's position. Speculative decoding writes `target/` and
`draft/`.

| written | read |
|---|---|
| a pass without tensors, `draft/` beside `target/` | left out |
| `manual.q_rope`, `manual.q_rope_1`, … (`capture_tensor` in each layer) | `manual.layers.{n}.q_rope` |
| a request's name in several replicas, each of which counts its own | `dp0/NAME`, `dp1/NAME` |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.dumps.format_names import VLLM_NEURON
from minimax_tools.dumps.piece import Dump, DumpPiece, find_layer, list_pieces
from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.errors import CaptureError, list_faults
from minimax_tools.json_codec import decode
from minimax_tools.machine.json_file import read_json

LAYOUT = "dp0/prefill_s<S>_<n>/<module>/rank0.pt"
_TARGET, _DRAFT = "target", "draft"
_REPLICA = re.compile(r"dp(\d+)")
_PASS = re.compile(r"(?P<phase>prefill_s|decode_b)(?P<size>\d+)_(?P<number>\d+)")
_MAX_POSITION = 1 << 31
_FILE = re.compile(r"rank(\d+)\.pt")
# A name that was captured before in the same pass gets the number of the times.
_MANUAL = re.compile(r"manual\.(?P<name>[^.]+?)(_(?P<number>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassMetadata:
    """The record of one pass beside its tensors.

    Raises:
        ValueError: It names no request, or a position below 0.
    """

    req_ids: tuple[int | str, ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.req_ids:
            raise ValueError("req_ids names no request")
        if not all(0 <= position < _MAX_POSITION for position in self.positions):
            raise ValueError(f"positions are not all from 0 to {_MAX_POSITION - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The folder of one forward pass."""

    label: str
    folder: Path
    replica: tuple[int, int]  # number of the replica, from 0, and how many there are

    @property
    def metadata_path(self) -> Path:
        return self.folder / f"{self.folder.name}_meta.json"

    @property
    def is_empty(self) -> bool:
        """True if no tensor was written."""
        return next(self.folder.glob("*/rank*.pt"), None) is None

    def refuse_lost_modules(self) -> None:
        """Check that each module's folder holds the tensor of a rank.

        Raises:
            CaptureError: One does not, or a file is there in its place.
        """
        lost = [
            str(path)
            for path in sorted(self.folder.iterdir())
            if path.suffix != ".json" and next(path.glob("rank*.pt"), None) is None
        ]
        if lost:
            raise CaptureError(
                f"pass {self.label} lost the tensors of modules",
                expected="a folder for each module, with rank0.pt",
                found=list_faults(lost),
                next_step="Copy it again from the host that wrote it, or run the capture again.",
            )


def recognises(directory: Path) -> bool:
    """Decide whether the folder holds replicas with passes in them, or is one, or holds the target model's."""
    return bool(_passes(_root(directory)))


def read_dump(directory: Path) -> Dump:
    """List the tensors of a folder."""
    root = _root(directory)
    all_passes = _passes(root)
    passes = [one for one in all_passes if not one.is_empty]
    for one in passes:
        one.refuse_lost_modules()
    pieces = [
        piece
        for one in passes
        for path in sorted(one.folder.glob("*/rank*.pt"))
        if (match := _FILE.fullmatch(path.name)) is not None
        for piece in list_pieces(
            path, directory=directory, module=path.parent.name, step=one.label, rank=int(match[1])
        )
    ]
    named, manual_notes = _name_by_layer(pieces)
    return Dump(
        directory=directory,
        format=VLLM_NEURON,
        pieces=named,
        steps=tuple(one.label for one in passes),
        num_ranks=1 + max((piece.rank for piece in pieces), default=0),
        is_packed=True,
        records=_read_records(passes),
        notes=(*_notes(directory, root, num_empty=len(all_passes) - len(passes)), *manual_notes),
    )


def _notes(directory: Path, root: Path, *, num_empty: int) -> Iterator[str]:
    if num_empty:
        words = "pass holds no tensor, and is" if num_empty == 1 else "passes hold no tensor, and are"
        yield f"{num_empty} {words} left out"
    if root != directory:
        others = f"; {_DRAFT}/ is another model's" if (directory / _DRAFT).is_dir() else ""
        yield f"{_TARGET}/ is read{others}"
        if beside := len(_passes(directory)):
            yield f"not read: passes beside {_TARGET}/, {beside}"


def _name_by_layer(pieces: Iterable[DumpPiece]) -> tuple[tuple[DumpPiece, ...], tuple[str, ...]]:
    """Put the layer into the names of tensors captured by hand once in each layer; return notes on it too.

    The numbers of such tensors count calls. They are those of layers if there are as many as layers.
    """
    pieces = tuple(pieces)
    layers = sorted({layer for piece in pieces if (layer := find_layer(piece.module)) is not None})
    numbers: dict[str, set[int]] = defaultdict(set)
    manual = {piece.module: match for piece in pieces if (match := _MANUAL.fullmatch(piece.module))}
    for match in manual.values():
        numbers[match["name"]].add(int(match["number"] or 0))
    of_layers = {name for name, found in numbers.items() if found == set(range(len(layers)))}
    named = []
    for piece in pieces:
        match = manual.get(piece.module)
        if match is not None and match["name"] in of_layers:
            layer = layers[int(match["number"] or 0)]
            piece = replace(piece, module=f"manual.layers.{layer}.{match['name']}")
        named.append(piece)
    return tuple(named), tuple(
        f"manual.{name} was captured {len(layers)} times in a pass: once in each layer, in their order"
        for name in sorted(of_layers)
    )


def _read_records(passes: list[_Pass]) -> tuple[PassRecord, ...]:
    """Read the metadata beside each pass; nothing if any pass has none."""
    if not all(one.metadata_path.exists() for one in passes):
        return ()
    return _name_by_replica(tuple(_read_record(one) for one in passes))


def _name_by_replica(records: tuple[PassRecord, ...]) -> tuple[PassRecord, ...]:
    """Put the replica into the names of requests if several replicas have one of the same name."""
    replicas: dict[str, set[int]] = defaultdict(set)
    for record in records:
        for request in record.requests:
            replicas[request].add(record.replica[0])
    if all(len(found) == 1 for found in replicas.values()):
        return records
    return tuple(
        replace(
            record,
            # With several replicas, the label of a pass begins with its replica's folder.
            requests=tuple(f"{record.step.partition('/')[0]}/{request}" for request in record.requests),
        )
        for record in records
    )


def _read_record(one: _Pass) -> PassRecord:
    path = one.metadata_path
    try:
        metadata = decode(_PassMetadata, read_json(path))
        return PassRecord(
            step=one.label,
            requests=tuple(map(str, metadata.req_ids)),
            positions=metadata.positions,
            is_decode=path.parent.name.startswith("decode_b"),
            replica=one.replica,
        )
    except (OSError, ValueError) as error:
        raise CaptureError(
            f"{path} is damaged",
            expected="a JSON object with req_ids and positions",
            found=f"{type(error).__name__}: {error}",
            next_step="Copy it again from the host that wrote it, or run the capture again.",
        ) from error


def _root(directory: Path) -> Path:
    """Return the folder of the target model; the directory itself if it is not divided."""
    target = directory / _TARGET
    return target if target.is_dir() and _passes(target) else directory


def _passes(directory: Path) -> list[_Pass]:
    """Return the passes, prefills first."""
    replicas = {
        int(match[1]): path for path in _folders(directory) if (match := _REPLICA.fullmatch(path.name))
    }
    if not replicas:
        replicas = {0: directory}
    found = []
    for place, (replica, folder) in enumerate(sorted(replicas.items())):
        for path in _folders(folder):
            match = _PASS.fullmatch(path.name)
            if match is not None:
                label = f"dp{replica}/{path.name}" if len(replicas) > 1 else path.name
                is_decode = match["phase"] == "decode_b"
                order = (is_decode, replica, int(match["number"]), int(match["size"]))
                found.append((order, _Pass(label=label, folder=path, replica=(place, len(replicas)))))
    return [one for _, one in sorted(found, key=lambda item: item[0])]


def _folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir())
