"""SliceSource: a checkpoint to divide, as far as it is known: headers, an index file, or config.json alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from minimax_tools.checkpoint.expected_tensors import TensorSize, expected_tensors
from minimax_tools.checkpoint.header import (
    LENGTH_BYTES,
    TensorEntry,
    data_start_of,
    parse_header,
    read_header,
)
from minimax_tools.checkpoint.index import TensorIndex, find_index
from minimax_tools.checkpoint.weight_files import (
    INDEX_FILE,
    SAFETENSORS_SUFFIX,
    faulty_checkpoint,
    find_header_faults,
    find_weight_map,
    read_weight_map,
)
from minimax_tools.errors import CheckpointError, UnsupportedModelError, list_faults
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import Source, described_source, find_shards
from minimax_tools.hub.snapshot import HubSnapshot, NoRangesError, NotCachedError, run_all
from minimax_tools.model.architecture import ARCHITECTURES, Architecture
from minimax_tools.model.families import FAMILIES, family_of
from minimax_tools.model.quantisation import refuse_side_format
from minimax_tools.model.spec import CONFIG_FILE, ModelSpec, read_checkpoint_config, require_sizes
from minimax_tools.partition.cost import Workload, measure_costs
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan, make_plan
from minimax_tools.slices.stored_weights import StoredWeights

logger = logging.getLogger(__name__)

# A hub id with a whole commit.
_PINNED = re.compile(r"[^/@]+/[^/@]+@[0-9a-f]{40}")
# Longest header that safetensors itself reads. A damaged file may state any length, and it would all be fetched.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSource(StoredWeights):
    """A checkpoint to divide; `model` is a folder as it was given, or `owner/name@commit` of a hub's model.

    Shards may be missing here. What is known of the tensors comes from the first source that has it:

    | asked for | of tensors | from |
    |---|---|---|
    | `index` | of shards that are here | their headers |
    | `entries` | all, else None | headers of all shards, here or on the hub |
    | `headers_known` | all, or of shards that are here | `entries`, else `index` |
    | `names` | all, else None | `entries`, else `weight_map` |
    | `find_tensors()` | all, else None | `entries`, else config.json of a MiniMax-M2 |
    | `tensors` | all, else an error | as `find_tensors()` |
    | `measure_tensors(plan)` | all of the plan | `headers_known`, else the plan, else config.json |

    Args:
        config: Content of its config.json; of a model with further parts, that of its text model.
        architecture: Naming of its tensors.
        entries: All tensors by name, if all headers are known; else None.
        weight_map: File of each tensor by name, from the index file; None if there is none.
    """

    config: Mapping[str, Any] = field(repr=False)
    architecture: Architecture
    entries: Mapping[str, TensorEntry] | None = field(repr=False)
    weight_map: Mapping[str, str] | None = field(repr=False)

    @property
    def headers_known(self) -> Mapping[str, TensorEntry]:
        """Tensors by name: all of them, or those of the shards that are here."""
        if self.entries is not None:
            return self.entries
        return {} if self.index is None else self.index.entries

    @property
    def names(self) -> frozenset[str] | None:
        """Names of all tensors; None if neither all headers nor an index file are known."""
        names = self.weight_map if self.entries is None else self.entries
        return None if names is None else frozenset(names)

    def find_tensors(self) -> tuple[TensorSize, ...] | None:
        """Return all tensors of the checkpoint, or None if they are not known."""
        if self.entries is not None:
            return tuple(self.entries.values())
        if self.config["model_type"] not in FAMILIES:
            return None
        try:
            refuse_side_format(self.folder, self.config)
            return tuple(expected_tensors(ModelSpec.from_config(self.config)))
        except UnsupportedModelError:
            # Another format or graph has other tensors. Only headers tell them, and they are all that a plan needs.
            return None

    @property
    def tensors(self) -> tuple[TensorSize, ...]:
        """Tensors of the whole checkpoint, as `find_tensors` finds them.

        Raises:
            CheckpointError: They are not known.
        """
        tensors = self.find_tensors()
        if tensors is None:
            files = sorted(set((self.weight_map or {}).values()))
            absent = [file for file in files if not (self.folder / file).is_file()]
            kind = self.config["model_type"]
            if kind in FAMILIES:
                kind += " in another format, or with another graph,"
            raise CheckpointError(
                f"the tensors of {self.model} are not known: the config.json of a {kind} lists none",
                expected="the headers of all its shards",
                found=f"not here: {list_faults(absent)}" if absent else "no header",
                next_step="Fetch what is missing, or give --model a hub id: its headers are read without the weights.",
            )
        return tensors

    def measure_tensors(self, plan: PartitionPlan) -> dict[str, int]:
        """Return the size of each tensor in bytes, by name, for all tensors of the plan whose size is known."""
        planned = [tensor for slice_ in plan.slices for tensor in slice_.tensors]
        sizes = {tensor.name: tensor.size_bytes for tensor in planned if tensor.start is not None}
        sizes |= {name: entry.size_bytes for name, entry in self.headers_known.items()}
        if any(tensor.name not in sizes for tensor in planned):
            sizes = {tensor.name: tensor.size_bytes for tensor in self.find_tensors() or ()} | sizes
        return sizes

    def divide(self, *, planner: str, nodes: Sequence[Node], workload: Workload) -> PartitionPlan:
        """Divide the checkpoint among nodes; arguments and errors as for `make_plan`."""
        tensors = self.tensors
        return make_plan(
            model=self.model,
            architecture=self.architecture,
            tensors=tensors,
            folder=self.folder,
            planner=planner,
            cost=measure_costs(tensors, self.architecture, self.config, workload),
            nodes=nodes,
        )


def open_source(model: str, *, headers: bool = False, access: HubAccess | None = None) -> SliceSource:
    """Open a checkpoint in a folder or on the hub; no weights are fetched.

    The source of a hub's model names the commit, because a branch may move. Shards may be missing: their tensors
    are known from the index file, or for MiniMax-M2 from config.json.

    Args:
        model: A folder or a hub id.
        headers: Fetch the headers of shards that only the hub has, by byte ranges. If the server does not support
            byte ranges, or the hub may not be asked, `entries` is None. A network failure is an error.
        access: The hub; None for the one that the environment names.

    Raises:
        CheckpointError: There is no such checkpoint, its files contradict each other, or the hub does not answer.
        UsageError: Neither mm2 nor transformers knows how the model names its tensors.
    """
    remote = described_source(model, access=access)
    if isinstance(remote, HubSnapshot):
        model = f"{remote.commit.model}@{remote.commit.commit}"
    folder = Path(model).expanduser() if remote is None else remote.folder
    config = read_checkpoint_config(folder)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{folder / CONFIG_FILE} names no model_type", next_step="Fetch the file again."
        )
    config = family_of(config).text_config(config)
    if config["model_type"] in ARCHITECTURES:
        require_sizes(config, folder / CONFIG_FILE)
    index = find_index(folder)
    return SliceSource(
        model=model,
        folder=folder,
        config=config,
        architecture=_find_architecture(folder, config),
        index=index,
        entries=_find_entries(model, index, remote if headers else None),
        weight_map=find_weight_map(folder),
    )


def are_two_commits(model: str, other: str) -> bool:
    """Decide whether two sources are different commits on a hub; a folder may be a copy of any commit."""
    return model != other and all(map(_PINNED.fullmatch, (model, other)))


def _find_entries(
    model: str, index: TensorIndex | None, remote: Source | None
) -> Mapping[str, TensorEntry] | None:
    """Return all tensors of the checkpoint from the headers here, or else elsewhere; None if some are missing."""
    if index is not None and not index.absent:
        return index.entries
    if remote is not None:
        try:
            return _fetch_headers(remote)
        except (NoRangesError, NotCachedError) as error:
            logger.info("The headers of %s are not known: %s", model, error)
    if index is not None and remote is not None:
        num_absent = len(set(index.absent.values()))
        logger.info("Shards of %s that are not here, and whose headers are not known: %d.", model, num_absent)
    return None


def _find_architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    if config["model_type"] not in ARCHITECTURES:
        # This import needs transformers, which the listed architectures do not.
        from minimax_tools.split.module_tree import read_architecture

        return read_architecture(folder)
    # gpt2's config.json has `n_layer`.
    num_layers = config.get("num_hidden_layers") or config.get("n_layer")
    return replace(Architecture.of(config["model_type"]), num_layers=num_layers)


def _fetch_headers(source: Source) -> Mapping[str, TensorEntry]:
    """Read the tensor entries of a checkpoint by name; of each shard that is not here two short ranges are fetched.

    The model's index, if it has one, must be here already.

    Raises:
        NoRangesError: The server sends whole files only, or the weights are not safetensors.
    """
    shards = find_shards(source, layers=None)
    if any(not shard.endswith(SAFETENSORS_SUFFIX) for shard in shards):
        raise NoRangesError(
            f"the tensors of {source.name} cannot be listed by byte ranges",
            found="PyTorch's .bin files, which have no header",
            next_step="Fetch the model.",
        )
    headers = _read_shard_headers(source, shards)
    weight_map = read_weight_map(source.folder / INDEX_FILE) if INDEX_FILE in source.files else None
    faults = find_header_faults(headers, weight_map)
    if faults:
        raise faulty_checkpoint(source.folder, faults)
    return TensorIndex.of(source.folder, chain.from_iterable(headers.values())).entries


def _fetch_header(
    read: Callable[[int, int], bytes], path: Path, *, size_bytes: int
) -> tuple[TensorEntry, ...]:
    """Fetch a header in two ranges: its length, then the header itself, which ends where the tensors' data start.

    `read` gives bytes from a start to a stop; `path` is the shard's place, for messages and entries.
    """
    data_start = data_start_of(path, read(0, min(LENGTH_BYTES, size_bytes)), file_size_bytes=size_bytes)
    if data_start - LENGTH_BYTES > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is damaged",
            expected=f"a header of at most {_MAX_HEADER_BYTES} bytes",
            found=f"one of {data_start - LENGTH_BYTES}",
            next_step="Check the id; if it is right, tell the model's owner.",
        )
    return parse_header(path, read(LENGTH_BYTES, data_start), file_size_bytes=size_bytes)


def _read_shard_headers(source: Source, shards: Iterable[str]) -> dict[str, tuple[TensorEntry, ...]]:
    """Read the tensor entries of shards, by shard; headers of shards that are not here are fetched."""
    here = {shard for shard in shards if source.holds(shard)}
    headers = {shard: read_header(source.folder / shard) for shard in here}
    absent = sorted(set(shards) - here)
    # If the hub was not asked for its list (`is_listed`), it is not asked for headers either.
    unknown = [shard for shard in absent if shard not in source.files or not source.is_listed]
    if unknown:
        raise source.lacking(unknown)

    def fetch(shard: str) -> None:
        size_bytes = source.files[shard].size_bytes
        if size_bytes is None:
            raise CheckpointError(f"the hub does not say how long {shard} is")
        headers[shard] = _fetch_header(
            partial(source.read, shard), source.folder / shard, size_bytes=size_bytes
        )

    run_all(fetch, absent)
    return dict(sorted(headers.items()))
