"""transformers' causal language models of any architecture: their config, and the whole model loaded its own way.

`transformers` is imported inside the functions: this file imports on a host without it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from minimax_tools.checkpoint.fp8 import BLOCK_SIZE
from minimax_tools.errors import CheckpointError
from minimax_tools.split.binding import unfit_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    # For annotations where transformers is not imported.
    CausalConfig: TypeAlias = PreTrainedConfig
    CausalModel: TypeAlias = PreTrainedModel

# What reading a checkpoint's files can raise on its way through transformers.
_FAULTS = (OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What a model computes with; None stands for transformers' own choice.

    Args:
        dtype: Of weights and activations; a MiniMax-M2's router stays float32.
        attn: transformers' attention implementation.
        experts: transformers' experts implementation.
    """

    dtype: torch.dtype
    attn: str | None = None
    experts: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `from_config` and `from_pretrained`."""
        given = {"attn_implementation": self.attn, "experts_implementation": self.experts}
        return {"dtype": self.dtype, **{name: value for name, value in given.items() if value is not None}}


def read_causal_config(folder: Path) -> PreTrainedConfig:
    """transformers' config of a checkpoint's folder.

    Raises:
        CheckpointError: config.json is missing, or transformers does not know what it describes, or the weights
            are quantised in a way that mm2 does not undo.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except _FAULTS as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be used",
            found=f"{type(error).__name__}: {error}",
            next_step="Check the path; a model that needs code of its own repository is not run here.",
        ) from error
    method = _quantization(config).get("quant_method", "fp8")
    if method != "fp8":
        raise CheckpointError(
            f"the weights at {folder} are quantised",
            expected="BF16, FP16, float32, or FP8 in blocks",
            found=f"quant_method {method!r}",
            next_step="Use a copy that is not quantised, or one in FP8.",
        )
    return config


def make_causal_config(values: Mapping[str, Any], *, where: Path) -> PreTrainedConfig:
    """transformers' config with the values of a config.json that lies elsewhere.

    Args:
        values: The keys of config.json.
        where: What the source is called in messages.

    Raises:
        CheckpointError: transformers does not know what they describe.
    """
    from transformers import AutoConfig

    others = {name: value for name, value in values.items() if name != "model_type"}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(str(values.get("model_type")), **others)
    except _FAULTS as error:
        raise CheckpointError(
            f"the config in {where} cannot be used", found=f"{type(error).__name__}: {error}"
        ) from error
    return config


def is_quantised(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint's weights are FP8."""
    return bool(_quantization(config))


def load_whole(
    folder: Path, config: PreTrainedConfig, *, implementation: Implementation, show_progress: bool
) -> PreTrainedModel:
    """The whole model on the CPU as transformers loads it, FP8 dequantised.

    Args:
        folder: The checkpoint.
        config: Its config; it is not changed.
        implementation: What the model computes with.
        show_progress: Whether transformers' own progress bar appears.

    Raises:
        CheckpointError: transformers cannot load it, or would have to make up a weight, or leaves one over.
    """
    from transformers import AutoModelForCausalLM

    with _progress_bar(show_progress):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=copy.deepcopy(config),
                local_files_only=True,
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
    """On a GPU of capability 8.9 or more an FP8 checkpoint would otherwise run FP8 matmuls."""
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
    from transformers.utils import logging

    bars: Any = logging
    was_shown = bars.is_progress_bar_enabled()
    (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
    try:
        yield
    finally:
        (bars.enable_progress_bar if was_shown else bars.disable_progress_bar)()
