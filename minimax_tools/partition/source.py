"""Source: the checkpoint that is divided, as far as it is known: its headers, or its config.json alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minimax_tools.checkpoint.architecture import ARCHITECTURES, Architecture
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.hub import CONFIG_FILE, is_on_hub, resolve_config, work_on_hub
from minimax_tools.checkpoint.hub_headers import read_hub_headers
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.ranges import NoRangesError
from minimax_tools.hub.snapshot import NotCachedError
from minimax_tools.partition.cost import TensorSize, expected_tensors
from minimax_tools.partition.stored_weights import StoredWeights, read_index
from minimax_tools.spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(StoredWeights):
    """A checkpoint to be divided.

    Args:
        config: The keys of its config.json.
        architecture: How its tensors are named.
        entries: Every tensor by name, where all headers are known, of shards here or on the hub; else None.
    """

    config: Mapping[str, Any] = field(repr=False)
    architecture: Architecture
    entries: Mapping[str, TensorEntry] | None = field(repr=False)

    @property
    def tensors(self) -> tuple[TensorEntry, ...] | tuple[TensorSize, ...]:
        """All its tensors; from config.json alone where not all headers are known."""
        if self.entries is not None:
            return tuple(self.entries.values())
        return tuple(expected_tensors(ModelSpec.from_config(self.config)))


def open_source(model: str, *, headers: bool = False, access: HubAccess | None = None) -> Source:
    """The checkpoint in a folder or on the hub; of a hub's model only the description is fetched.

    Shards may be missing: what is not here is told by config.json alone, for MiniMax-M2 only.

    Args:
        model: A folder or a hub id.
        headers: Whether the headers of shards that only the hub has are fetched too, by byte ranges. Where the
            server has none, or the hub is not to be asked, `entries` is None; a network that fails is an error.
        access: The hub; None for the one that the environment names.

    Raises:
        CheckpointError: There is no such checkpoint, its files contradict each other, or the hub does not answer.
        UsageError: Its tensors' names are not known by heart, and transformers does not know the model either.
    """
    folder = resolve_config(model, access=access)
    config = _read_config(folder)
    index = read_index(folder)
    entries = index.entries if index is not None and not index.absent else None
    if entries is None and headers and is_on_hub(model):
        entries = _read_hub_entries(model, access)
    if entries is None and index is not None:
        num_absent = len(set(index.absent.values()))
        logger.info("%d shards of %s are not here: their tensors are not known.", num_absent, model)
    return Source(
        model=model,
        folder=folder,
        config=config,
        architecture=_architecture(folder, config),
        index=index,
        entries=entries,
    )


def _read_hub_entries(model: str, access: HubAccess | None) -> Mapping[str, TensorEntry] | None:
    try:
        return work_on_hub(model, read_hub_headers, access=access)
    except (NoRangesError, NotCachedError) as error:
        logger.info("The tensors of %s are told from config.json alone: %s", model, error)
        return None


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path} names no model_type", next_step="Fetch the file again.")
    return config


def _architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    if config["model_type"] not in ARCHITECTURES:
        # Needs transformers; the seven families by heart do not.
        from minimax_tools.reference.module_tree import read_architecture

        return read_architecture(folder)
    num_layers = config.get("num_hidden_layers") or config.get("n_layer")
    return replace(Architecture.of(config["model_type"]), num_layers=num_layers)
