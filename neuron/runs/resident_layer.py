"""ResidentLayer: the one layer of a port whose weights are in memory."""

from __future__ import annotations

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.memory import give_back_freed_memory
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.runs.device_request import PortSetup
from neuron.runs.footprint import DeviceFootprint
from neuron.runs.next_layer import NextLayer
from neuron.weight_trace.held_check import HeldPart, check_part
from neuron.weight_trace.port_lines import PortLines
from neuron.weight_trace.source_lines import NotedTensors


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
