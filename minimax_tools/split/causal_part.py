"""ModelPart: a part of transformers' causal language model, with stand-ins for the modules of other parts.

The model is built on the meta device and keeps transformers' forward, so its layers keep their numbers and compute as
in the whole model. Each build checks that only layers, embedding, norm and head change hidden states. An architecture
that passes this check can be split.

Anatomy of a causal language model: its layers, and the modules called before and after them.

To find them, the model runs with stand-ins for its layers and for all modules that hold tensors. Hidden states must
come out bit for bit as they went in. The order of the calls tells which modules come before the layers.

Stand-ins for the modules of a model that belong to other parts of a split model.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from minimax_tools.errors import CheckpointError
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


class PassThrough(nn.Module):
    """Stand-in for a layer of another part: returns its hidden states unchanged.

    Args:
        layer: The layer that is replaced.
        in_tuple: Whether the model's loop over layers expects each to return a tuple.
    """

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        # The model's loop over layers may read plain attributes, such as `attention_type`.
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Return `hidden_states` [B,S,H]."""
        return (hidden_states, None) if self._in_tuple else hidden_states


class AddsNothing(nn.Module):
    """Stand-in for an embedding of another part that is added to the hidden states, such as that of positions."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return -0.0: adding it changes no number, while adding +0.0 turns -0.0 into +0.0."""
        return torch.tensor(-0.0)


class Elsewhere(nn.Module):
    """Stand-in for a module of another part that is never called."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Raise RuntimeError."""
        raise RuntimeError("this module belongs to another part of the split model")


# Name of any layer in a list of calls.
_LAYER = "a layer"


