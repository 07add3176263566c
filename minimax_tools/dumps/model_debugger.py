"""Traces of transformers' model debugger, with tensors in files of their own (`use_repr=False`).

`{Class}_debug_tree_FULL_TENSORS.json` with `{Class}.{path}_inputs_args_0.safetensors`, `…_inputs_kwargs_{name}`,
`…_outputs` and `…_outputs_{i}` or `…_outputs_{key}`, as in `_outputs_logits`; each with its tensor under `data`. The
model's own are `{Class}_outputs` and so on. Rank 0 alone writes. Files hold the inputs of all modules, and the outputs
of the model and of modules without submodules; each the last forward pass that wrote it. The tree may leave layers out
(`do_prune_layers`) whose files are there, so the files' names count.
Written against transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from minimax_tools.dumps.format_names import MODEL_DEBUGGER
from minimax_tools.dumps.piece import Dump, DumpPiece, list_pieces
from minimax_tools.errors import CaptureError

LAYOUT = "<Class>_debug_tree_FULL_TENSORS.json with <Class>.<path>_outputs.safetensors"
_TREE = "_debug_tree_FULL_TENSORS.json"
# The rest of a file's name behind the class, such as `.model.norm_outputs.safetensors`.
_REST = re.compile(
    r"(\.(?P<module>.+?))?_"
    r"(inputs_(?P<kind>args|kwargs)_(?P<input>.+)|outputs(_(?P<output>.+))?)"
    r"\.safetensors"
)
_STEP = "0"  # label of the only pass


def recognises(directory: Path) -> bool:
    """Decide whether the folder holds a trace of this kind."""
    return any(directory.glob(f"*{_TREE}"))


def read_dump(directory: Path) -> Dump:
    """List the tensors of a folder."""
    names = sorted(path.name.removesuffix(_TREE) for path in directory.glob(f"*{_TREE}"))
    if len(names) != 1:
        raise CaptureError(
            f"{directory} holds traces of {len(names)} models",
            expected="one",
            found=", ".join(names),
            next_step="Keep the trace of each model in a folder of its own.",
        )
    pieces = tuple(
        piece
        for path in sorted(directory.glob(f"{names[0]}*.safetensors"))
        for piece in _pieces(path, names[0])
    )
    if not pieces:
        raise CaptureError(
            f"{directory} holds a trace without its tensors",
            expected=f"files such as {names[0]}.model.norm_outputs.safetensors",
            next_step="Trace again with model_addition_debugger_context(…, use_repr=False).",
        )
    return Dump(
        directory=directory,
        format=MODEL_DEBUGGER,
        pieces=pieces,
        steps=(_STEP,),
        is_packed=False,
        is_one_rank=True,
        is_whole_model=True,  # inputs of all modules are written
    )


def _pieces(path: Path, class_name: str) -> Iterator[DumpPiece]:
    match = _REST.fullmatch(path.name.removeprefix(class_name))
    if match is None:
        return iter(())  # a file of another class, whose name begins alike
    return list_pieces(
        path,
        directory=path.parent,
        module=match["module"] or "",
        point="input" if match["kind"] else "output",
        element=match["input"] or match["output"] or "",
        step=_STEP,
    )
