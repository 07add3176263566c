"""ModelPart: a part of transformers' causal language model, with stand-ins for the modules of other parts.

The model is built on the meta device and keeps transformers' forward, so its layers keep their numbers and compute as
in the whole model. Each build checks that only layers, embedding, norm and head change hidden states. An architecture
that passes this check can be split.
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
from minimax_tools.stored_dtype import StoredDtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Parameters by model_type that stay float32: the router, as the checkpoint stores it. transformers would round it.
_FLOAT32_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"minimax_m2": (r"\.mlp\.gate\.weight$", r"\.mlp\.e_score_correction_bias$")}
)
# Buffers that older checkpoints store and today's models compute.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A component as transformers' model. Parameters and persistent buffers are on the meta device until `take`."""

    model: PreTrainedModel
    names: ModuleNames  # tensor names of the whole model
    part: Part  # the component: bottom, trunk or top
    implementation: Implementation  # dtype and kernels

    def slots(self) -> dict[str, Slot]:
        """Return the parameters and persistent buffers that must be filled, by name."""
        return {
            name: Slot(name=name, shape=tuple(tensor.shape), dtype=StoredDtype.of(tensor.dtype))
            for name, tensor in self.model.state_dict(keep_vars=True).items()
        }

    def take(self, tensors: Mapping[str, torch.Tensor], *, device: torch.device) -> ModelPart:
        """Set the model's tensors, one for every slot, and compute non-persistent buffers on `device`; return self."""
        for name, tensor in tensors.items():
            module, leaf = _parent(self.model, name)
            setattr(module, leaf, tensor if leaf in module._buffers else nn.Parameter(tensor))
        compute_buffers(self.model, device)
        all_tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = [name for name, tensor in all_tensors if tensor.is_meta]
        assert not empty, f"no data for {empty[:3]}"
        return self


def build_part(config: PreTrainedConfig, part: Part, implementation: Implementation) -> ModelPart:
    """Build a component of the model that `config` describes, without data, for inference.

    Raises:
        CheckpointError: transformers has no such causal language model, or the model cannot be split because
            hidden states change outside its layers, embedding, norm and head.
    """
    model = _build_whole(config, implementation)
    _keep_float32(model, implementation.dtype)
    anatomy = Anatomy.of(model)
    # Names of the whole model: the next call puts stand-ins everywhere, and leaves them there.
    names = _module_names(model, anatomy.stack)
    # `before` and `after` name the modules that are called before and after the layers.
    before, after = anatomy.prove_divisible(implementation.dtype)
    own_modules = (before if part.has_embedding else ()) + (after if part.has_head else ())
    anatomy.put_back(part.layers, own_modules)
    if part.has_head:
        for name, module in anatomy.head.items():
            setattr(model, name, module)
    return ModelPart(model=model.eval(), names=names, part=part, implementation=implementation)


def _build_whole(config: PreTrainedConfig, implementation: Implementation) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    # FP8 weights are dequantised when they are read, so the model is built without quantisation.
    plain_config = copy.deepcopy(config)
    if hasattr(plain_config, "quantization_config"):
        del plain_config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(plain_config, **implementation.arguments())
    except Exception as error:
        # A config that fits no model fails in any class: AttributeError, ImportError, ZeroDivisionError.
        raise CheckpointError(
            f"transformers cannot build a causal language model of type {config.model_type!r}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    whole: PreTrainedModel = model.eval()
    return whole


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make parameters float32 that must not be rounded: those that transformers names, and the router.

    transformers keeps its strict list in float32 for BF16 and float16, and the other list for float16 alone.
    """
    patterns = list(_FLOAT32_NAMES.get(model.config.model_type, ()))
    if dtype in (torch.bfloat16, torch.float16):
        patterns += model._keep_in_fp32_modules_strict or ()
    if dtype == torch.float16:
        patterns += model._keep_in_fp32_modules or ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if any(re.search(pattern, name) for pattern in patterns):
            module, leaf = _parent(model, name)
            in_float32 = torch.empty_like(tensor, dtype=torch.float32)
            setattr(module, leaf, in_float32 if leaf in module._buffers else nn.Parameter(in_float32))


def _module_names(model: PreTrainedModel, stack: nn.ModuleList) -> ModuleNames:
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
    """Return the module that holds a parameter or buffer, and its name in that module."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