class AroundLayers(NamedTuple):
    """Names of the modules that the decoder calls before its layers, and of those that it calls after them."""

    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Modules of a model by their place: layers, modules around the layers, head."""

    model: PreTrainedModel  # model that the modules belong to, built on the meta device
    decoder: nn.Module  # module that runs the layers
    stack: nn.ModuleList  # list of layers that the decoder iterates over; stand-ins are put into it
    layers: tuple[nn.Module, ...]  # the model's own layers
    # Other modules of the decoder that hold tensors or apply dropout, by name.
    around: Mapping[str, nn.Module]
    embedding: str  # name of the token embedding in `around`
    head: Mapping[str, nn.Module]  # modules that the model applies after its decoder, by name

    @classmethod
    def of(cls, model: PreTrainedModel) -> Anatomy:
        """Find the modules of a model, which stays as it is.

        Raises:
            CheckpointError: The decoder has no list of its layers, or no token embedding beside it.
        """
        decoder = model.get_decoder()
        children = dict(decoder.named_children())
        stacks = [
            child
            for child in children.values()
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
        ]
        if len(stacks) != 1:
            raise _indivisible(model, expected="one list of its layers", found=f"{len(stacks)} lists")
        around = {
            name: child
            for name, child in children.items()
            if child is not stacks[0] and (child.state_dict(keep_vars=True) or isinstance(child, nn.Dropout))
        }
        embeddings = [name for name, child in around.items() if child is model.get_input_embeddings()]
        if len(embeddings) != 1:
            raise _indivisible(model, expected="a token embedding beside its layers", found="none")
        head = {name: child for name, child in model.named_children() if child is not model.base_model}
        return cls(
            model=model,
            decoder=decoder,
            stack=stacks[0],
            layers=tuple(stacks[0]),
            around=around,
            embedding=embeddings[0],
            head=head,
        )

    def prove_divisible(self, dtype: torch.dtype) -> AroundLayers:
        """Put stand-ins everywhere, to stay, and check that hidden states come out bit for bit as they went in.

        Raises:
            CheckpointError: Hidden states change outside the layers, or another module is called between layers.
        """
        self._put_stand_ins(in_tuple=False)
        compute_buffers(self.model, torch.device("cpu"))
        try:
            return self._trace(dtype)
        except CheckpointError:
            # In some models a layer returns a tuple, so they fail with the first stand-ins.
            self._put_stand_ins(in_tuple=True)
            return self._trace(dtype)

    def put_back(self, layers: range, names: tuple[str, ...]) -> None:
        """Restore these layers, and the modules around the layers that have these names; not the head's."""
        for number in layers:
            self.stack[number] = self.layers[number]
        for name in names:
            setattr(self.decoder, name, self.around[name])

    def _put_stand_ins(self, *, in_tuple: bool) -> None:
        for number, layer in enumerate(self.layers):
            self.stack[number] = PassThrough(layer, in_tuple=in_tuple)
        for name, module in self.around.items():
            # Embeddings of positions are added to hidden states; norms and dropouts are applied to them.
            stand_in = AddsNothing() if isinstance(module, nn.Embedding) else nn.Identity()
            setattr(self.decoder, name, Elsewhere() if name == self.embedding else stand_in)
        for name in self.head:
            setattr(self.model, name, Elsewhere())

    def _trace(self, dtype: torch.dtype) -> AroundLayers:
        """Run the stand-ins on random hidden states, check the result, and sort the modules by their calls."""
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(2, 3, self.model.config.hidden_size, generator=generator).to(dtype)
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        with _recording_calls(self.decoder, self.stack) as calls:
            try:
                with torch.no_grad():
                    output = self.model.base_model(
                        inputs_embeds=states, attention_mask=mask, use_cache=False
                    ).last_hidden_state
            except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
                raise _indivisible(
                    self.model, expected="a forward over stand-ins", found=str(error)
                ) from error
        if not isinstance(output, torch.Tensor) or not torch.equal(output, states):
            raise _indivisible(
                self.model,
                expected="hidden states that change in its layers only",
                found="a change outside them",
            )
        return self._around_layers([name for name in calls if name == _LAYER or name in self.around])

    def _around_layers(self, calls: list[str]) -> AroundLayers:
        """Sort the modules by their calls, in which each layer is `_LAYER`; refuse other orders."""
        start = calls.index(_LAYER) if _LAYER in calls else len(calls)
        stop = start + len(self.layers)
        # The trace starts from hidden states, so the token embedding is not called.
        before, after = {self.embedding, *calls[:start]}, set(calls[stop:])
        strays = set(self.around) - before - after
        if calls[start:stop] != [_LAYER] * len(self.layers) or before & after or strays:
            raise _indivisible(
                self.model,
                expected="every module to be called before its layers or after them",
                found=", ".join(sorted(strays | before & after)) or "calls between layers",
            )
        return AroundLayers(tuple(sorted(before)), tuple(sorted(after)))


@contextlib.contextmanager
def _recording_calls(decoder: nn.Module, stack: nn.ModuleList) -> Iterator[list[str]]:
    """Record the names of the decoder's modules as it calls them in the block; a layer is `_LAYER`."""
    calls: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    watched = {name: child for name, child in decoder.named_children() if child is not stack}
    handles = [child.register_forward_hook(record(name)) for name, child in watched.items()]
    handles += [layer.register_forward_hook(record(_LAYER)) for layer in stack]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute a meta model's buffers that no checkpoint holds, such as rotary frequencies, and put them on `device`."""
    modules = {name.rpartition(".")[0] for name, buffer in model.named_non_persistent_buffers()}
    for name in modules:
        module = model.get_submodule(name)
        for leaf in module._non_persistent_buffers_set:
            buffer = module._buffers[leaf]
            if buffer is not None and buffer.is_meta:
                setattr(module, leaf, torch.empty_like(buffer, device=device))
                # transformers' own initialisation fills the buffer.
                with torch.no_grad():
                    model._init_weights(module)
        for leaf in module._non_persistent_buffers_set:
            buffer = module._buffers[leaf]
            if buffer is not None and buffer.device != device:
                setattr(module, leaf, buffer.to(device))


def _indivisible(model: PreTrainedModel, *, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{type(model).__name__} cannot be split",
        expected=expected,
        found=found,
        next_step="Proved to work: minimax_m2, llama, qwen2, qwen3, qwen3_moe, mixtral, gpt2.",
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
