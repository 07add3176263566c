"""NextLayer: the layer that runs next, read while the present layer loads and computes.

| step | reads into | if |
|---|---|---|
| `read_ahead` | the system's page cache | the user or the free memory allows it |
| `prepare` | host buffers, as weights | it is read ahead, another device computes, and the port does not convert |

ResidentLayer: the one layer of a port whose weights are in memory.
"""

from __future__ import annotations

import logging
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
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader
from neuron.ports.target import target_config
from neuron.runs.device_request import PortSetup
from neuron.runs.footprint import DeviceFootprint
from neuron.weight_trace.held_check import HeldPart, check_part
from neuron.weight_trace.source_lines import LineTable, NotedTensors, PortLines

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
        compares = setup.target.reads_weights and not setup.undone
        self._lines = LineTable(setup.spec) if compares else None
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
        """Return a layer to load: as it was prepared; else drop what was prepared, and open the layer.

        Raises:
            CheckpointError: The layer's tensors cannot be read.
        """
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

    def note_compared(self, layer: int) -> None:
        """Note that a layer's weights were compared: they are not when it is loaded again."""
        self._compared.add(layer)

    def _open_tensors(self, layer: int) -> LayerTensors:
        setup = self._setup
        if self._lines is not None and layer not in self._compared:
            return NotedTensors.noting(self._reader, setup.spec, layer, setup.dtype, table=self._lines)
        tensors = LayerTensors.open(self._reader, setup.spec, layer, setup.dtype)
        for undo in setup.undone:
            undo.edit(tensors, target_config(setup.spec))
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

        Raises:
            MemoryBudgetError: The layer would exceed the budget.
            CheckpointError: The layer's tensors cannot be read.
            TargetError: The port could not be built or loaded.
        """
        if self._module is not None and self._layer == layer:
            return self._module
        setup, target, ranks = self._setup, self._setup.target, self._runtime.ranks
        opened = self._next.take(layer)
        self._next.read_ahead(layer, next_layer)
        module = self._module if target.is_reused else None
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

    def take_held(self) -> HeldPart | None:
        """Return what this rank holds of the weights that were loaded last, once; None if nothing was compared."""
        held, self._held = self._held, None
        return held

    def prepare_next(self, layer: int | None) -> None:
        """Begin to read the next layer's weights while this one computes, if the host can hold both."""
        if layer is not None and self._module is not None:
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
