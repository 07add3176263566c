"""A part of transformers' own causal language model: some of its layers, with stand-ins for all else.

The model is built on the meta device from its config and keeps its own forward, so its layers keep their numbers
and compute as in the whole model. That nothing outside layers, embedding, norm and head changes hidden states is
proved each time a part is built; so any architecture that passes the proof can be taken apart.
Shapes: B batch, S sequence, H hidden
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

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# The router decides in float32, as the checkpoint stores it; transformers alone would round it.
_FLOAT32_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"minimax_m2": (r"\.mlp\.gate\.weight$", r"\.mlp\.e_score_correction_bias$")}
)
# Buffers that older checkpoints carry and today's models compute.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """Some layers of a causal language model; parameters and buffers are on the meta device until `take`.

    Args:
        model: transformers' model, stand-ins where another part computes.
        names: How its names relate to a checkpoint's.
    """

    model: PreTrainedModel
    names: ModuleNames

    def slots(self) -> dict[str, Slot]:
        """What must be filled, by name: parameters and persistent buffers."""
        return {
            name: Slot(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in self.model.state_dict(keep_vars=True).items()
        }

    def take(self, tensors: Mapping[str, torch.Tensor], *, device: torch.device) -> PreTrainedModel:
        """The model with `tensors`, which must fill every slot, as its own; all else is computed on `device`."""
        for name, tensor in tensors.items():
            module, leaf = _parent(self.model, name)
            setattr(module, leaf, tensor if leaf in module._buffers else nn.Parameter(tensor))
        compute_buffers(self.model, device)
        all_tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = [name for name, tensor in all_tensors if tensor.is_meta]
        assert not empty, f"no data for {empty[:3]}"
        return self.model


def build_part(
    config: PreTrainedConfig,
    *,
    layers: range,
    with_embedding: bool,
    with_head: bool,
    implementation: Implementation,
) -> ModelPart:
    """A part of the model that `config` describes, without data, ready for inference.

    Args:
        config: transformers' config of the whole model; it is not changed.
        layers: The decoder layers that belong to the part.
        with_embedding: Whether what comes before the layers belongs to it.
        with_head: Whether final norm and lm_head belong to it.
        implementation: What it computes with.

    Raises:
        CheckpointError: transformers has no such causal language model, or hidden states change outside its
            layers, embedding, norm and head, so that it cannot be taken apart.
    """
    model = _build_whole(config, implementation)
    _keep_float32(model, implementation.dtype)
    anatomy = Anatomy.of(model)
    names = _names(model, anatomy.stack)
    before, after = anatomy.prove_divisible(implementation.dtype)
    anatomy.put_back(layers, (*(before if with_embedding else ()), *(after if with_head else ())))
    if with_head:
        for name, module in anatomy.head.items():
            setattr(model, name, module)
    return ModelPart(model=model.eval(), names=names)


def _build_whole(config: PreTrainedConfig, implementation: Implementation) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    own = copy.deepcopy(config)
    # What the part holds is dequantised.
    if hasattr(own, "quantization_config"):
        del own.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own, **implementation.arguments())
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"transformers cannot build a causal language model of type {config.model_type!r}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    whole: PreTrainedModel = model.eval()
    return whole


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give those parameters float32 that must not be rounded, as transformers does where it knows of them."""
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
        # A checkpoint may hold either of the two.
        tied={**{source: target for target, source in tied.items()}, **tied},
        ignored=(*_COMPUTED, *sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
