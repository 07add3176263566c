"""A factory of split models: bottom, trunk and top, from a checkpoint's folder or a hub id."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.machine.size import parse_size
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_model import Implementation, is_quantised, read_causal_config
from minimax_tools.split.causal_part import ModelPart
from minimax_tools.split.components import SplitModel
from minimax_tools.split.part_folder import refuse_foreign
from minimax_tools.split.part_loading import Weights, first_dtype, load_part, load_parts_of_whole
from minimax_tools.split.parts import DeviceName, Part, Role, choose_devices, plan_parts
from minimax_tools.split.shard_loader import ShardLoader

if TYPE_CHECKING:
    from minimax_tools.split.causal_model import CausalConfig

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ModelFactory:
    """A factory of split models."""

    @staticmethod
    def create_split_models(
        model_type: str,
        model_name_or_path: str,
        split_point_1: int,
        split_point_2: int,
        device: DeviceName = "cpu",
        device_map: str | Mapping[str, DeviceName] | None = None,
        low_memory: bool = False,
        verbose: bool = False,
        storage_path: str | Path | None = None,
        auto_save: bool = False,
        *,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        experts_implementation: str | None = None,
        memory_budget: int | str | None = None,
    ) -> tuple[SplitModel, SplitModel, SplitModel]:
        """Load bottom, trunk and top of a model, ready for inference.

        Args:
            model_type: Architecture, which must be that of config.json.
            model_name_or_path: Folder or hub id of the checkpoint.
            split_point_1: First layer of trunk. Bottom has the embedding and the layers before it.
            split_point_2: First layer of top, which also has the final norm and the head.
            device: Device of all components.
            device_map: `auto` (see `auto_device_map`), or a device for each of bottom, trunk and top. It takes the
                place of `device`.
            low_memory: Load the components one after the other, each from its own shards, straight into its own
                memory. A model in one file is loaded whole.
            verbose: Report on stderr what is loaded, how fast, and the memory after each component.
            storage_path: Folder for `auto_save`, which makes the folders bottom, trunk and top in it.
            auto_save: Save each component as soon as it is loaded.
            dtype: Dtype of weights and activations. Default: that of the config, else of the checkpoint; BF16 for
                FP8.
            attn_implementation: Attention implementation of transformers. Default: transformers' choice.
            experts_implementation: Experts implementation of transformers. Default: transformers' choice.
            memory_budget: Limit on the process's anonymous memory, in bytes or as `12GB`.

        Raises:
            UsageError: An argument is wrong, or contradicts config.json.
            CheckpointError: The checkpoint is missing or damaged, contradicts config.json, or cannot be split.
            BackendError: A device is not on this machine.
            MemoryBudgetError: The next step would break the budget.
            MissingExtraError: transformers is missing.
        """
        require_golden_extra("a split model")
        request = _Request(
            model=str(model_name_or_path),
            devices=choose_devices(device, device_map, num_gpus=torch.cuda.device_count()),
            low_memory=low_memory,
            storage=_parse_storage(storage_path, auto_save=auto_save),
            budget=_parse_budget(memory_budget),
        )
        if dtype is not None and dtype not in _DTYPES:
            raise UsageError(f"dtype is {dtype}", expected="one of " + ", ".join(map(str, _DTYPES)))
        with narrating(verbose):
            config = _read_config(request.model, model_type)
            parts = plan_parts(split_point_1, split_point_2, num_hidden_layers=config.num_hidden_layers)
            weights = Weights.of(request.model)
            implementation = Implementation(
                dtype=dtype or _choose_dtype(config, weights),
                attn=attn_implementation,
                experts=experts_implementation,
            )
            loaded = _load(request, weights, config, parts, implementation)
            bottom, trunk, top = _finish(request, loaded)
        return bottom, trunk, top


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    model: str
    devices: Mapping[Role, torch.device]
    low_memory: bool
    storage: Path | None
    budget: MemoryBudget

    @property
    def folders(self) -> Mapping[Role, Path]:
        """Folder of each component; empty unless components are saved."""
        return {} if self.storage is None else {role: self.storage / str(role) for role in Role}


def _load(
    request: _Request,
    weights: Weights,
    config: CausalConfig,
    parts: tuple[Part, ...],
    implementation: Implementation,
) -> Iterator[ModelPart]:
    is_sharded = ShardLoader.is_sharded_model(request.model)
    # transformers would unpickle .bin files, which may run code.
    if weights.are_pickled or (request.low_memory and is_sharded):
        for part in parts:
            yield load_part(
                weights,
                config,
                part,
                implementation=implementation,
                device=request.devices[part.role],
                budget=request.budget,
            )
        return
    if request.low_memory:
        logger.info("The model is not sharded: it is loaded whole.")
    yield from load_parts_of_whole(
        weights,
        resolve_model(request.model),
        config,
        parts,
        implementation=implementation,
        devices=request.devices,
        budget=request.budget,
    )


def _finish(request: _Request, loaded: Iterator[ModelPart]) -> Iterator[SplitModel]:
    for folder in request.folders.values():
        refuse_foreign(folder)
    is_told = logger.isEnabledFor(logging.INFO)
    tracker = MemoryTracker()
    with tracker if is_told else contextlib.nullcontext():
        for one in loaded:
            component = SplitModel(one)
            del one
            tracker.snapshot(f"{component.part.role.capitalize()} loaded")
            logger.info("%s", tracker.report())
            if request.storage is not None:
                folder = request.folders[component.part.role]
                component.save(folder)
                logger.info("Saved %s to %s", component.part.role, folder)
            yield component
        logger.info("%s", tracker.summary())


def _read_config(model: str, model_type: str) -> CausalConfig:
    folder = resolve_config(model)
    config = read_causal_config(folder)
    if config.model_type != model_type:
        raise UsageError(
            f"model_type is {model_type!r}, but {folder / 'config.json'} says otherwise",
            expected=repr(config.model_type),
            found=repr(model_type),
            next_step="Give the model_type that config.json has.",
        )
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise CheckpointError(f"{folder / 'config.json'} does not say how many layers the model has")
    return config


def _choose_dtype(config: CausalConfig, weights: Weights) -> torch.dtype:
    """Choose the dtype as transformers does."""
    if is_quantised(config):
        return torch.bfloat16
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    with weights.open_first() as reader:
        return first_dtype(reader)


def _parse_storage(storage_path: str | Path | None, *, auto_save: bool) -> Path | None:
    if not auto_save:
        return None
    if storage_path is None:
        raise UsageError("auto_save needs storage_path", next_step="Give the folder to save to.")
    return Path(storage_path).expanduser()


def _parse_budget(memory_budget: int | str | None) -> MemoryBudget:
    try:
        size = parse_size(memory_budget) if isinstance(memory_budget, str) else memory_budget
        return MemoryBudget(size)
    except ValueError as error:
        raise UsageError(f"memory_budget is {memory_budget!r}", found=str(error)) from error


@contextlib.contextmanager
def narrating(verbose: bool) -> Iterator[None]:
    """Show the package's log messages on stderr in the block, unless a handler shows them already."""
    logger = logging.getLogger("minimax_tools")
    if not verbose or (logger.isEnabledFor(logging.INFO) and logger.hasHandlers()):
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    before = (logger.level, logger.propagate, list(logger.handlers))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    # A handler further up would show every line again.
    logger.propagate = False
    try:
        yield
    finally:
        logger.level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(before[0])
