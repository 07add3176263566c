"""Streaming: transformers' own model run with the weights of one layer in memory, whatever the model's size.

The model stands whole, but on the meta device. Right before a part of it runs, its weights are read and bound to
it, and afterwards it is bare again; so transformers' forward, its layers and its experts compute just as they do
on a model that was loaded, and nothing of them is written a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.model.footprint import Footprint
from gpu_reference.model.model import GoldenModelRequest, build_golden_model
from gpu_reference.model.model_checks import (
    PROVED_NAMES,
    prove_float32_router,
    prove_weights,
    proved_expert_names,
)
from gpu_reference.streaming.once_reader import OnceReader
from minimax_tools.checkpoint.layer_loader import LayerLoader
from minimax_tools.checkpoint.layer_storage import (
    PACKED_DTYPE,
    GroupedStorage,
    LayerStorage,
    PackedStorage,
)
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import MemoryBudget, give_back_freed_pages
from minimax_tools.model.weight_names import (
    EMBEDDING,
    EXPERTS,
    FINAL_NORM,
    expected_layer_shapes,
    head_name,
    layer_prefix,
)
from minimax_tools.partition.plan import Slice

if TYPE_CHECKING:
    from transformers import MiniMaxM2ForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How to stream.

    Args:
        device: Where the layers run.
        prefetch: Whether the next layer is read while one runs; two layers are in memory then.
        packed: Whether experts stay FP8 and are dequantised one by one when they are used.
        part: The slice of the model that runs here, read whole; None for all of the model.
        holds_part: Whether all layers of the slice are read before they run, and stay.
    """

    device: torch.device
    prefetch: bool = True
    packed: bool = False
    part: Slice | None = None
    holds_part: bool = False


@contextmanager
def open_streamed_model(
    request: GoldenModelRequest,
    reader: OnceReader,
    streaming: Streaming,
    *,
    footprint: Footprint,
    budget: MemoryBudget,
) -> Iterator[StreamedModel]:
    """Stand up the golden model without its weights.

    Args:
        request: The model.
        reader: Its checkpoint.
        streaming: How to stream.
        footprint: What the golden takes.
        budget: What it may take; whoever would break it is stopped before.

    Raises:
        MissingExtraError: transformers or accelerate is missing, or too old to know MiniMax-M2.
        UsageError: Packed experts were asked for, which this checkpoint or implementation does not have.
        MemoryBudgetError: The budget does not allow the layers that are in memory at once.
    """
    if streaming.packed:
        _refuse_unpackable(request, reader)
    limits = StreamingLimits(footprint=footprint, budget=budget, is_on_host=streaming.device.type == "cpu")
    model = build_golden_model(request, device=streaming.device)
    # What is known to come is told before anything is read.
    if streaming.holds_part and streaming.part is not None:
        held = footprint.held_bytes(streaming.part.stage, packed=streaming.packed)
        limits.allow(held + footprint.activation_bytes, "holding a slice")
    else:
        weights = footprint.streamed_bytes(prefetch=streaming.prefetch, packed=streaming.packed)
        limits.allow(weights + footprint.activation_bytes, "streaming " + _word_layers(streaming))
    if streaming.part is None or streaming.part.stage.has_head:
        limits.allow(footprint.vocabulary_bytes + footprint.logits_bytes, "the lm_head and its logits")
    new_storage = partial(_new_storage, request, streaming, limits)
    with LayerLoader(reader, new_storage, prefetch=streaming.prefetch) as loader:
        streamed = StreamedModel(request, model, reader, loader, streaming=streaming, limits=limits)
        with streamed.attached():
            yield streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLimits:
    """Stops a stream before it takes more than it may.

    Args:
        footprint: What the golden takes.
        budget: What it may take.
        is_on_host: Whether weights and activations count: those on a GPU do not.
    """

    footprint: Footprint
    budget: MemoryBudget
    is_on_host: bool

    def allow(self, num_bytes: int, purpose: str) -> None:
        """Pass, or raise.

        Raises:
            MemoryBudgetError: The budget would be broken.
        """
        if self.is_on_host:
            self.budget.require(num_bytes, purpose)


