"""A part of transformers' causal language model: some of its layers, with stand-ins for all other modules.

The model is built on the meta device and keeps its own forward. So its layers keep their numbers and compute as in the
whole model. Each build proves that only layers, embedding, norm and head change hidden states. Any architecture that
passes this proof can be split.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

from minimax_tools.errors import CheckpointError
from minimax_tools.split.anatomy import Anatomy, compute_buffers
from minimax_tools.split.causal_model import Implementation
from minimax_tools.split.module_names import ModuleNames, Slot
from minimax_tools.split.parts import Part

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The router stays float32, as the checkpoint stores it; transformers would round it.
_FLOAT32_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"minimax_m2": (r"\.mlp\.gate\.weight$", r"\.mlp\.e_score_correction_bias$")}
)
# Buffers that older checkpoints store and today's models compute.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A component as a model: parameters and buffers are on the meta device until `take`.

    Args:
        model: transformers' model, with stand-ins for the modules of other components.
        names: Relation of the model's names to a checkpoint's.
        part: Component that the model is.
        implementation: Dtype and kernels of the model.
    """

    model: PreTrainedModel
    names: ModuleNames
    part: Part
    implementation: Implementation

    def slots(self) -> dict[str, Slot]:
        """Return the parameters and persistent buffers that must be filled, by name."""
        return {
            name: Slot(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in self.model.state_dict(keep_vars=True).items()
        }

    def take(self, tensors: Mapping[str, torch.Tensor], *, device: torch.device) -> ModelPart:
        """Give the model its `tensors`, one for every slot; other buffers are computed on `device`."""
        for name, tensor in tensors.items():
            module, leaf = _parent(self.model, name)
            setattr(module, leaf, tensor if leaf in module._buffers else nn.Parameter(tensor))
        compute_buffers(self.model, device)
        all_tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = [name for name, tensor in all_tensors if tensor.is_meta]
        assert not empty, f"no data for {empty[:3]}"
        return self


def build_part(config: PreTrainedConfig, part: Part, implementation: Implementation) -> ModelPart:
    """Build a component of the model that `config` describes, without data, ready for inference.

    Args:
        config: transformers' config of the whole model; it is not changed.
        part: Component to build.
        implementation: Dtype and kernels of the component.

    Raises:
        CheckpointError: transformers has no such causal language model, or the model cannot be split because
            hidden states change outside its layers, embedding, norm and head.
    """
    model = _build_whole(config, implementation)
    _keep_float32(model, implementation.dtype)
    anatomy = Anatomy.of(model)
    names = _names(model, anatomy.stack)
    before, after = anatomy.prove_divisible(implementation.dtype)
    anatomy.put_back(
        part.layers, (*(before if part.has_embedding else ()), *(after if part.has_head else ()))
    )
    if part.has_head:
        for name, module in anatomy.head.items():
            setattr(model, name, module)
    return ModelPart(model=model.eval(), names=names, part=part, implementation=implementation)


def _build_whole(config: PreTrainedConfig, implementation: Implementation) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(config)
    # FP8 weights are dequantised when they are read.
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(plain, **implementation.arguments())
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"transformers cannot build a causal language model of type {config.model_type!r}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    whole: PreTrainedModel = model.eval()
    return whole


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make parameters float32 that must not be rounded: those that transformers names, and the router."""
    patterns = list(_FLOAT32_NAMES.get(model.config.model_type, ()))
    if dtype in (torch.bfloat16, torch.float16):
        patterns += model._keep_in_fp32_modules_strict or ()
    if dtype == torch.float16:
        patterns += model._keep_in_fp32_modules or ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(pattern, name) for pattern in patterns):
            module, leaf = _parent(model, name)
            exact = torch.empty_like(tensor, dtype=torch.float32)
            setattr(module, leaf, exact if leaf in module._buffers else nn.Parameter(exact))


def _names(model: PreTrainedModel, stack: nn.ModuleList) -> ModuleNames:
    tied = dict(model.all_tied_weights_keys)
    return ModuleNames(
        known=frozenset(model.state_dict()),
        prefix=model.base_model_prefix,
        layers=next(name for name, module in model.named_modules() if module is stack),
        # A checkpoint may hold either of two tied tensors.
        tied={**{source: target for target, source in tied.items()}, **tied},
        ignored=(*_COMPUTED, *sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
