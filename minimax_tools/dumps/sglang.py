"""Dumps of SGLang's dumper: `{exp}/step=0___rank=0___dump_index=1___name=X….pt`, each a dict of `value` and `meta`.

`meta` tells the name, step and ranks, and the dims (`b s h[tp]`) if the caller gave them. Hooks on all modules
write names such as `non_intrusive__{module}.inputs.{i}` and `….output`. Tokens of all requests lie one after another,
unless the dims name a batch.

A step may hold several forward passes. A name that is dumped again in the same step belongs to the step's next pass;
the passes of step 3 are labelled `3`, `3.1`, `3.2`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minimax_tools.dumps.format_names import SGLANG
from minimax_tools.dumps.piece import Dump, DumpPiece, order_steps, step_order
from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.dumps.tensor_file import describe_structure, find_tensors, read_tensor
from minimax_tools.errors import CaptureError, shorten

LAYOUT = "step=0___rank=0___dump_index=1___name=<name>.pt"
_FILE = re.compile(r"step=\d+___rank=\d+___dump_index=\d+___name=.+\.pt")
_HOOK_PREFIX = "non_intrusive__"
_HOOK_NAME = re.compile(r"((?P<module>.+)\.)?(?P<point>inputs|output)(\.(?P<element>.+))?")
_PARALLEL = ("sglang_parallel_info", "megatron_parallel_info")
# Names that the hooks give to arguments, whichever module is called with them; `rids` are the requests' ids.
_POSITIONS, _SEQ_LENS, _RIDS, _POOL_INDICES = "positions", "seq_lens", "rids", "req_pool_indices"
_OF_A_BATCH = frozenset(
    {
        _POSITIONS,
        _SEQ_LENS,
        _RIDS,
        _POOL_INDICES,
        "input_ids",
        "position_ids",
        "cu_seqlens_q",
        "cu_seqlens_kv",
    }
)
# Axes of other parallelism, whose pieces are not put together here.
_OTHER_AXES = ("cp", "ep", "sp", "attn_cp")
# More than any step, rank or layer: a pickle may hold any number.
_MOST = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of the dump."""

    index: int  # its place in the order of writing
    step: int
    world_rank: int
    num_ranks: int  # number of ranks in its tensor-parallel group
    pieces: tuple[DumpPiece, ...]  # its tensors, whose passes are not known yet
    name: str  # name of the tensor, which is written once in each pass
    rids: tuple[str, ...] = ()  # ids of the requests, in the file that holds them

    @property
    def step_and_rank(self) -> tuple[int, int]:
        """Step and rank: the files of both follow each other in the order of writing."""
        return self.step, self.world_rank


def recognises(directory: Path) -> bool:
    """Decide whether the folder holds files of this layout."""
    return any(_FILE.fullmatch(path.name) for path in directory.glob("step=*.pt"))


def read_dump(directory: Path) -> Dump:
    """List the tensors of a folder."""
    paths = [path for path in sorted(directory.glob("step=*.pt")) if _FILE.fullmatch(path.name)]
    files = sorted((_read(path) for path in paths), key=lambda file: (file.step, file.index))
    labels = _find_labels(files)
    pieces = tuple(
        replace(piece, step=label)
        for file, label in zip(files, labels, strict=True)
        if label is not None
        for piece in file.pieces
    )
    is_packed = not any(_has_batch(piece.dims) for piece in pieces)
    return Dump(
        directory=directory,
        format=SGLANG,
        pieces=pieces,
        steps=order_steps(pieces),
        num_ranks=max((file.num_ranks for file in files), default=1),
        is_packed=is_packed,
        records=tuple(_read_records(directory, files, labels)) if is_packed else (),
    )


