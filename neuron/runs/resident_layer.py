"""The one layer of a port whose weights are in memory, the layer that is read meanwhile, and the memory of both.

`NextLayer` reads the layer that runs next while the present one loads and computes: into the system's page cache if the
user or the free memory allows it, and into host buffers if another device computes and the port does not convert.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.shard_files import ReadAhead, stored_layer_bytes
from minimax_tools.errors import Mm2Error
from minimax_tools.machine.memory import MemoryBudget, free_bytes, give_back_freed_memory
from minimax_tools.machine.size import format_size
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from neuron.builtin.moe import CHUNK_SIZE_BYTES
from neuron.devices.backend import Backend
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader
from neuron.ports.exposure import site_shape
from neuron.ports.target import target_config
from neuron.runs.port_setup import PortSetup
from neuron.weight_trace.held_check import HeldPart, check_part
from neuron.weight_trace.source_lines import LineTable, NotedTensors, PortLines

_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8
# A site's values of one call on the device; of all calls on the host, and as the bytes that are written.
_COPIES_OF_A_SITE = 3
_COPIES_ON_HOST = 2
# Scores, masked scores, and their softmax in two dtypes.
_COPIES_OF_SCORES = 4
# XLA on the CPU widens the weights of a running graph to float32 and transposes them: up to 3.5 times their bytes were
# measured, rounded up here.
_XLA_COPIES_OF_EXPERTS = 4
# Room for threads and libraries: stacks, scratch memory, compiled code. More refuses runs that would fit.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFootprint:
    """The host memory that a device run takes."""

    spec: ModelSpec
    dtype: torch.dtype  # dtype of weights and activations
    inputs: Inputs  # the token rows of the run
    backend: Backend  # the backend that computes
    # Number of experts that mm2's own layer runs together; None for a port: its tensors between the sites are unknown.
    num_experts_at_once: int | None
    num_ranks: int = 1  # number of ranks known to divide the weights; 1 if each may hold them whole

    @property
    def loaded_layer_bytes(self) -> int:
        """The weights of one layer, or of a rank's part of it, where they are held and on their way there."""
        weight_bytes = math.ceil(layer_bytes(self.spec, self.dtype) / self.num_ranks)
        # A NeuronCore holds weights in its own memory.
        held_bytes = 0 if self.backend.is_neuron else weight_bytes
        # Weights for a device go through host buffers, at most a chunk of experts each. The CPU needs no buffers.
        sent_bytes = 0 if self.backend is Backend.CPU else min(weight_bytes, CHUNK_SIZE_BYTES)
        return held_bytes + sent_bytes + _SPARE_BYTES

    @property
    def converted_bytes(self) -> int:
        """The tensors that a port's `convert_state_dict` returns, if it does not leave them to be read in place."""
        return layer_bytes(self.spec, self.dtype)

    @property
    def embedding_bytes(self) -> int:
        """The embedding's weights."""
        return vocabulary_bytes(self.spec, self.dtype)

    @property
    def activation_bytes(self) -> int:
        """The activations of one layer: its sites and, for mm2's own layer, the tensors between them."""
        num_values = [
            math.prod(site_shape(site, self.spec, self.inputs.batch_shape)) for site in self.spec.graph.sites
        ]
        num_in_call = sum(num_values) * self._rows_of_call // self.inputs.batch_size
        site_bytes = (num_in_call + sum(num_values) * _COPIES_ON_HOST) * self.dtype.itemsize
        # Room for two copies of the largest site in float64.
        scratch_bytes = max(num_values) * 2 * _FLOAT64_BYTES
        return site_bytes + scratch_bytes + self._bytes_between_sites + _SPARE_BYTES

    @property
    def head_bytes(self) -> int:
        """The lm_head's weight and the logits: on the device, on the host, as written bytes, and once in float64."""
        # XLA on the CPU copies the weight. A NeuronCore holds its own, but the host reads it whole before.
        num_copies = 2 if self.backend is Backend.XLA_CPU else 1
        num_logits = self.inputs.input_ids.numel() * self.spec.vocab_size
        logits_bytes = num_logits * (_COPIES_OF_A_SITE * self.dtype.itemsize + _FLOAT64_BYTES)
        return num_copies * vocabulary_bytes(self.spec, self.dtype) + logits_bytes

    @property
    def _rows_of_call(self) -> int:
        return len(self.inputs.plan_calls()[0])

    @property
    def _bytes_between_sites(self) -> int:
        """Attention scores, and what the experts that run together, or one MLP, compute and copy.

        0 where unknown or on a device.
        """
        if self.num_experts_at_once is None or self.backend.is_neuron:
            return 0
        num_tokens = self._rows_of_call * self.inputs.sequence_length
        num_pairs = num_tokens * self.inputs.sequence_length
        score_bytes = _COPIES_OF_SCORES * num_pairs * self.spec.num_attention_heads * _FLOAT32_BYTES
        graph, intermediate = self.spec.graph, self.spec.intermediate_size
        mlps = ((self.num_experts_at_once, intermediate), (1, graph.shared_width), (1, graph.dense_width))
        return score_bytes + max(number * self._mlp_bytes(width, num_tokens) for number, width in mlps)

    def _mlp_bytes(self, width: int, num_tokens: int) -> int:
        """Return the bytes that an expert of this width, or an MLP, computes and copies."""
        hidden = self.spec.hidden_size
        # Per token: gate, up, SiLU of gate, and their product; the output, widened to float32, and weighted.
        token_bytes = (4 * width + hidden) * self.dtype.itemsize + 2 * hidden * _FLOAT32_BYTES
        # Gate, up and down.
        weight_bytes = 3 * hidden * width * self.dtype.itemsize
        num_copies = _XLA_COPIES_OF_EXPERTS if self.backend.is_lazy else 0
        return num_tokens * token_bytes + num_copies * weight_bytes


