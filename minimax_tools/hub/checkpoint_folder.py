"""The folder of a checkpoint: a local one, or that of a hub model or of a bucket of S3, which is fetched.

A hub id is `owner/name` or `owner/name@revision`, with `hf://` before it or not; a folder in a bucket is
`s3://bucket/folder`. Only shards with wanted layers are fetched. A folder wins over a hub id of the same name.
Functions that take a model raise CheckpointError if there is no such folder, or the hub does not give the model, and
RemoteError if S3 does not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from minimax_tools.checkpoint.weight_files import (
    INDEX_FILE,
    PICKLED_INDEX_FILE,
    SAFETENSORS_SUFFIX,
    read_weight_map,
    refuse_pickled_module,
)
from minimax_tools.errors import CheckpointError, UsageError, shorten
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.snapshot import HubSnapshot, find_snapshot
from minimax_tools.model.spec import CONFIG_FILE
from minimax_tools.model.weight_names import layer_of
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.checkpoint import RemoteCheckpoint
from minimax_tools.remote.s3_folder import S3Folder

# Files for tokenizers and loaders; pictures and remote code are not fetched.
DESCRIBING_SUFFIXES = (".json", ".model", ".txt", ".jinja")
# Index file of each format, in order of preference: a repository with safetensors is read from those alone.
_INDEX_FILES = {SAFETENSORS_SUFFIX: INDEX_FILE, ".bin": PICKLED_INDEX_FILE}
# Name of one shard of several, such as `model-00001-of-00130.safetensors`.
_NUMBERED = re.compile(r".*-of-\d+\.\w+")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")
_DEFAULT_REVISION = "main"
_HUB_PREFIX, _BUCKET_PREFIX = "hf://", "s3://"


def resolve_model(model: str, *, layers: range | None = None, access: HubAccess | None = None) -> Path:
    """Return the folder of a checkpoint; a hub model is fetched.

    Args:
        model: A folder, `owner/name` or `owner/name@revision`.
        layers: Decoder layers that will be read. Only their shards are fetched, and those of embedding, final norm
            and lm_head. None for all shards.
        access: Access to the hub; None for that of the environment.

    Raises:
        CheckpointError: The folder is missing, or the hub did not give the model.
    """
    if (remote := _find_remote(model)) is not None:
        return _fetch_remote(remote, layers)
    folder = _find_folder(model)
    if folder is None:
        snapshot = hub_snapshot(model, access=access)
        snapshot.fetch(find_shards(snapshot, layers))
        return snapshot.folder
    # Threads read it while a port runs, whose code may change the working folder.
    return folder.absolute()


def resolve_config(model: str, *, access: HubAccess | None = None) -> Path:
    """Return the folder of a checkpoint; of a hub model only config, index and tokenizer are fetched."""
    if (remote := _find_remote(model)) is not None:
        return _describe_remote(remote)
    return _find_folder(model) or hub_snapshot(model, access=access).folder


def is_on_hub(model: str) -> bool:
    """Decide whether `model` is a hub id: an existing folder of that name wins."""
    return _find_folder(model) is None and not is_in_bucket(model)


def is_in_bucket(model: str) -> bool:
    """Decide whether `model` is the address of a folder in a bucket."""
    return model.startswith(_BUCKET_PREFIX)


def hub_snapshot(model: str, *, access: HubAccess | None = None) -> HubSnapshot:
    """Return the snapshot of a hub model, with its config, index and tokenizer fetched.

    Raises:
        UsageError: The model is a folder.
        CheckpointError: The hub does not give the model.
    """
    folder = _find_folder(model)
    if folder is not None:
        raise UsageError(f"{folder} is a folder, not a hub model", next_step="Give a hub id: owner/name.")
    snapshot = _find_on_hub(model, access)
    snapshot.fetch(_describing(snapshot.files) | {CONFIG_FILE})
    return snapshot


def list_files(model: str, *, access: HubAccess | None = None) -> tuple[str, ...]:
    """Return the sorted names of the model's files; offline, of its cached files."""
    if (remote := _find_remote(model)) is not None:
        return tuple(sorted(remote.files))
    folder = _find_folder(model)
    if folder is None:
        return tuple(sorted(_find_on_hub(model, access).files))
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))


def fetch_files(model: str, names: Iterable[str], *, access: HubAccess | None = None) -> dict[str, Path]:
    """Return the paths of the named files, by name; missing files of a hub model are fetched.

    Raises:
        CheckpointError: The model, or one of its files, is missing.
    """
    wanted = tuple(names)
    if (remote := _find_remote(model)) is not None:
        return remote.fetch(wanted)
    folder = _find_folder(model)
    if folder is None:
        return _find_on_hub(model, access).fetch(wanted)
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}", next_step="Fetch the missing files into it."
        )
    return {name: folder / name for name in wanted}


