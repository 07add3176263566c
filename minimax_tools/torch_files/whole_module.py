"""A whole module that torch.save pickled: neither a checkpoint nor a port, and told by the class that it names."""

from __future__ import annotations

from pathlib import Path

from minimax_tools.errors import CannotRunError, CheckpointError
from minimax_tools.torch_files.inert import InertRecord

_SUFFIXES = (".pt", ".pth", ".bin", ".pkl")
# Part of a module's pickled state.
_PARAMETERS = "_parameters"


def find_pickled_module(path: Path) -> str | None:
    """Return the class of the module that a file, or the first such file of a folder, holds pickled; None if none.

    Nothing in the file is run. A file that is no pickle is none.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        return next((f"{file.name}: {name}" for file in files if (name := find_pickled_module(file))), None)
    if not path.is_file():
        return None
    # This import needs torch, which folders without such a file do not.
    from minimax_tools.torch_files.torch_file import read_structure, refusing

    try:
        with refusing(path, CannotRunError, next_step=""):
            value = read_structure(path)
    except CannotRunError:
        return None
    is_module = (
        isinstance(value, InertRecord) and isinstance(value.state, dict) and _PARAMETERS in value.state
    )
    return f"{value.module}.{value.name}" if is_module else None


def refuse_pickled_module(path: Path) -> None:
    """Raise if a checkpoint is a module that was pickled whole, or a folder of one.

    Raises:
        CheckpointError: It is; the message names the module's class.
    """
    pickled = find_pickled_module(path)
    if pickled is not None:
        raise CheckpointError(
            f"no checkpoint at {path}",
            expected="safetensors shards",
            found=f"a pickled module, {pickled}",
            next_step="Save its tensors alone, safetensors.torch.save_file(module.state_dict(), FILE), with its "
            "config.json.",
        )