def device_footprint(setup: PortSetup, runtime: Runtime) -> DeviceFootprint:
    """Compute the footprint of a port's run, the same in each of its ranks."""
    return DeviceFootprint(
        spec=setup.spec,
        dtype=setup.dtype,
        inputs=setup.inputs,
        backend=runtime.backend,
        num_experts_at_once=setup.target.num_experts_at_once(
            setup.spec, dtype=setup.dtype, is_lazy=runtime.backend.is_lazy, ranks=runtime.ranks
        ),
        num_ranks=runtime.ranks.degree if setup.target.divides_weights else 1,
    )


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenedLayer:
    """A layer of the checkpoint, to be loaded."""

    tensors: LayerTensors
    # Weights that are being read into host buffers; None if no reading has begun.
    weights: dict[str, Weight] | None


class NextLayer:
    """The layer that runs next. Without reading ahead, it is only opened when it loads."""

    def __init__(
        self,
        setup: PortSetup,
        *,
        runtime: Runtime,
        reader: CheckpointReader,
        loader: WeightLoader,
        footprint: DeviceFootprint,
    ) -> None:
        self._setup = setup
        self._runtime = runtime
        self._reader = reader
        self._loader = loader
        self._footprint = footprint
        reads_ahead = choose_read_ahead(setup.prefetch, footprint, reader.index)
        # A traced target holds its weights itself.
        reads_ahead = reads_ahead and setup.target.reads_weights
        self._read_ahead = ReadAhead(reader.index) if reads_ahead else None
        self._prepared: OpenedLayer | None = None
        # What the port holds is compared with what it was given, unless mm2 changed that.
        self._compares = setup.target.reads_weights and not setup.edits
        self._tables: dict[LayerGraph, LineTable] = {}
        self._compared: set[int] = set()

    def read_ahead(self, layer: int, next_layer: int | None) -> None:
        """Begin to read `next_layer` into the page cache, after `layer`, which is about to load."""
        if self._read_ahead is None:
            return
        # The layer itself comes first: two that are read at once would each take twice as long.
        self._read_ahead.request(layer)
        if next_layer is not None:
            self._read_ahead.request(next_layer)

    def prepare(self, layer: int, module: nn.Module) -> None:
        """Begin to read a layer's weights for `module`, which computes with those of the present layer."""
        if self._prepared is not None or not self._can_prepare(module):
            return
        logger.debug("Preparing layer %d", layer)
        setup = self._setup
        try:
            tensors = self._open_tensors(layer)
            weights = setup.target.prepare(
                module, tensors, setup.spec, loader=self._loader, ranks=self._runtime.ranks
            )
        except Mm2Error:
            # Loading the layer meets the same error, once the present layer is stored.
            return
        self._prepared = OpenedLayer(tensors=tensors, weights=weights)

    def take(self, layer: int) -> OpenedLayer:
        """Return a layer to load: as it was prepared; else drop what was prepared, and open the layer."""
        prepared = self._prepared
        if prepared is None or prepared.tensors.layer != layer:
            self.drop()
            return OpenedLayer(tensors=self._open_tensors(layer), weights=None)
        self._prepared = None
        return prepared

    def drop(self) -> None:
        """Stop preparing."""
        if self._prepared is not None:
            self._loader.abandon(self._prepared.weights or {})
            self._prepared = None

    def close(self) -> None:
        """Stop preparing, and end the thread that reads ahead."""
        self.drop()
        if self._read_ahead is not None:
            self._read_ahead.close()

    def line_table(self, layer: int) -> LineTable:
        """Return the numbers of a layer's lines, which all layers of its kind share."""
        kind = self._setup.spec.graph.layer(layer)
        if kind not in self._tables:
            self._tables[kind] = LineTable(self._setup.spec, layer)
        return self._tables[kind]

    def note_compared(self, layer: int) -> None:
        """Note that a layer's weights were compared: they are not when it is loaded again."""
        self._compared.add(layer)

    def _open_tensors(self, layer: int) -> LayerTensors:
        setup = self._setup
        if self._compares and layer not in self._compared:
            return NotedTensors.noting(
                self._reader, setup.spec, layer, setup.dtype, table=self.line_table(layer)
            )
        tensors = LayerTensors.open(self._reader, setup.spec, layer, setup.dtype)
        for edit in setup.edits.values():
            edit(tensors, target_config(setup.spec))
        return tensors

    def _can_prepare(self, module: nn.Module) -> bool:
        target, footprint = self._setup.target, self._footprint
        # Without reuse, the module that gets these weights does not exist yet.
        if self._read_ahead is None or not target.is_reused or self._runtime.device.type == "cpu":
            return False
        if target.converts(module):
            # A conversion may write to the module, which still computes.
            return False
        needed_bytes = footprint.converted_bytes + footprint.activation_bytes
        return needed_bytes <= free_bytes(self._setup.budget)


