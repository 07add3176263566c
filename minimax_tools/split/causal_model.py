"""Configs of transformers' causal language models, and the whole model as transformers loads it.

`transformers` is imported inside the functions, because a host may lack it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.model.family import MODEL_TYPE, find_graph_faults, refuse_faults
from minimax_tools.model.quantisation import (
    BLOCK_SIZE,
    find_other_format,
    find_quantisation_faults,
    refuse_side_format,
)
from minimax_tools.model.spec import CONFIG_FILE, read_config_file
from minimax_tools.split.binding import unfit_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    # For annotations in modules that do not import transformers.
    CausalConfig: TypeAlias = PreTrainedConfig

_QUANTISED_STEP = "Use a copy that is not quantised, or one in FP8."
# Errors that transformers raises on damaged or unknown weights. A damaged config can raise any class.
_FAULTS = (OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Dtype and kernels of a model; None means transformers' choice."""

    dtype: torch.dtype  # dtype of weights and activations; the router of a MiniMax-M2 stays float32
    attn: str | None = None  # attention implementation of transformers
    experts: str | None = None  # experts implementation of transformers

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for transformers' `from_config` and `from_pretrained`."""
        given = {"attn_implementation": self.attn, "experts_implementation": self.experts}
        return {"dtype": self.dtype, **{name: value for name, value in given.items() if value is not None}}


def read_causal_config(folder: Path) -> PreTrainedConfig:
    """Read the config of a checkpoint's folder with transformers.

    Raises:
        CheckpointError: config.json is missing, transformers does not know the model, or the weights are quantised
            in a way that mm2 cannot dequantise.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be used",
            found=f"{type(error).__name__}: {error}",
            next_step="Check the path. Models that need code from their repository are not run.",
        ) from error
    _refuse_unread(folder)
    return config


def _refuse_unread(folder: Path) -> None:
    """Raise UnsupportedModelError if a config.json names a format or a graph that would be read wrongly, unnoticed.

    transformers computes every kind of RoPE, but ignores the keys of other graphs than MiniMax-M2's.
    """
    path = folder / CONFIG_FILE
    values = read_config_file(path)
    if values.get("model_type") == MODEL_TYPE:
        refuse_faults([*find_graph_faults(values), *find_quantisation_faults(values)], where=path)
    other = find_other_format(values)
    if other is not None:
        refuse_faults([replace(other, next_step=_QUANTISED_STEP)], where=path)
    refuse_side_format(folder, values)


def make_causal_config(values: Mapping[str, Any], *, where: Path) -> PreTrainedConfig:
    """Make transformers' config from the values of a config.json; errors name their source `where`.

    Raises:
        CheckpointError: transformers does not know the model.
    """
    from transformers import AutoConfig

    others = {name: value for name, value in values.items() if name != "model_type"}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(str(values.get("model_type")), **others)
    except Exception as error:
        raise CheckpointError(
            f"the config in {where} cannot be used", found=f"{type(error).__name__}: {error}"
        ) from error
    return config


def is_quantised(config: PreTrainedConfig) -> bool:
    """Decide whether the checkpoint's weights are FP8."""
    return bool(_quantization(config))


def load_whole(
    folder: Path, config: PreTrainedConfig, *, implementation: Implementation, show_progress: bool
) -> PreTrainedModel:
    """Load the whole model on the CPU with transformers, FP8 dequantised, with its progress bar if asked for.

    Raises:
        CheckpointError: transformers cannot load the model, or a weight is missing or left over.
    """
    from transformers import AutoModelForCausalLM

    with _progress_bar(show_progress):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=copy.deepcopy(config),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **implementation.arguments(),
                **_dequantising(config),
            )
        except _FAULTS as error:
            raise CheckpointError(
                f"transformers cannot load {folder}", found=f"{type(error).__name__}: {error}"
            ) from error
    model, info = loaded
    faults = [f"{name}: found nothing" for name in sorted(info["missing_keys"])]
    faults += [f"{name}: the model has no place for it" for name in sorted(info["unexpected_keys"])]
    if faults:
        raise unfit_checkpoint(folder, faults)
    whole: PreTrainedModel = model.eval()
    return whole


def _quantization(config: PreTrainedConfig) -> dict[str, Any]:
    stored = getattr(config, "quantization_config", None) or {}
    values: dict[str, Any] = stored if isinstance(stored, dict) else stored.to_dict()
    return values


def _dequantising(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the argument that dequantises FP8. Without it, GPUs of capability 8.9 or more run FP8 matmuls."""
    stored = _quantization(config)
    if not stored:
        return {}
    from transformers import FineGrainedFP8Config

    return {
        "quantization_config": FineGrainedFP8Config(
            dequantize=True,
            weight_block_size=tuple(stored.get("weight_block_size") or (BLOCK_SIZE, BLOCK_SIZE)),
            modules_to_not_convert=stored.get("modules_to_not_convert"),
        )
    }


@contextlib.contextmanager
def _progress_bar(shown: bool) -> Iterator[None]:
    """Show or hide transformers' progress bars in the block."""
    from transformers.utils import logging

    def show(is_shown: bool) -> None:
        (bars.enable_progress_bar if is_shown else bars.disable_progress_bar)()

    # transformers' module has no types.
    bars: Any = logging
    was_shown = bars.is_progress_bar_enabled()
    show(shown)
    try:
        yield
    finally:
        show(was_shown)
