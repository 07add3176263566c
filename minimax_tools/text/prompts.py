"""The token rows that the input options of a command describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minimax_tools.errors import UsageError, format_count, naming, shorten
from minimax_tools.machine.json_file import parse_json, read_own_json
from minimax_tools.model.inputs import ExpertTokens, Inputs, pad_rows, random_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.tokenizer import encode_texts

# Tokens of the long row: more than the smallest window of sliding attention, 128. All rows are padded to this length,
# and padding costs memory, disk and time, so it is not much more.
_LONG_LENGTH = 144
# Tokens of a row that begins far from position 0.
_FAR_LENGTH = 16
# Positions that such rows cross. A position table that ends or restarts at one of them changes distances within the
# row, and so attention. 65536 also stands for every smaller power of two, and lies past float16's largest value, 65504.
# 4096 is for models with fewer positions.
_CROSSED_POSITIONS = (4096, 65536)
# Lengths of the rows of --quick.
_QUICK_LENGTHS = (96, 61)


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRow:
    """A row of `length` random ids, the first of them at position `start_position`."""

    length: int
    start_position: int = 0
    padding_side: str = "right"
    num_expert_tokens: int = 0  # number of its last tokens that are expert tokens


def default_rows(spec: ModelSpec) -> tuple[DefaultRow, ...]:
    """Return the default rows: a long row at position 0, and short rows far out, up to the last position.

    The farthest row is padded on the left: a port that ignores the mask is wrong there. One row ends in expert tokens,
    with a place for each expert (see `ExpertTokens`). Rows that do not fit a small model are left out or cut.
    """
    num_positions = spec.max_position_embeddings
    longest = min(_LONG_LENGTH, num_positions)
    if spec.graph.most_keys is not None:
        # Sparse layers are defined for rows that begin at position 0, and are padded on the right.
        short = DefaultRow(length=_FAR_LENGTH)
        return _with_expert_tokens((DefaultRow(length=longest), short, short), spec)
    last_start = num_positions - _FAR_LENGTH
    starts = {position - _FAR_LENGTH // 2 for position in _CROSSED_POSITIONS} | {last_start}
    rows = [DefaultRow(length=longest)]
    for start in sorted(starts):
        if longest <= start <= last_start:
            side = "left" if start == last_start else "right"
            rows.append(DefaultRow(length=_FAR_LENGTH, start_position=start, padding_side=side))
    return _with_expert_tokens(rows, spec)


def _with_expert_tokens(rows: Sequence[DefaultRow], spec: ModelSpec) -> tuple[DefaultRow, ...]:
    """Append expert tokens to the first short row with room for them, or else to the long row."""
    count = math.ceil(spec.num_local_experts / spec.num_experts_per_tok)
    num_positions = spec.max_position_embeddings
    hosts = (
        number
        for number, row in enumerate(rows)
        if number > 0
        and row.length + count <= rows[0].length
        and row.start_position + row.length + count <= num_positions
    )
    host = next(hosts, 0)
    length = min(rows[host].length + count, num_positions)
    with_tokens = replace(rows[host], length=length, num_expert_tokens=length - rows[host].length)
    return (*rows[:host], with_tokens, *rows[host + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Token ids of each row, the position of each row's first token, and the source of the rows in words."""

    ids: list[list[int]]
    starts: tuple[int, ...]
    source: str
    file: Path | None = None  # the only file that they come from; None without one
    padding_sides: tuple[str, ...] = ()  # of each row, where no option decides it; empty: right
    is_quick: bool = False
    expert_tokens: ExpertTokens | None = None