def _read(path: Path) -> _File:
    value = describe_structure(path)
    meta = value.get("meta") if isinstance(value, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(meta.get("name"), str):
        raise _other_layout(
            path, "a dict with 'value' and 'meta', and a 'name' in the latter", type(value).__name__
        )
    world_rank = _number(meta, "rank", path)
    rank, num_ranks = _tensor_parallel(meta, path, world_rank)
    dims = _read_dims(meta, path)
    module, point, element = _parse_name(meta, path)
    pieces = tuple(
        DumpPiece(
            file=path.name,
            keys=tensor.keys,
            module=module,
            point=point,
            element=".".join(part for part in (element, *map(str, tensor.keys[1:])) if part),
            step="",
            rank=rank,
            shape=tensor.shape,
            dtype=tensor.dtype,
            dims=dims,
        )
        for tensor in find_tensors(value)
        if tensor.keys[:1] == ("value",)
    )
    name = meta["name"]
    request_ids = value.get("value") if name == _RIDS else None
    return _File(
        name=name if name in _OF_A_BATCH else str(pieces[0]) if pieces else name,
        rids=tuple(map(str, request_ids)) if isinstance(request_ids, (list, tuple)) else (),
        index=_number(meta, "dump_index", path),
        step=_number(meta, "step", path),
        world_rank=world_rank,
        num_ranks=num_ranks,
        pieces=pieces,
    )


def _find_labels(files: list[_File]) -> list[str | None]:
    """Return the label of each file's pass; None for a tensor of the batch that its pass has already."""
    labels: list[str | None] = []
    named: set[tuple[int, str, str]] = set()
    for file, number in zip(files, _number_passes(files), strict=True):
        label = f"{file.step}.{number}" if number else str(file.step)
        entry = (file.world_rank, file.name, label)
        is_again = file.name in _OF_A_BATCH and entry in named
        named.add(entry)
        labels.append(None if is_again else label)
    return labels


def _number_passes(files: list[_File]) -> list[int]:
    """Return the number of each file's pass within its step, from 0.

    A module's file has the number of times that its name was written before. A tensor of the batch may be written for
    several modules of a pass, so it has the number of the next module's file; behind the last, the number of that:

    | file | positions | layers.0 | positions | layers.1 | positions | layers.0 | positions |
    |---|---|---|---|---|---|---|---|
    | number | 0 | 0 | 0 | 0 | 1 | 1 | 1 |
    """
    num_written: Counter[tuple[tuple[int, int], str]] = Counter()
    module_numbers: list[int | None] = []  # None for tensors of the batch
    for file in files:
        key = (file.step_and_rank, file.name)
        module_numbers.append(None if file.name in _OF_A_BATCH else num_written[key])
        num_written[key] += 1
    numbered = list(zip(files, module_numbers, strict=True))
    # The number of the next module's file, as seen from the end: at first that of the last module.
    next_numbers = {file.step_and_rank: number for file, number in numbered if number is not None}
    numbers: list[int] = []
    for file, number in reversed(numbered):
        if number is not None:
            next_numbers[file.step_and_rank] = number
        numbers.append(next_numbers.get(file.step_and_rank, 0))  # 0 in a step without modules
    return list(reversed(numbers))


def _read_records(directory: Path, files: list[_File], labels: list[str | None]) -> Iterator[PassRecord]:
    """Yield the requests of each pass, up to the first pass that does not record all that is needed.

    Later ones are of no use: passes with a gap are not joined. Requests are known by their ids, else by their slots in
    a pool of requests. One rank's files tell them for all.
    """
    of_passes: dict[str, dict[str, _File]] = defaultdict(dict)  # tensors of the batch, by label and name
    for file, label in zip(files, labels, strict=True):
        if label is not None and file.world_rank == files[0].world_rank and file.name in _OF_A_BATCH:
            of_passes[label][file.name] = file
    times_begun: Counter[str] = Counter()
    for label in sorted(of_passes, key=step_order):
        batch = of_passes[label]
        if not {_POSITIONS, _SEQ_LENS} <= batch.keys() or not batch.keys() & {_RIDS, _POOL_INDICES}:
            return
        positions, ends = (_read_numbers(directory, batch[name]) for name in (_POSITIONS, _SEQ_LENS))
        requests = batch[_RIDS].rids if _RIDS in batch else _read_numbers(directory, batch[_POOL_INDICES])
        if len(ends) != len(requests):
            return
        record = PassRecord(step=label, requests=tuple(map(str, requests)), positions=positions, ends=ends)
        if _RIDS not in batch:
            # A stretch is a slot's tokens in this pass; from position 0 they are a new request's: 5, then 5.2, 5.3.
            times_begun.update(slot for slot, stretch in record.stretches() if stretch.start == 0)
            record = replace(
                record,
                requests=tuple(
                    slot if times_begun[slot] < 2 else f"{slot}.{times_begun[slot]}"
                    for slot in record.requests
                ),
            )
        yield record


def _read_numbers(directory: Path, file: _File) -> tuple[int, ...]:
    """Return the numbers in a file's first tensor; none if it is not one-dimensional."""
    piece = file.pieces[0] if file.pieces else None
    if piece is None or len(piece.shape) != 1:
        return ()
    return tuple(int(number) for number in read_tensor(directory / piece.file, piece.keys))


def _parse_name(meta: Mapping[str, Any], path: Path) -> tuple[str, str, str]:
    """Return module, point and element of a name that a hook or a call of the dumper gave."""
    name: str = meta["name"]
    if name.startswith(_HOOK_PREFIX):
        match = _HOOK_NAME.fullmatch(name.removeprefix(_HOOK_PREFIX))
        if match is not None:
            point = "output" if match["point"] == "output" else "input"
            return match["module"] or "", point, match["element"] or ""
    has_layer = name in _OF_A_BATCH or re.search(r"(^|\.)layers\.\d+(\.|$)", name)
    if has_layer or meta.get("layer_id") is None:
        return name, "output", ""
    return f"layers.{_number(meta, 'layer_id', path)}.{name}", "output", ""


def _tensor_parallel(meta: Mapping[str, Any], path: Path, world_rank: int) -> tuple[int, int]:
    """Return the rank within its tensor-parallel group and the group's size."""
    records = [_read_parallel(meta, key, path) for key in _PARALLEL]
    parallel = next((info for info in records if "tp_rank" in info), None)
    if parallel is None:
        return world_rank, _number(meta, "world_size", path, default=1)
    divided = [axis for axis in _OTHER_AXES if _number(parallel, f"{axis}_size", path, default=1) > 1]
    dims = _read_dims(meta, path) or ""
    if any(f"[{axis}" in dims or f",{axis}" in dims for axis in divided):
        raise CaptureError(
            f"{path} is divided along an axis that is not put together here",
            expected="tensors divided among tensor-parallel ranks alone",
            found=f"dims {dims!r} of a run with {', '.join(divided)}",
            next_step="Dump without that parallelism.",
        )
    return _number(parallel, "tp_rank", path), _number(parallel, "tp_size", path, default=1)


def _read_parallel(meta: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    info = meta.get(key)
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise _other_layout(path, f"a dict as {key}", info)
    return info


def _read_dims(meta: Mapping[str, Any], path: Path) -> str | None:
    dims = meta.get("dims")
    if dims is not None and not isinstance(dims, str):
        raise _other_layout(path, "text as dims", dims)
    return dims


def _number(record: Mapping[str, Any], key: str, path: Path, *, default: int = 0) -> int:
    value = record.get(key, default)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _other_layout(path, f"a whole number as {key}", value)
    return value


def _other_layout(path: Path, expected: str, found: object) -> CaptureError:
    is_long = isinstance(found, int) and abs(found) > _MOST  # Python writes no number of 5000 digits
    return CaptureError(
        f"{path} is of another layout",
        expected=expected,
        found="a number beyond all sizes" if is_long else shorten(repr(found)),
        next_step="Keep such files out of the folder, or name the layout with --format.",
    )


def _has_batch(dims: str | None) -> bool:
    """Decide whether the first dim is named `b`; notes may follow the names, behind `#`."""
    return dims is not None and dims.split("#")[0].split()[:1] == ["b"]