class StreamedModel:
    """The standing model and what feeds it; its weights are given as `GoldenWeights`."""

    def __init__(
        self,
        request: GoldenModelRequest,
        model: MiniMaxM2ForCausalLM,
        reader: OnceReader,
        loader: LayerLoader,
        *,
        streaming: Streaming,
        limits: StreamingLimits,
    ) -> None:
        self.model = model
        self._request = request
        self._reader = reader
        self._loader = loader
        self._streaming = streaming
        self._limits = limits
        self._held: dict[int, LayerStorage] = {}
        self._running: int | None = None
        self._is_proved = False

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """The weights of the layer that ran last, or of one that is held."""
        if layer in self._held:
            return self._held[layer].weights
        assert layer == self._running, f"layer {layer} is not in memory: {self._running} is"
        return self._loader.current.weights

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Final norm and lm_head: they stay bound after the forward pass."""
        norm, lm_head = (self.model.get_submodule(name) for name in ("model.norm", "lm_head"))
        return norm.get_parameter("weight"), lm_head.get_parameter("weight")

    def hold(self, layers: range, *, with_head: bool) -> None:
        """Read layers that are going to run, and keep them; with the final norm and the lm_head, where wanted.

        Raises:
            CheckpointError: A tensor cannot be read.
        """
        if layers:
            self._expect_proof(layers[0], self._names_of_whole_proof())
        for layer in layers:
            self._loader.load(layer, then=layer + 1 if layer + 1 in layers else None)
            self._held[layer] = self._loader.keep_current()
        if with_head:
            self._fetch_norm(self.model.get_submodule("model.norm"), None)
            self._bind_weight(self.model.get_submodule("lm_head"), head_name(self._request.spec))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model's parts fetch their weights while the block lasts."""
        with ExitStack() as stack:
            embedding, norm = (
                self.model.get_submodule(name) for name in ("model.embed_tokens", "model.norm")
            )
            stack.callback(embedding.register_forward_pre_hook(self._fetch_embedding).remove)
            stack.callback(embedding.register_forward_hook(_strip).remove)
            for number, layer in enumerate(self._layers()):
                fetch = partial(self._fetch_layer, number)
                stack.callback(layer.register_forward_pre_hook(fetch).remove)
                stack.callback(layer.register_forward_hook(_strip).remove)
                experts = layer.get_submodule("mlp.experts")
                fetch_experts = partial(self._fetch_experts, number, layer)
                stack.callback(experts.register_forward_pre_hook(fetch_experts).remove)
            stack.callback(norm.register_forward_pre_hook(self._fetch_norm).remove)
            head = self.model.get_submodule("lm_head")
            stack.callback(head.register_forward_pre_hook(self._fetch_head).remove)
            yield

    def _layers(self) -> Iterator[torch.nn.Module]:
        return self.model.get_submodule("model.layers").children()

    def _fetch_embedding(self, module: torch.nn.Module, _: Any) -> None:
        # A new pass begins: the last one's head goes before more comes.
        if not self._streaming.holds_part:
            for name in ("model.norm", "lm_head"):
                _strip(self.model.get_submodule(name))
        self._limits.allow(self._limits.footprint.vocabulary_bytes, "the embedding")
        self._bind_weight(module, EMBEDDING)

    def _fetch_layer(self, number: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # What the layer before left is in pieces that nothing large fits into: kept, they would add up.
        give_back_freed_pages()
        if number in self._held:
            storage = self._held[number]
        elif self._reads_routed_only(inputs[0]):
            self._expect_proof(number, PROVED_NAMES)
            storage = self._loader.load_without_experts(number)
        else:
            self._expect_proof(number, self._names_of_whole_proof())
            following = number + 1
            storage = self._loader.load(
                number, then=following if following < self._request.num_hidden_layers else None
            )
        self._running = number
        self._limits.allow(self._limits.footprint.activation_bytes, f"what layer {number} computes")
        _bind(module, storage)
        if not self._is_proved and not self._reads_routed_only(inputs[0]):
            self._prove(module, number, experts=None)

    def _fetch_experts(
        self, number: int, layer: torch.nn.Module, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        hidden_states, top_k_index = inputs[0], inputs[1]
        if self._reads_routed_only(hidden_states):
            experts = tuple(top_k_index.unique().tolist())
            self._expect_proof(number, proved_expert_names(experts))
            self._loader.load_experts(experts)
            if not self._is_proved:
                self._prove(layer, number, experts=experts)

    def _reads_routed_only(self, hidden_states: torch.Tensor) -> bool:
        """Whether so few tokens run that most experts would be read for nothing."""
        if self._streaming.part is not None:
            return False
        spec = self._request.spec
        num_tokens = hidden_states.numel() // spec.hidden_size
        return num_tokens * spec.num_experts_per_tok < spec.num_local_experts

    def _fetch_norm(self, module: torch.nn.Module, _: Any) -> None:
        self._bind_weight(module, FINAL_NORM)

    def _fetch_head(self, module: torch.nn.Module, _: Any) -> None:
        if not module.get_parameter("weight").is_meta:
            return
        self._loader.release()
        self._running = None
        footprint = self._limits.footprint
        self._limits.allow(footprint.vocabulary_bytes + footprint.logits_bytes, "the lm_head and its logits")
        self._bind_weight(module, head_name(self._request.spec))

    def _bind_weight(self, module: torch.nn.Module, name: str) -> None:
        if module.get_parameter("weight").is_meta:
            weight = self._reader.read_weight(name, self._request.dtype).to(self._streaming.device)
            _set(module, "weight", weight)

    def _names_of_whole_proof(self) -> tuple[str, ...]:
        return (*PROVED_NAMES, *proved_expert_names(range(self._request.spec.num_local_experts)))

    def _expect_proof(self, layer: int, names: Iterable[str]) -> None:
        """Have what `_prove` compares read once, for the layer and for the proof."""
        if not self._is_proved:
            self._reader.expect_again(layer_prefix(layer) + name for name in names)

    def _prove(self, module: torch.nn.Module, number: int, *, experts: tuple[int, ...] | None) -> None:
        """The first layer against the checkpoint; all others are read in the same way."""
        tensors = LayerTensors.open(self._reader, self._request.spec, number, self._request.dtype)
        prove_float32_router(module, tensors, number)
        prove_weights(module, tensors, number, experts=experts)
        self._is_proved = True


def _new_storage(request: GoldenModelRequest, streaming: Streaming, limits: StreamingLimits) -> LayerStorage:
    footprint = limits.footprint
    limits.allow(
        footprint.packed_layer_bytes if streaming.packed else footprint.layer_bytes,
        "the weights of one layer",
    )
    kind = PackedStorage if streaming.packed else GroupedStorage
    storage = kind(request.spec, dtype=request.dtype, device=streaming.device)
    if limits.is_on_host and limits.budget.limit_bytes is not None:
        # Only memory that was written to shows: what is asked for next must find it taken.
        for place in storage.places.values():
            place.zero_()
    return storage


def _bind(layer: torch.nn.Module, storage: LayerStorage) -> None:
    for name, tensor in storage.modules.items():
        path, _, leaf = name.rpartition(".")
        _set(layer.get_submodule(path), leaf, tensor)


def _set(module: torch.nn.Module, name: str, value: Any) -> None:
    """Put a weight where the module looks for it, past the checks that keep parameters parameters."""
    if name in module._buffers:
        module._buffers[name] = value
        return
    if isinstance(value, torch.Tensor):
        module.__dict__.pop(name, None)
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    else:
        # Found before the parameter, which stays on the meta device.
        module.__dict__[name] = value


def _strip(module: torch.nn.Module, *_: Any) -> None:
    """Take every weight off a module and what it is made of."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                bare = torch.empty_like(parameter, device="meta")
                part._parameters[name] = torch.nn.Parameter(bare, requires_grad=False)
            part.__dict__.pop(name, None)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device="meta")


def _word_layers(streaming: Streaming) -> str:
    return "two layers at a time" if streaming.prefetch else "one layer at a time"


def _refuse_unpackable(request: GoldenModelRequest, reader: CheckpointReader) -> None:
    if request.experts_implementation != "eager":
        raise UsageError(
            "packed experts need transformers' eager implementation, which takes them one by one",
            found=request.experts_implementation,
            next_step="Add --experts-implementation eager.",
        )
    if "quantization_config" not in request.spec.raw:
        raise UsageError(
            "packed experts need an FP8 checkpoint",
            found="one without a quantization_config",
            next_step="Leave --packed-experts out.",
        )
    experts = [name for name in expected_layer_shapes(request.spec) if EXPERTS in name]
    for layer in range(request.num_hidden_layers):
        for name in experts:
            entry = reader.index[layer_prefix(layer) + name]
            if entry.dtype != PACKED_DTYPE:
                raise UsageError(
                    f"packed experts need every expert in FP8, and {entry.name} is not",
                    found=str(entry.dtype),
                    next_step="Leave --packed-experts out.",
                )
