"""Configs of transformers' causal language models. A host may lack transformers, so functions import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.model.family import MODEL_TYPE, find_graph_faults, refuse_faults
from minimax_tools.model.quantisation import find_other_format, find_quantisation_faults, refuse_side_format
from minimax_tools.model.spec import CONFIG_FILE, read_config_file

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    # For annotations in modules that do not import transformers.
    CausalConfig: TypeAlias = PreTrainedConfig

_QUANTISED_STEP = "Use a copy that is not quantised, or one in FP8."


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
            f"{folder / CONFIG_FILE} cannot be used",
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