def choose_read_ahead(prefetch: bool | None, footprint: DeviceFootprint, index: TensorIndex) -> bool:
    """Decide whether the next layer is read from the disk while one runs; log the reason if memory forbids it.

    `prefetch` is the user's choice; None to decide by the free memory.
    """
    if prefetch is not None:
        return prefetch
    # The page cache then holds the bytes of the layer that is being loaded, and of the next one.
    cached_bytes = 2 * max((stored_layer_bytes(index, layer) for layer in index.layers), default=0)
    needed_bytes = footprint.loaded_layer_bytes + footprint.activation_bytes + cached_bytes
    # No budget: the page cache is not the process's own memory.
    usable_bytes = free_bytes(MemoryBudget.unlimited())
    if needed_bytes <= usable_bytes:
        return True
    logger.info(
        "No layer is read ahead: a layer and two more in the system's cache take %s, %s are free.",
        format_size(needed_bytes),
        format_size(usable_bytes),
    )
    return False


class ResidentLayer:
    """The layer of a port whose weights are in memory; never more than one."""

    def __init__(
        self, setup: PortSetup, *, runtime: Runtime, reader: CheckpointReader, footprint: DeviceFootprint
    ) -> None:
        self._setup = setup
        self._runtime = runtime
        self._footprint = footprint
        self._pool = ReadingPool(torch.get_num_threads())
        self.loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=self._pool)
        self._next = NextLayer(setup, runtime=runtime, reader=reader, loader=self.loader, footprint=footprint)
        self._module: nn.Module | None = None
        # The layer whose weights the module holds.
        self._layer: int | None = None
        self._held: HeldPart | None = None

    def load(self, layer: int, *, next_layer: int | None) -> nn.Module:
        """Return the module with a layer's weights. The old module is freed before a new one is built.

        `next_layer`, which runs after it, is read ahead; None after the last.
        """
        if self._module is not None and self._layer == layer:
            return self._module
        setup, target, ranks = self._setup, self._setup.target, self._runtime.ranks
        opened = self._next.take(layer)
        self._next.read_ahead(layer, next_layer)
        module = self._module if target.is_reused and self._is_alike(layer) else None
        # This frees a module that is not reused. Another is forgotten until it is loaded: after an error it may hold
        # weights of two layers.
        self._module = self._layer = None
        is_built_anew = module is None
        if module is None:
            setup.budget.require(self._footprint.loaded_layer_bytes, f"holding the weights of layer {layer}")
            module = target.build(setup.spec, layer, dtype=setup.dtype, ranks=ranks)
        if target.converts(module):
            # A new module takes no memory before its weights are written.
            module_bytes = self._footprint.loaded_layer_bytes if is_built_anew else 0
            needed_bytes = self._footprint.converted_bytes + module_bytes
            setup.budget.require(needed_bytes, f"what convert_state_dict makes of layer {layer}")
        sent = PortLines(setup.spec)
        self.loader.look = sent.note if isinstance(opened.tensors, NotedTensors) else None
        try:
            target.load(
                module, opened.tensors, setup.spec, loader=self.loader, ranks=ranks, prepared=opened.weights
            )
        finally:
            # The head is sent by the same loader, and nobody compares it.
            self.loader.look = None
        if isinstance(opened.tensors, NotedTensors):
            self._held = check_part(module, opened.tensors, sent=sent, pool=self._pool)
            self._next.note_compared(layer)
        if self._runtime.spmd is not None:
            self._runtime.spmd.mark_division(module, what=f"port {target.name}")
        self._module, self._layer = module, layer
        return module

    def _is_alike(self, layer: int) -> bool:
        """Decide whether a layer is of the kind that the module was built for: dense layers have other weights."""
        graph = self._setup.spec.graph
        return self._layer is not None and graph.layer(layer) == graph.layer(self._layer)

    def line_table(self, layer: int) -> LineTable:
        """Return the numbers of a layer's lines."""
        return self._next.line_table(layer)

    def take_held(self) -> HeldPart | None:
        """Return what this rank holds of the weights that were loaded last, once; None if nothing was compared."""
        held, self._held = self._held, None
        return held

    def prepare_next(self, layer: int | None) -> None:
        """Begin to read the next layer's weights while this one computes, if the host can hold both."""
        if layer is not None and self._module is not None and self._is_alike(layer):
            self._next.prepare(layer, self._module)

    def free(self) -> None:
        """Free the weights, on the device and on the host."""
        self._module = self._layer = None
        self._next.drop()
        self.loader.release()
        # The allocator keeps many small blocks, which a large tensor could not use.
        give_back_freed_memory()

    def close(self) -> None:
        """Free the weights, and end the threads."""
        self.free()
        self._pool.close()
        self._next.close()