def build_inputs(request: InputRequest, *, folder: Path, spec: ModelSpec) -> Inputs:
    """Build the batch that `request` describes, for the checkpoint in `folder`.

    Raises:
        UsageError: An id lies outside the vocabulary, a row is empty or passes the model's last position, or a file
            cannot be read.
    """
    rows = _build_rows(request, folder=folder, spec=spec)
    ids = rows.ids if request.max_length is None else [row[: request.max_length] for row in rows.ids]
    with naming(rows.file):
        _refuse_unusable_rows(ids, rows.starts, spec)
        _refuse_short_rows(ids, request.last_tokens)
    padded = pad_rows(
        ids,
        padding_side=request.padding_side or rows.padding_sides or "right",
        buckets=request.pad_to,
        pad_token_id=pad_token_id(spec),
        source=rows.source,
        start_positions=rows.starts,
    )
    return replace(
        padded,
        is_quick=rows.is_quick,
        expert_tokens=rows.expert_tokens,
        last_tokens=request.last_tokens,
    )


def read_prompts(path: Path | None) -> list[str]:
    """Read the prompts of a file: one per line, or a JSON list of strings; none without a file.

    Raises:
        UsageError: The file cannot be read, or holds no prompts.
    """
    if path is None:
        return []
    try:
        text = path.read_text(encoding="utf-8")
        loaded = parse_json(text) if path.suffix == ".json" else _filled_lines(text)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--prompts-file {path} cannot be read",
            expected="UTF-8 text, a prompt a line, or a .json file with a list of strings",
            found=str(error),
        ) from error
    if not isinstance(loaded, list) or not loaded or not all(isinstance(entry, str) for entry in loaded):
        raise UsageError(
            f"--prompts-file {path} holds no prompts", expected="a prompt a line, or a JSON list of strings"
        )
    return loaded


def refuse_unknown_ids(
    row: Sequence[int], *, name: str, spec: ModelSpec, next_step: str | None = None
) -> None:
    """Raise UsageError if a row, named in the message, holds an id outside the model's vocabulary."""
    for token in row:
        if not 0 <= token < spec.vocab_size:
            raise UsageError(
                f"{name} holds the id {shorten(str(token))}",
                expected=f"ids from 0 to {spec.vocab_size - 1}",
                next_step=next_step,
            )


def pad_token_id(spec: ModelSpec) -> int:
    """Return the model's padding id, or 0: padding is masked, so any id works."""
    pad_id = spec.raw.get("pad_token_id")
    return pad_id if isinstance(pad_id, int) and 0 <= pad_id < spec.vocab_size else 0


def _build_rows(request: InputRequest, *, folder: Path, spec: ModelSpec) -> _Rows:
    if request.input_ids:
        ids = [row for text in request.input_ids for row in _parse_ids(text)]
        source = "--input-ids"
    elif request.has_text:
        texts = [*request.prompts, *read_prompts(request.prompts_file)]
        ids = encode_texts(folder, texts, chat=request.chat)
        source = "chat prompts" if request.chat else "prompts"
    elif request.seq_lens or request.quick:
        lengths = request.seq_lens or _QUICK_LENGTHS
        ids = random_rows(
            lengths, batch_size=request.batch_size, vocab_size=spec.vocab_size, seed=request.seed
        )
        source = f"random ids of seed {request.seed}"
    else:
        return _default_rows(request, spec=spec)
    starts = _row_starts(request.start_positions, num_rows=len(ids))
    return _Rows(ids=ids, starts=starts, source=source, file=_only_file(request), is_quick=request.quick)


def _only_file(request: InputRequest) -> Path | None:
    """Return the file that all rows come from; None if there is none, or if some come from elsewhere."""
    if request.prompts_file is not None and not request.prompts:
        return request.prompts_file
    is_file = len(request.input_ids) == 1 and Path(request.input_ids[0]).suffix == ".json"
    return Path(request.input_ids[0]) if is_file else None


