"""Captures of neuronx-distributed-inference: one file for each tensor of each step, written by rank 0 alone.

`captured_tensors_{cte|tkg}_step_{N}_module_{name}_{output|input}.pt`, with `capture_metadata.json` beside them. NxDI's
capture of models in eager mode writes `…_output_0`, `…_inputs_0` and `…_inputs_kwargs_{name}`, and no metadata.
Step 1 is the prefill, padded to its bucket. Of a module's outputs on the device, the first is kept. Attention returns a
record; its first tensor by name is kept, which may be a table of the rotary embedding. Written against NxDI 0.10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.dumps.format_names import NXDI
from minimax_tools.dumps.piece import Dump, DumpPiece, list_pieces
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode
from minimax_tools.machine.json_file import read_json

LAYOUT = "captured_tensors_cte_step_1_module_<name>_output.pt"
_FILE = re.compile(
    r"captured_tensors_(?P<phase>cte|ctx|tkg)_step_(?P<step>\d+)_"
    r"(module_(?P<module>.+)|manual_tensor_(?P<manual>\d+))\.pt"
)
_ATTENTION = re.compile(r"(.+\.)?self_attn")
# Element of attention's output, which no usual name has: which tensor of the record it is, only a map can say.
_FIRST_BY_NAME = "first"
_METADATA = "capture_metadata.json"
# Ends of names, to be tried in this order: a module's name may hold these words too.
_ENDINGS = tuple(
    re.compile(text)
    for text in (
        r"(?P<module>.+)[._](?P<point>input|output)",  # layers.0.mlp_output
        r"(?P<module>.+)_(?P<point>input|output)s?_(?P<element>\d+(_\d+)*)",  # layers.0.mlp_output_0
        r"(?P<module>.+?)_(?P<point>input)s_kwargs_(?P<element>.+)",  # layers.0_inputs_kwargs_hidden_states
        r"(?P<module>.+)[._](?P<point>input|output)s",  # layers.0_inputs
        r"(?P<module>.+?)_(?P<point>output)_(?P<element>.+)",  # lm_head_output_logits
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileMetadata:
    """The metadata of one file, as far as they are used; the file's name tells what they lack."""

    module_name: str | None = None
    tensor_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    tensors: Mapping[str, _FileMetadata]


def recognises(directory: Path) -> bool:
    """Decide whether the folder holds files of this layout."""
    return any(_FILE.fullmatch(path.name) for path in directory.glob("captured_tensors_*.pt"))


def read_dump(directory: Path) -> Dump:
    """List the tensors of a folder."""
    metadata = _read_metadata(directory / _METADATA)
    matches = {
        path.name: match
        for path in sorted(directory.glob("captured_tensors_*.pt"))
        if (match := _FILE.fullmatch(path.name)) is not None
    }
    pieces = tuple(
        piece
        for name, match in matches.items()
        for piece in _pieces(directory, match, metadata.get(name, _FileMetadata()))
    )
    steps = sorted({int(match["step"]) for match in matches.values()})
    return Dump(
        directory=directory,
        format=NXDI,
        pieces=pieces,
        steps=tuple(str(step) for step in steps),
        is_packed=False,  # prompts lie in padded rows
        is_one_rank=True,  # rank 0's tensors alone
    )


def _pieces(directory: Path, match: re.Match[str], metadata: _FileMetadata) -> Iterator[DumpPiece]:
    """Yield the pieces of one file, given the match of its name and its metadata."""
    module, point, element = _parse_name(match, metadata)
    return list_pieces(
        directory / match.string,
        directory=directory,
        module=module,
        point=point,
        element=element,
        step=str(int(match["step"])),
    )


def _parse_name(match: re.Match[str], metadata: _FileMetadata) -> tuple[str, str, str]:
    """Return module, point and element as the file's metadata says, else as its name does."""
    if match["manual"] is not None:
        return f"manual_tensor_{match['manual']}", "output", ""
    module, kind = metadata.module_name, metadata.tensor_type
    if module is not None and kind in ("input", "output"):
        is_of_record = kind == "output" and _ATTENTION.fullmatch(module) is not None
        return module, kind, _FIRST_BY_NAME if is_of_record else ""
    for ending in _ENDINGS:
        found = ending.fullmatch(match["module"])
        if found is not None:
            return found["module"], found["point"], found.groupdict().get("element") or ""
    return match["module"], "output", ""


def _read_metadata(path: Path) -> Mapping[str, _FileMetadata]:
    """Read the metadata of each file, by the file's name; empty if there is none."""
    if not path.exists():
        return {}
    try:
        return decode(_Metadata, read_json(path)).tensors
    except (OSError, ValueError) as error:
        raise CaptureError(
            f"{path} is damaged",
            expected="a JSON object with what each file holds under 'tensors'",
            found=f"{type(error).__name__}: {error}",
            next_step="Remove it, and the files' names say what they hold; or run the capture again.",
        ) from error
