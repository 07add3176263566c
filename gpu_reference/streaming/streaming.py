"""transformers' own model run with one layer's weights in memory, whatever the model's size.

The whole model is on the meta device. Just before a module (embedding, layer, norm or head) runs, its weights are read
and bound to it; afterwards they are removed. The first layer that runs is compared with the checkpoint.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.model.footprint import Footprint
from gpu_reference.model.model import GoldenModelRequest, build_golden_model
from gpu_reference.model.model_checks import (
    prove_float32_router,
    prove_weights,
    proved_expert_names,
    proved_names,
)
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_loader import (
    PACKED_DTYPE,
    LayerLoader,
    LayerStorage,
    grouped_storage,
    packed_storage,
)
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import UsageError
from minimax_tools.machine.memory import MemoryBudget, give_back_freed_pages
from minimax_tools.model.graph import LayerGraph
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
    from transformers import PreTrainedModel


class OnceReader(CheckpointReader):
    """A checkpoint reader that keeps announced tensors in memory until they are read again.

    A golden needs some tensors twice: norms and router for the model's fingerprint, and the first layer for its proof.
    `expect_again` announces them. The first read then keeps the tensor's bytes, and the second takes them from memory.
    Parts of a tensor are read from its file each time.
    """

    def __init__(self, folder: Path, *, index: TensorIndex) -> None:
        super().__init__(folder, index=index)
        # Reads still to come of each announced tensor, and the bytes of those that were read once.
        self._repeats: Counter[str] = Counter()
        self._kept: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, int] = {}
        self._bytes_read: Counter[str] = Counter()
        # Threads that prefetch layers read at the same time.
        self._keeping = threading.Lock()

    @property
    def sizes_read(self) -> Mapping[str, int]:
        """Size in bytes of every tensor that was read, by name; each counts once."""
        return dict(self._sizes)

    @property
    def bytes_read_by_name(self) -> Mapping[str, int]:
        """Bytes read from the files, by tensor name; a tensor read twice counts twice."""
        return dict(self._bytes_read)

    def expect_again(self, names: Iterable[str]) -> None:
        """Announce, before they are read, tensors that will be read once more.

        A tensor that is announced and not read again stays in memory to the end.
        """
        with self._keeping:
            self._repeats.update(name for name in names if name in self.index)

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        whole = self.index[entry.name]
        with self._keeping:
            kept = self._kept.get(entry.name) if entry == whole else None
            if kept is not None:
                self._repeats[entry.name] -= 1
                if not self._repeats[entry.name]:
                    del self._kept[entry.name]
        if kept is not None:
            out.view(-1).view(torch.uint8).copy_(kept)
            return
        super()._fill(entry, out)
        with self._keeping:
            self._sizes[entry.name] = whole.size_bytes
            self._bytes_read[entry.name] += entry.size_bytes
            if self._repeats[entry.name] and entry == whole:
                self._kept[entry.name] = out.view(-1).view(torch.uint8).clone()


# Number of token ids up to which the embedding's rows are read one by one, and not as a whole.
_FEW_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """A way to stream."""

    device: torch.device  # device that runs the layers
    prefetch: bool = True  # whether to read the next layer while one runs; two layers are then in memory
    packed: bool = False  # whether to keep experts in FP8, and to dequantise each when it is used
    part: Slice | None = None  # slice of a plan that runs here; None for the whole model
    holds_part: bool = False  # whether to read all layers of the slice before they run, and to keep them


@contextmanager
def open_streamed_model(
    request: GoldenModelRequest,
    reader: OnceReader,
    streaming: Streaming,
    *,
    footprint: Footprint,
    budget: MemoryBudget,
) -> Iterator[StreamedModel]:
    """Build the golden model without its weights, and let it fetch them during the block.

    Raises:
        UsageError: This checkpoint or experts implementation cannot have packed experts.
    """
    if streaming.packed:
        _refuse_unpackable(request, reader)
    if streaming.device.type != "cpu":
        # The budget is of host memory, and weights and activations are on the GPU.
        budget = MemoryBudget.unlimited()
    model = build_golden_model(request, device=streaming.device)
    # Memory whose size is known is checked before anything is read.
    if streaming.holds_part and streaming.part is not None:
        held = footprint.held_bytes(streaming.part.stage, packed=streaming.packed)
        budget.require(held + footprint.activation_bytes, "holding a slice")
    else:
        weights = footprint.streamed_bytes(prefetch=streaming.prefetch, packed=streaming.packed)
        layers = "two layers" if streaming.prefetch else "one layer"
        budget.require(weights + footprint.activation_bytes, f"streaming {layers} at a time")
    if streaming.part is None or streaming.part.stage.has_head:
        budget.require(footprint.vocabulary_bytes + footprint.logits_bytes, "the lm_head and its logits")
    new_storage = partial(_new_storage, request, streaming, footprint, budget)
    with LayerLoader(reader, new_storage, prefetch=streaming.prefetch) as loader:
        streamed = StreamedModel(request, model, reader, loader, streaming, footprint, budget)
        with streamed.attached():
            yield streamed


@dataclass(slots=True, eq=False)
class StreamedModel:
    """A model whose modules fetch their weights just before they run; as `TwinWeights` it lends them to the twins."""

    request: GoldenModelRequest
    model: PreTrainedModel  # transformers' model on the meta device
    reader: OnceReader
    loader: LayerLoader
    streaming: Streaming
    footprint: Footprint
    budget: MemoryBudget  # limit of anonymous memory; unlimited on a GPU
    _held: dict[int, LayerStorage] = field(default_factory=dict)  # layers that `hold` read
    _running: int | None = None  # layer that ran last, whose weights are still in memory
    # Of each kind of layer, dense or not, that was compared with the checkpoint.
    _proved: set[LayerGraph] = field(default_factory=set)
    _to_prove: dict[LayerGraph, int] = field(default_factory=dict)  # the layer of each kind to compare
    _announced: set[str] = field(default_factory=set)  # full names of what those comparisons read again

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the weights of the layer that ran last, or of a layer that is held."""
        if layer in self._held:
            return self._held[layer].weights
        assert layer == self._running, f"layer {layer} is not in memory: {self._running} is"
        return self.loader.current.weights

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return final norm and lm_head; they stay bound after the forward pass."""
        norm, lm_head = (self.model.get_submodule(name) for name in ("model.norm", "lm_head"))
        return norm.get_parameter("weight"), lm_head.get_parameter("weight")

    def hold(self, layers: range, *, with_head: bool) -> None:
        """Read the layers that will run, and keep them; if `with_head`, final norm and lm_head too."""
        for layer in layers:
            self._expect_proof(layer, self._names_of_whole_proof(layer))
        for layer in layers:
            # `then` is the layer to begin to read meanwhile, if the loader prefetches.
            self.loader.load(layer, then=layer + 1 if layer + 1 in layers else None)
            self._held[layer] = self.loader.keep_current()
        if with_head:
            self._fetch_norm(self.model.get_submodule("model.norm"), None)
            self._bind_weight(self.model.get_submodule("lm_head"), head_name(self.request.spec))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hook the model so that its modules fetch their weights during the block.

        torch calls a pre-hook with the module and its inputs; `partial` puts more arguments before these.
        """
        embedding, layers, norm, head = (
            self.model.get_submodule(name)
            for name in ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
        )
        with ExitStack() as stack:

            def fetch_before(module: torch.nn.Module, fetch: Callable[..., None]) -> None:
                stack.callback(module.register_forward_pre_hook(fetch).remove)

            fetch_before(embedding, self._fetch_embedding)
            fetch_before(norm, self._fetch_norm)
            fetch_before(head, self._fetch_head)
            for number, layer in enumerate(layers.children()):
                fetch_before(layer, partial(self._fetch_layer, number))
                if not self.request.spec.graph.layer(number).is_dense:
                    experts = layer.get_submodule("mlp.experts")
                    fetch_before(experts, partial(self._fetch_experts, number, layer))
            # Norm and head keep their weights after they ran: their float32 twins need them.
            for module in (embedding, *layers.children()):
                stack.callback(module.register_forward_hook(_remove_weights).remove)
            yield

    def _fetch_embedding(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # A new forward pass begins: free norm and head of the pass before.
        if not self.streaming.holds_part:
            for name in ("model.norm", "lm_head"):
                _remove_weights(self.model.get_submodule(name))
        token_ids = inputs[0].unique().tolist()
        if len(token_ids) <= _FEW_TOKEN_IDS and self.streaming.part is None:
            self._bind_rows(module, EMBEDDING, token_ids)
            return
        self.budget.require(self.footprint.vocabulary_bytes, "the embedding")
        self._bind_weight(module, EMBEDDING)

    def _fetch_layer(self, number: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        # Freed memory of the layer before lies in pieces too small for a layer. They would add up.
        give_back_freed_pages()
        if number in self._held:
            storage = self._held[number]
        elif not self._loads_whole(number, inputs[0]):
            self._expect_proof(number, proved_names(self.request.spec, number))
            storage = self.loader.load_without_experts(number)
        else:
            following = number + 1
            # A slice's request ends with its last layer.
            is_last = following == self.request.num_hidden_layers
            has_next = not is_last and self._loads_whole(following, inputs[0])
            for layer in (number, following) if has_next else (number,):
                self._expect_proof(layer, self._names_of_whole_proof(layer))
            storage = self.loader.load(number, then=following if has_next else None)
        self._running = number
        self.budget.require(self.footprint.activation_bytes, f"what layer {number} computes")
        _bind(module, storage)
        if not self._is_proved(number) and self._loads_whole(number, inputs[0]):
            self._prove(module, number, experts=None)

    def _fetch_experts(
        self, number: int, layer: torch.nn.Module, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        hidden_states, top_k_index = inputs[0], inputs[1]
        # Otherwise `_fetch_layer` has read all experts.
        if self._reads_routed_only(hidden_states):
            experts = tuple(top_k_index.unique().tolist())
            self._expect_proof(number, proved_expert_names(experts))
            self.loader.load_experts(experts)
            if not self._is_proved(number):
                self._prove(layer, number, experts=experts)

    def _loads_whole(self, number: int, hidden_states: torch.Tensor) -> bool:
        """Decide whether all of a layer is read before it runs: it is dense, or enough tokens run."""
        return self.request.spec.graph.layer(number).is_dense or not self._reads_routed_only(hidden_states)

    def _reads_routed_only(self, hidden_states: torch.Tensor) -> bool:
        """Decide whether only the routed experts are read: so few tokens run that most are not needed."""
        if self.streaming.part is not None:
            return False  # `mm2-split verify` checks that a run read every tensor of its slice
        spec = self.request.spec
        num_tokens = hidden_states.numel() // spec.hidden_size
        return num_tokens * spec.num_experts_per_tok < spec.num_local_experts

    def _fetch_norm(self, module: torch.nn.Module, _: Any) -> None:
        self._bind_weight(module, FINAL_NORM)

    def _fetch_head(self, module: torch.nn.Module, _: Any) -> None:
        if not module.get_parameter("weight").is_meta:
            # `hold` has read it.
            return
        # All layers have run: their memory serves the lm_head.
        self.loader.release()
        self._running = None
        needed = self.footprint.vocabulary_bytes + self.footprint.logits_bytes
        self.budget.require(needed, "the lm_head and its logits")
        self._bind_weight(module, head_name(self.request.spec))

    def _bind_weight(self, module: torch.nn.Module, name: str) -> None:
        """Read a weight and bind it, unless it is bound already."""
        if module.get_parameter("weight").is_meta:
            weight = self.reader.read_weight(name, self.request.dtype).to(self.streaming.device)
            _set_weight(module, "weight", weight)

    def _bind_rows(self, module: torch.nn.Module, name: str, numbers: list[int]) -> None:
        """Bind a weight of which only these rows are read; the others have no values, and on a CPU take no memory."""
        num_rows, num_columns = self.reader.index[name].shape
        rows = torch.empty(len(numbers), num_columns, dtype=self.request.dtype)
        for place, number in zip(rows.split(1), numbers, strict=True):
            self.reader.read_weight_into(name, place, rows=range(number, number + 1))
        weight = torch.empty(num_rows, num_columns, dtype=rows.dtype, device=self.streaming.device)
        weight[numbers] = rows.to(weight.device)
        _set_weight(module, "weight", weight)

    def _names_of_whole_proof(self, layer: int) -> tuple[str, ...]:
        spec = self.request.spec
        names = proved_names(spec, layer)
        if spec.graph.layer(layer).is_dense:
            return names
        return (*names, *proved_expert_names(range(spec.num_local_experts)))

    def _expect_proof(self, layer: int, names: Iterable[str]) -> None:
        """Announce the tensors that `_prove` compares, so that layer and proof share one read."""
        kind = self.request.spec.graph.layer(layer)
        if not self._is_proved(layer) and self._to_prove.setdefault(kind, layer) == layer:
            full_names = {layer_prefix(layer) + name for name in names} - self._announced
            self._announced |= full_names
            self.reader.expect_again(full_names)

    def _is_proved(self, layer: int) -> bool:
        return self.request.spec.graph.layer(layer) in self._proved

    def _prove(self, module: torch.nn.Module, number: int, *, experts: tuple[int, ...] | None) -> None:
        """Prove the first layer of a kind against the checkpoint; all others of it are read in the same way."""
        tensors = LayerTensors.open(self.reader, self.request.spec, number, self.request.dtype)
        prove_float32_router(module, tensors, number, spec=self.request.spec)
        prove_weights(module, tensors, number, spec=self.request.spec, experts=experts)
        self._proved.add(self.request.spec.graph.layer(number))


def _new_storage(
    request: GoldenModelRequest,
    streaming: Streaming,
    footprint: Footprint,
    budget: MemoryBudget,
    layer: int,
) -> LayerStorage:
    needed = footprint.packed_layer_bytes if streaming.packed else footprint.layer_bytes
    budget.require(needed, "the weights of one layer")
    kind = packed_storage if streaming.packed else grouped_storage
    storage = kind(request.spec, layer, dtype=request.dtype, device=streaming.device)
    if budget.limit_bytes is not None:
        # Memory counts as used only once it was written to, and the next check must see this.
        for tensor in storage.places.values():
            tensor.zero_()
    return storage


def _bind(layer: torch.nn.Module, storage: LayerStorage) -> None:
    for name, tensor in storage.modules.items():
        path, _, leaf = name.rpartition(".")
        _set_weight(layer.get_submodule(path), leaf, tensor)


def _set_weight(module: torch.nn.Module, name: str, value: Any) -> None:
    """Set a weight or buffer. A packed weight is no tensor, which torch would refuse in place of a parameter."""
    if name in module._buffers:
        module._buffers[name] = value
        return
    if isinstance(value, torch.Tensor):
        module.__dict__.pop(name, None)
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    else:
        # Attribute look-up finds this before the parameter, which stays on the meta device.
        module.__dict__[name] = value


def _remove_weights(module: torch.nn.Module, *_: Any) -> None:
    """Remove every weight of a module and its submodules: back to the meta device."""
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and not parameter.is_meta:
                bare = torch.empty_like(parameter, device="meta")
                submodule._parameters[name] = torch.nn.Parameter(bare, requires_grad=False)
            submodule.__dict__.pop(name, None)  # a packed weight
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = torch.empty_like(buffer, device="meta")


def _refuse_unpackable(request: GoldenModelRequest, reader: CheckpointReader) -> None:
    if request.experts_implementation != "eager":
        raise UsageError(
            "packed experts need transformers' eager implementation, which takes them one by one",
            found=request.experts_implementation,
            next_step="Add --experts-implementation eager.",
        )
    if not request.spec.is_fp8:
        raise UsageError(
            "packed experts need an FP8 checkpoint",
            found="one without a quantization_config",
            next_step="Leave --packed-experts out.",
        )
    for layer in range(request.num_hidden_layers):
        for name in expected_layer_shapes(request.spec, layer):
            if EXPERTS not in name:
                continue
            entry = reader.index[layer_prefix(layer) + name]
            if entry.dtype.as_torch() != PACKED_DTYPE:
                raise UsageError(
                    f"packed experts need every expert in FP8, and {entry.name} is not",
                    found=str(entry.dtype),
                    next_step="Leave --packed-experts out.",
                )