def find_shards(snapshot: HubSnapshot, layers: range | None) -> set[str]:
    """Return the names of the shards with these layers and with the tensors outside all layers; None for all shards.

    The index, if the model has one, must be cached already; without one, all files of the format are named. A snapshot
    that is not listed knows only the cached files, so names that the cache may lack are added: fetching them fails with
    a message that says so.

    Raises:
        CheckpointError: The model holds no weights, or its index is damaged.
    """
    place = f"the hub's model {snapshot.commit.model}"
    return _choose_shards(snapshot.files, snapshot.folder, layers, is_listed=snapshot.is_listed, place=place)


def _choose_shards(
    files: Collection[str], folder: Path, layers: range | None, *, is_listed: bool, place: str
) -> set[str]:
    """Return the shards among `files`, names of which the index is in `folder`; see `find_shards`."""
    for suffix, index_file in _INDEX_FILES.items():
        shards = {name for name in files if "/" not in name and name.endswith(suffix)}
        if index_file in files:
            weight_map = read_weight_map(folder / index_file)
            # `layer_of` is None for a tensor outside all layers.
            return {
                file
                for name, file in weight_map.items()
                if layers is None or layer_of(name) in (None, *layers)
            }
        if shards and not is_listed and any(map(_NUMBERED.fullmatch, shards)):
            # Only the index, which the cache lacks, tells all shards.
            return {*shards, index_file}
        if shards:
            return shards
    if is_listed:
        raise CheckpointError(
            f"{place} holds no weights",
            expected="safetensors shards",
            found=f"{len(files)} other files",
            next_step="Check the id. Other weight formats, such as GGUF, are not read.",
        )
    # The cache holds no shard at all.
    return {INDEX_FILE}


def _find_remote(model: str) -> RemoteCheckpoint | None:
    """Return the checkpoint at an address of S3; None if `model` is no such address."""
    if not is_in_bucket(model):
        return None
    return RemoteCheckpoint.open(S3Folder(address=RemoteAddress.parse(model)))


def find_bucket_shards(model: str) -> tuple[RemoteCheckpoint, set[str]]:
    """Return the checkpoint at an address of S3, with its description fetched, and the names of all its shards.

    Raises:
        CheckpointError: There is no such checkpoint, or it holds no weights.
        RemoteError: S3 refuses, or does not answer.
    """
    checkpoint = _find_remote(model)
    if checkpoint is None:
        raise UsageError(f"{model} is no address of S3", next_step="Give s3://bucket/folder.")
    folder = _describe_remote(checkpoint)
    return checkpoint, _choose_shards(checkpoint.files, folder, None, is_listed=True, place=model)


def _fetch_remote(checkpoint: RemoteCheckpoint, layers: range | None) -> Path:
    folder = _describe_remote(checkpoint)
    place = str(checkpoint.source.address)
    checkpoint.fetch(_choose_shards(checkpoint.files, folder, layers, is_listed=True, place=place))
    return folder


def _describe_remote(checkpoint: RemoteCheckpoint) -> Path:
    checkpoint.fetch(_describing(checkpoint.files) | {CONFIG_FILE})
    return checkpoint.folder


def _find_folder(model: str) -> Path | None:
    """Return the local folder that `model` names; None if there is none."""
    folder = Path(model).expanduser()
    try:
        # An empty text would mean the working directory.
        return folder if model and folder.is_dir() else None
    except OSError as error:  # a text that is too long for a path, or a folder that may not be entered
        raise CheckpointError(
            f"{shorten(model)!r} cannot be opened",
            found=error.strerror,
            next_step="Give --model a folder or a hub id.",
        ) from error


def _find_on_hub(model: str, access: HubAccess | None) -> HubSnapshot:
    """Return the snapshot of the hub id `model`."""
    match = _HUB_ID.fullmatch(model.removeprefix(_HUB_PREFIX))
    if match is None or ".." in model:
        refuse_pickled_module(Path(model).expanduser())
        raise CheckpointError(
            f"no checkpoint at {model!r}",
            expected="a folder with config.json and safetensors shards, or a hub id such as "
            "MiniMaxAI/MiniMax-M2",
            found="a file" if Path(model).expanduser().exists() else "no such folder",
            next_step="Make a small one with: mm2-split synthesize --output DIR.",
        )
    revision = match[2] or _DEFAULT_REVISION
    return find_snapshot(match[1], revision, access=access or HubAccess.from_environment())


def _describing(files: Collection[str]) -> set[str]:
    """Return the names of the files for tokenizers and loaders."""
    return {name for name in files if "/" not in name and name.endswith(DESCRIBING_SUFFIXES)}
