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
    WeightFiles,
    read_weight_map,
    refuse_pickled_module,
)
from minimax_tools.errors import CheckpointError, shorten
from minimax_tools.hub.access import HubAccess, HubCommit
from minimax_tools.hub.snapshot import HubSnapshot, find_snapshot
from minimax_tools.model.spec import CONFIG_FILE, stored_names_in
from minimax_tools.model.weight_names import layer_of
from minimax_tools.remote.address import RemoteAddress
from minimax_tools.remote.s3_folder import RemoteCheckpoint, S3Folder

# Files for tokenizers and loaders; pictures and remote code are not fetched.
DESCRIBING_SUFFIXES = (".json", ".model", ".txt", ".jinja")
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")
_DEFAULT_REVISION = "main"
_HUB_PREFIX, _BUCKET_PREFIX = "hf://", "s3://"
# A checkpoint that is not in a folder of this machine, or not whole.
Source = HubSnapshot | RemoteCheckpoint


def resolve_model(model: str, *, layers: range | None = None, access: HubAccess | None = None) -> Path:
    """Return the folder of a checkpoint; one that is elsewhere is fetched.

    Args:
        model: A folder, `owner/name` or `owner/name@revision`, or `s3://bucket/folder`.
        layers: Decoder layers that will be read. Only their shards are fetched, and those of embedding, final norm
            and lm_head. None for all shards.
        access: Access to the hub; None for that of the environment.
    """
    source = described_source(model, access=access)
    if source is None:
        # Threads read it while a port runs, whose code may change the working folder.
        return Path(model).expanduser().absolute()
    source.fetch(find_shards(source, layers))
    return source.folder


def resolve_config(model: str, *, access: HubAccess | None = None) -> Path:
    """Return the folder of a checkpoint; of one that is elsewhere only config, index and tokenizer are fetched."""
    source = described_source(model, access=access)
    return Path(model).expanduser() if source is None else source.folder


def is_on_hub(model: str) -> bool:
    """Decide whether `model` is a hub id: an existing folder of that name wins."""
    return not is_in_bucket(model) and not _is_folder(model)


def is_in_bucket(model: str) -> bool:
    """Decide whether `model` is the address of a folder in a bucket."""
    return model.startswith(_BUCKET_PREFIX)


def described_source(model: str, *, access: HubAccess | None = None) -> Source | None:
    """Return a checkpoint that is elsewhere, with its config, index and tokenizer fetched; None for a folder."""
    source = _find_source(model, access)
    if source is not None:
        source.fetch(find_describing(source.files) | {CONFIG_FILE})
    return source


def list_files(model: str, *, access: HubAccess | None = None) -> tuple[str, ...]:
    """Return the sorted names of the model's files; offline, of its cached files."""
    source = _find_source(model, access)
    if source is not None:
        return tuple(sorted(source.files))
    folder = Path(model).expanduser()
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))


def fetch_files(model: str, names: Iterable[str], *, access: HubAccess | None = None) -> dict[str, Path]:
    """Return the paths of the named files, by name; files that are elsewhere are fetched."""
    wanted = tuple(names)
    source = _find_source(model, access)
    if source is not None:
        return source.fetch(wanted)
    folder = Path(model).expanduser()
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}", next_step="Fetch the missing files into it."
        )
    return {name: folder / name for name in wanted}


def find_shards(source: Source, layers: range | None) -> set[str]:
    """Return the names of the shards with these layers and with the tensors outside all layers; None for all shards.

    The index, if the model has one, must be here already; without one, all files of the format are named. A snapshot
    that is not listed knows only the cached files, so names that the cache may lack are added: fetching them fails with
    a message that says so.
    """
    files = WeightFiles.among(source.files.keys())
    if files is not None and files.index_file is not None:
        weight_map = read_weight_map(source.folder / files.index_file)
        own = stored_names_in(source.folder).own
        # `layer_of` is None for a tensor outside all layers.
        return {
            file
            for name, file in weight_map.items()
            if layers is None or layer_of(own(name)) in (None, *layers)
        }
    if files is not None and files.is_numbered and not source.is_listed:
        # Only the index, which the cache lacks, tells all shards.
        is_pickled = not files.shards[0].endswith(SAFETENSORS_SUFFIX)
        return {*files.shards, PICKLED_INDEX_FILE if is_pickled else INDEX_FILE}
    if files is not None:
        return set(files.shards)
    if source.is_listed:
        raise CheckpointError(
            f"{source.name} holds no weights",
            expected="safetensors shards",
            found=f"{len(source.files)} other files",
            next_step="Check the id. Other weight formats, such as GGUF, are not read.",
        )
    # The cache holds no shard at all.
    return {INDEX_FILE}


def _find_source(model: str, access: HubAccess | None) -> Source | None:
    """Return a checkpoint that is elsewhere, as it was listed; None for a folder."""
    if is_in_bucket(model):
        return RemoteCheckpoint.open(S3Folder(address=RemoteAddress.parse(model)))
    return None if _is_folder(model) else _find_on_hub(model, access)


def _is_folder(model: str) -> bool:
    try:
        # An empty text would mean the working directory.
        return bool(model) and Path(model).expanduser().is_dir()
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
    access = access or HubAccess.from_environment()
    return find_snapshot(HubCommit(model=match[1], revision=revision, commit=revision, access=access))


def find_describing(files: Collection[str]) -> set[str]:
    """Return the names of the files for tokenizers and loaders."""
    return {name for name in files if "/" not in name and name.endswith(DESCRIBING_SUFFIXES)}
