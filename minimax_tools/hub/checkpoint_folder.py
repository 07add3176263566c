"""The folder of a checkpoint: a local one, or a model id that is fetched from the Hugging Face hub.

An id is `owner/name` or `owner/name@revision`. Of a sharded model only the shards that hold what is asked for are
fetched. A folder wins over an id that reads the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from minimax_tools.checkpoint.weight_files import INDEX_FILE, read_weight_map
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.snapshot import HubSnapshot, with_snapshot
from minimax_tools.model.weight_names import layer_of

Result = TypeVar("Result")

CONFIG_FILE = "config.json"
# Read by tokenizers and by whoever loads the model; pictures and remote code stay where they are.
DESCRIBING_SUFFIXES = (".json", ".model", ".txt", ".jinja")
# Best first: a repository that has safetensors is read from those alone.
_SHARD_SUFFIXES = (".safetensors", ".bin")
_INDEX_FILES = {".safetensors": INDEX_FILE, ".bin": "pytorch_model.bin.index.json"}
_NUMBERED = re.compile(r".*-of-\d+\.\w+")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")
_DEFAULT_REVISION = "main"


def resolve_model(model: str, *, layers: range | None = None, access: HubAccess | None = None) -> Path:
    """Return the folder of a checkpoint, fetched where `model` is a hub's id.

    Args:
        model: A folder, `owner/name` or `owner/name@revision`.
        layers: The decoder layers that will be read; only their shards are fetched, and those of the embedding,
            the final norm and lm_head. None: all shards.
        access: The hub; None for the one that the environment names.

    Raises:
        CheckpointError: There is no such folder, or the hub did not give the model.
    """
    return _locate(
        model, access, folder=lambda folder: folder, snapshot=lambda snapshot: _fetch_model(snapshot, layers)
    )


def resolve_config(model: str, *, access: HubAccess | None = None) -> Path:
    """Return the folder of a checkpoint as `resolve_model` does; its shards may not be there yet.

    Raises:
        CheckpointError: As for `resolve_model`.
    """

    def fetch(snapshot: HubSnapshot) -> Path:
        _fetch_description(snapshot)
        return snapshot.folder

    return _locate(model, access, folder=lambda folder: folder, snapshot=fetch)


def is_on_hub(model: str) -> bool:
    """Decide whether a model is named by a hub's id: an existing folder of that name wins."""
    return not model or not Path(model).expanduser().is_dir()


def work_on_hub(
    model: str, work: Callable[[HubSnapshot], Result], *, access: HubAccess | None = None
) -> Result:
    """Return the result of `work` on the snapshot of a hub's model, its description fetched.

    Raises:
        UsageError: The model is a folder.
        CheckpointError: As for `resolve_model`; and what `work` raises.
    """

    def refuse(folder: Path) -> Result:
        raise UsageError(f"{folder} is a folder, and no hub's model", next_step="Give a hub id: owner/name.")

    def describe_and_work(snapshot: HubSnapshot) -> Result:
        _fetch_description(snapshot)
        return work(snapshot)

    return _locate(model, access, folder=refuse, snapshot=describe_and_work)


def list_files(model: str, *, access: HubAccess | None = None) -> tuple[str, ...]:
    """Names of the model's files relative to it, sorted; offline, of those that the cache holds.

    Raises:
        CheckpointError: As for `resolve_model`.
    """
    return _locate(
        model,
        access,
        folder=lambda folder: tuple(
            sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        ),
        snapshot=lambda snapshot: tuple(sorted(snapshot.files)),
    )


def fetch_files(model: str, names: Iterable[str], *, access: HubAccess | None = None) -> dict[str, Path]:
    """Paths of the named files, by name; of a hub's model those are fetched that are not here.

    Raises:
        CheckpointError: As for `resolve_model`; or the model lacks a file.
    """
    wanted = tuple(names)
    return _locate(
        model,
        access,
        folder=lambda folder: _find_in_folder(folder, wanted),
        snapshot=lambda snapshot: snapshot.fetch(wanted),
    )


def _locate(
    model: str,
    access: HubAccess | None,
    *,
    folder: Callable[[Path], Result],
    snapshot: Callable[[HubSnapshot], Result],
) -> Result:
    path = Path(model).expanduser()
    # An empty text would be the working directory.
    if model and path.is_dir():
        return folder(path)
    match = _HUB_ID.fullmatch(model)
    if match is None or ".." in model:
        raise CheckpointError(
            f"no checkpoint at {model!r}",
            expected="a folder with config.json and safetensors shards, or a hub id such as "
            "MiniMaxAI/MiniMax-M2",
            found="a file" if path.exists() else "no such folder",
            next_step="Make a small one with: mm2-split synthesize --output DIR.",
        )
    return with_snapshot(
        match[1],
        match[2] or _DEFAULT_REVISION,
        access=access or HubAccess.from_environment(),
        work=snapshot,
    )


def _find_in_folder(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}", next_step="Fetch the missing files into it."
        )
    return {name: folder / name for name in names}


def _fetch_model(snapshot: HubSnapshot, layers: range | None) -> Path:
    _fetch_description(snapshot)
    snapshot.fetch(find_shards(snapshot, layers))
    return snapshot.folder


def _fetch_description(snapshot: HubSnapshot) -> None:
    """Config, index and tokenizer: all that tells about the weights without holding them."""
    names = {name for name in snapshot.files if "/" not in name and name.endswith(DESCRIBING_SUFFIXES)}
    snapshot.fetch(names | {CONFIG_FILE})


def find_shards(snapshot: HubSnapshot, layers: range | None) -> set[str]:
    """Return the shards to fetch; files that no index names belong to another format or use."""
    for suffix in _SHARD_SUFFIXES:
        index_file = _INDEX_FILES[suffix]
        shards = {name for name in snapshot.files if "/" not in name and name.endswith(suffix)}
        if index_file in snapshot.files:
            weight_map = read_weight_map(snapshot.folder / index_file)
            return {
                file
                for name, file in weight_map.items()
                if layers is None or layer_of(name) in (None, *layers)
            }
        if shards and not snapshot.is_listed and any(map(_NUMBERED.fullmatch, shards)):
            # Without the index nobody knows which of them the cache lacks.
            return {*shards, index_file}
        if shards:
            return shards
    if snapshot.is_listed:
        raise CheckpointError(
            f"the hub's model {snapshot.commit.model} holds no weights",
            expected="safetensors shards",
            found=f"{len(snapshot.files)} other files",
            next_step="Check the id; weights in GGUF and the like are of no use here.",
        )
    return {INDEX_FILE}
