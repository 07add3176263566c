"""DumpPiece: a tensor of another tool's dump, known by its file's name and header; Dump: all pieces of a directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.dumps.tensor_file import list_tensors
from minimax_tools.errors import CaptureError

# The first number is the layer's, whatever the list of layers is called; numbers of experts follow.
_FIRST_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpPiece:
    """The tensor that one rank wrote of one module in one forward pass."""

    file: str  # path within the dump
    keys: tuple[str | int, ...]  # keys of the tensor in the file's value; empty if it is the value
    module: str  # path of the module, or the tensor's own name; empty for the model itself
    point: str  # `input` or `output`
    element: str  # which of several inputs or outputs: an index, a name, or empty if there is one
    step: str  # label of the forward pass
    rank: int  # tensor-parallel rank that wrote it
    shape: tuple[int, ...]
    dtype: str  # as in `bfloat16`
    # Names of its dims as the user gave them to the tool, such as `b s h[tp]`; else None.
    dims: str | None = None

    def __str__(self) -> str:
        element = f"[{self.element}]" if self.element else ""
        return f"{self.module}:{self.point}{element}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Contents of another tool's directory, known without reading the values of its modules."""

    directory: Path
    format: str  # name of the layout
    pieces: tuple[DumpPiece, ...]
    steps: tuple[str, ...]  # labels of its forward passes, in their order; the first prefill comes first
    num_ranks: int = 1  # ranks of one tensor-parallel group, as far as the dump tells
    # Whether the tokens of all prompts lie one after another, not in padded rows; None if either may be.
    is_packed: bool | None = None
    is_one_rank: bool = False  # whether the tool keeps rank 0's tensors alone, however many ranks there are
    # Whether the tool writes the inputs of all modules, so that the dump's last layer is the model's.
    is_whole_model: bool = False
    # Requests and positions of each pass; empty if the tool does not record them.
    records: tuple[PassRecord, ...] = ()
    notes: tuple[
        str, ...
    ] = ()  # sentences on what of the directory is left out, and on names that are changed


def list_pieces(
    path: Path,
    *,
    directory: Path,
    module: str,
    step: str,
    point: str = "output",
    element: str = "",
    rank: int = 0,
) -> Iterator[DumpPiece]:
    """Yield the pieces in the file `path` of the dump in `directory`, from its header; see `DumpPiece` for the rest.

    The keys of a tensor within a `.pt` file follow `element`: with the keys (0, "k"), `out` becomes `out.0.k`.

    Raises:
        CaptureError: The file is damaged, or holds no tensor.
    """
    tensors = list_tensors(path)
    if not tensors:
        raise CaptureError(
            f"{path} holds no tensor",
            next_step="Copy it again from the host that wrote it; or remove it, and its site is not exposed.",
        )
    for tensor in tensors:
        element_keys = map(str, tensor.keys) if path.suffix == ".pt" else ()
        yield DumpPiece(
            file=path.relative_to(directory).as_posix(),
            keys=tensor.keys,
            module=module,
            point=point,
            element=".".join(part for part in (element, *element_keys) if part),
            step=step,
            rank=rank,
            shape=tensor.shape,
            dtype=tensor.dtype,
        )


def order_steps(pieces: Iterable[DumpPiece]) -> tuple[str, ...]:
    """Return the labels of the pieces' passes, such as `0`, `0.1`, `1`, in the order of their numbers."""
    return tuple(sorted({piece.step for piece in pieces}, key=step_order))


def step_order(label: str) -> tuple[int, ...]:
    """Return the numbers of a pass's label, by which labels are sorted: (3, 1) for `3.1`."""
    return tuple(int(part) for part in label.split("."))


def find_layer(module: str) -> int | None:
    """Return the number of a module's layer; None if its name has no number."""
    match = _FIRST_NUMBER.search(module)
    return None if match is None else int(match[0])


def word_module(module: str) -> str:
    """Return a module's name as a map writes it, such as `blocks.{layer}.attn.wq`."""
    return _FIRST_NUMBER.sub("{layer}", module, count=1)


def word_modules(modules: Iterable[str]) -> list[str]:
    """Return modules' names as a map writes them, each once."""
    return list(dict.fromkeys(word_module(module) for module in modules))
