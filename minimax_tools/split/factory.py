"""ModelFactory: bottom, trunk and top of a model, loaded from a checkpoint's folder or a hub id."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.machine.size import parse_size
from minimax_tools.reference.modules import require_golden_extra
from minimax_tools.split.causal_part import Division, Implementation, ModelPart, read_causal_config
from minimax_tools.split.components import SplitModel
from minimax_tools.split.part_folder import refuse_foreign
from minimax_tools.split.part_loading import StoredModel
from minimax_tools.split.parts import DeviceName, Role, choose_devices, plan_parts

if TYPE_CHECKING:
    from minimax_tools.split.causal_part import CausalConfig

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
            device_map: `auto` (GPUs go to trunk and top first), or a device for each of bottom, trunk and top. `device`
                is then ignored.
            low_memory: Taken for callers of SplitLearn, and always done: components are loaded one after the other,
                each from its own shards.
            verbose: Report on stderr what is loaded, how fast, and the memory after each component; in a terminal with
                a bar while a component loads.
            storage_path: Folder for `auto_save`, which makes the folders bottom, trunk and top in it; else ignored.
            auto_save: Save each component as soon as it is loaded.
            dtype: Dtype of weights and activations. Default: that of the config, else of the checkpoint; BF16 for
                FP8.
            attn_implementation: Attention implementation of transformers. Default: transformers' choice.
            experts_implementation: Experts implementation of transformers. Default: transformers' choice.
            memory_budget: Limit on the process's anonymous memory, in bytes or as `12GB`.

        Raises:
            UsageError: An argument is wrong, or contradicts config.json, or a folder in `storage_path` holds something
                else.
            CheckpointError: The checkpoint is missing or damaged, contradicts config.json, cannot be split, or a
                component cannot be saved.
            BackendError: A device is not on this machine.
            MemoryBudgetError: The next step would break the budget.
            MissingExtraError: transformers is missing.
        """
        require_golden_extra("a split model")
        devices = choose_devices(device, device_map, num_gpus=torch.cuda.device_count())
        storage = _parse_storage(storage_path, auto_save=auto_save)
        budget = _parse_budget(memory_budget)
        if dtype is not None and dtype not in _DTYPES:
            raise UsageError(f"dtype is {dtype}", expected="one of " + ", ".join(map(str, _DTYPES)))
        with logging_to_stderr(verbose):
            config = _read_config(str(model_name_or_path), model_type)
            parts = plan_parts(split_point_1, split_point_2, num_hidden_layers=config.num_hidden_layers)
            stored = StoredModel.of(str(model_name_or_path), model_type, num_layers=config.num_hidden_layers)
            implementation = Implementation(
                dtype=dtype or _choose_dtype(config, stored),
                attn=attn_implementation,
                experts=experts_implementation,
            )
            division = Division.of(config, implementation)
            loaded = (stored.load(division, part, device=devices[part.role], budget=budget) for part in parts)
            bottom, trunk, top = _finish(loaded, storage)
        return bottom, trunk, top


def _finish(loaded: Iterator[ModelPart], storage: Path | None) -> Iterator[SplitModel]:
    """Yield each component once it is loaded and, if there is a folder for them, saved."""
    if storage is not None:
        for role in Role:
            refuse_foreign(storage / str(role))
    tracker = MemoryTracker()
    # Memory is tracked only if it is reported.
    with tracker if logger.isEnabledFor(logging.INFO) else contextlib.nullcontext():
        for model_part in loaded:
            # Saving frees no memory: the caller gets all three components.
            component = SplitModel(model_part)
            role = component.part.role
            tracker.snapshot(f"{role.capitalize()} loaded")
            logger.info("%s", tracker.report_text)
            if storage is not None:
                component.save(storage / str(role))
                logger.info("Saved %s to %s", role, storage / str(role))
            yield component
        logger.info("%s", tracker.summary_text)


def _read_config(model: str, model_type: str) -> CausalConfig:
    folder = resolve_config(model)
    config = read_causal_config(folder)
    if model_type not in (config.model_type, config.model_type.removesuffix("_text")):
        raise UsageError(
            f"model_type is {model_type!r}, but {folder / 'config.json'} says otherwise",
            expected=repr(config.model_type),
            found=repr(model_type),
            next_step="Give the model_type that config.json has.",
        )
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise CheckpointError(f"{folder / 'config.json'} does not say how many layers the model has")
    return config


def _choose_dtype(config: CausalConfig, stored: StoredModel) -> torch.dtype:
    """Choose the dtype as transformers does: that of the config, else of the first weight; BF16 for FP8."""
    if getattr(config, "quantization_config", None):
        return torch.bfloat16
    dtype = config.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) else stored.first_dtype()


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
def logging_to_stderr(verbose: bool) -> Iterator[None]:
    """Write the package's log messages to stderr in the block, if `verbose`, unless it logs INFO to a handler already.

    The package's own handlers get nothing meanwhile.
    """
    package_logger = logging.getLogger("minimax_tools")
    if not verbose or (package_logger.isEnabledFor(logging.INFO) and package_logger.hasHandlers()):
        yield
        return
    level, propagate, handlers = package_logger.level, package_logger.propagate, list(package_logger.handlers)
    package_logger.handlers[:] = [logging.StreamHandler(sys.stderr)]
    package_logger.setLevel(logging.INFO)
    # A handler further up would show every line again.
    package_logger.propagate = False
    try:
        yield
    finally:
        package_logger.setLevel(level)
        package_logger.propagate, package_logger.handlers[:] = propagate, handlers