def _default_rows(request: InputRequest, *, spec: ModelSpec) -> _Rows:
    rows = default_rows(spec) * request.batch_size
    number, host = max(enumerate(rows), key=lambda numbered: numbered[1].num_expert_tokens)
    num_cut = max(host.length - (request.max_length or host.length), 0)
    num_left = host.num_expert_tokens - num_cut
    return _Rows(
        ids=random_rows(
            tuple(row.length for row in rows), batch_size=1, vocab_size=spec.vocab_size, seed=request.seed
        ),
        starts=tuple(row.start_position for row in rows),
        source=f"random ids of seed {request.seed}",
        padding_sides=tuple(row.padding_side for row in rows),
        expert_tokens=ExpertTokens(row=number, count=num_left) if num_left > 0 else None,
    )


def _row_starts(start_positions: tuple[int, ...], *, num_rows: int) -> tuple[int, ...]:
    """Return the position of each row's first token from --start-positions: none, one for all, or one for each."""
    if len(start_positions) == num_rows:
        return start_positions
    if len(start_positions) > 1:
        raise UsageError(
            f"--start-positions gives {len(start_positions)} positions for {format_count(num_rows, 'row')}",
            expected="one for all rows, or one for each",
        )
    return (start_positions or (0,)) * num_rows


def _parse_ids(text: str) -> list[list[int]]:
    try:
        if Path(text).suffix == ".json":
            return _as_rows(read_own_json(Path(text)))
        return [[int(part) for part in text.split(",")]]
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--input-ids {text!r} cannot be read",
            expected="ids like 1,2,3 or a .json file with a list of rows",
            found=str(error),
        ) from error


def _as_rows(loaded: Any) -> list[list[int]]:
    """Return JSON, a row of ids or a list of rows, as rows; raise ValueError if it is neither."""
    rows = loaded if isinstance(loaded, list) and loaded and isinstance(loaded[0], list) else [loaded]
    # `type`, because isinstance would accept True as an id.
    if not all(isinstance(row, list) and all(type(token) is int for token in row) for row in rows):
        raise ValueError("JSON that is neither a row of ids nor a list of rows")
    return rows


def _filled_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _refuse_sparse_rows(rows: list[list[int]], starts: tuple[int, ...], spec: ModelSpec) -> None:
    """Raise UsageError for rows in which sparse attention hides keys, or that it is not defined for."""
    most = spec.graph.most_keys
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if most is not None and (start or len(row) > most):
            raise UsageError(
                f"row {index} begins at position {start} and has {format_count(len(row), 'token')}",
                expected=f"position 0 and at most {most} tokens: mm2 does not choose the blocks of keys that "
                f"{spec.family.title}'s sparse layers see in longer rows",
                next_step="Give shorter rows, without --start-positions.",
            )


def _refuse_unusable_rows(rows: list[list[int]], starts: tuple[int, ...], spec: ModelSpec) -> None:
    num_positions = spec.max_position_embeddings
    _refuse_sparse_rows(rows, starts, spec)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if not row:
            raise UsageError(f"row {index} has no token")
        refuse_unknown_ids(row, name=f"row {index}", spec=spec)
        if len(row) > num_positions:
            raise UsageError(
                f"row {index} has {format_count(len(row), 'token')}",
                expected=f"at most {num_positions}, the model's max_position_embeddings",
                next_step="Truncate it with --max-length.",
            )
        if start + len(row) > num_positions:
            raise UsageError(
                f"row {index} begins at position {start} and has {format_count(len(row), 'token')}",
                expected=f"no position past {num_positions - 1}, the last by max_position_embeddings",
                found=f"position {start + len(row) - 1}",
                next_step="Give --start-positions a smaller number, or shorten the row with --max-length.",
            )


def _refuse_short_rows(rows: list[list[int]], last_tokens: int) -> None:
    shortest = min(range(len(rows)), key=lambda row: len(rows[row]))
    if len(rows[shortest]) < last_tokens:
        raise UsageError(
            f"--last-tokens {last_tokens} keeps more tokens than row {shortest} has",
            expected=f"at most {len(rows[shortest])}",
            next_step="Give fewer, or longer rows.",
        )
