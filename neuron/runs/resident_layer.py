"""ResidentLayer: the one layer of a port whose weights are in memory, and the next one, which is being read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.read_ahead import ReadAhead
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import Mm2Error
from minimax_tools.machine.memory import give_back_freed_memory
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader
from neuron.runs.device_request import PortSetup
from neuron.runs.footprint import RunLimits, choose_read_ahead

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """Weights that are being read for a layer that has not begun."""

    tensors: LayerTensors
    weights: dict[str, Weight]


class ResidentLayer:
    """The layer of a port whose weights are in memory; never more than one."""

    def __init__(
        self, setup: PortSetup, *, runtime: Runtime, reader: CheckpointReader, limits: RunLimits
    ) -> None:
        self._setup = setup
        self._target = setup.target
        self._runtime = runtime
        self._reader = reader
        self._limits = limits
        self._pool = ReadingPool(torch.get_num_threads())
        self.loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=self._pool)
        reads_ahead = choose_read_ahead(setup.prefetch, limits.footprint, reader.index)
        self._ahead = ReadAhead(reader.index) if reads_ahead else None
        self._module: nn.Module | None = None
        # The layer whose weights the module holds.
        self._layer: int | None = None
        self._prepared: _Prepared | None = None

    def load(self, layer: int, *, next_layer: int | None) -> nn.Module:
        """Return the module with a layer's weights. The old module is freed before a new one is built.

        Args:
            layer: The layer.
            next_layer: The layer after it, to be read ahead.

        Raises:
            MemoryBudgetError: The layer would exceed the budget.
            CheckpointError: The layer's tensors cannot be read.
            TargetError: The port could not be built or loaded.
        """
        if self._module is not None and self._layer == layer:
            return self._module
        setup, ranks = self._setup, self._runtime.ranks
        prepared = self._take_prepared(layer)
        tensors = self._open_tensors(layer) if prepared is None else prepared.tensors
        self._read_ahead(layer, next_layer)
        module, self._module, self._layer = self._module, None, None
        is_built_anew = module is None or not self._target.is_reused
        if module is None or is_built_anew:
            del module
            self._limits.allow_layer(layer)
            module = self._target.build(setup.spec, layer, dtype=setup.dtype, ranks=ranks)
        if self._target.converts(module):
            self._limits.allow_conversion(layer, is_built_anew=is_built_anew)
        self._target.load(
            module,
            tensors,
            setup.spec,
            loader=self.loader,
            ranks=ranks,
            prepared=None if prepared is None else prepared.weights,
        )
        if self._runtime.spmd is not None:
            self._runtime.spmd.shard(module, what=f"target {self._target.name}")
        self._module, self._layer = module, layer
        return module

    def prepare(self, layer: int | None) -> None:
        """Begin to read the next layer's weights while this one runs, where the host can hold both.

        Not where the port converts them: its conversion may write to the module, which still has to run.
        """
        module, target = self._module, self._target
        is_wanted = self._ahead is not None and target.is_reused and target.reads_weights
        if layer is None or module is None or not is_wanted or self._prepared is not None:
            return
        if target.converts(module) or self._runtime.device.type == "cpu":
            return
        if not self._limits.has_room_for_another_layer():
            return
        logger.debug("Preparing layer %d", layer)
        try:
            tensors = self._open_tensors(layer)
            weights = target.prepare(
                module, tensors, self._setup.spec, loader=self.loader, ranks=self._runtime.ranks
            )
        except Mm2Error:
            # `load` raises it again: the layer that has run is to be stored first.
            return
        self._prepared = _Prepared(tensors=tensors, weights=weights)

    def free(self) -> None:
        """Free the weights, on the device and on the host."""
        self._module = self._layer = None
        self._take_prepared(None)
        self.loader.release()
        # The allocator keeps many small blocks, which a large tensor could not use.
        give_back_freed_memory()

    def close(self) -> None:
        """Free the weights, and end the threads."""
        self.free()
        self._pool.close()
        if self._ahead is not None:
            self._ahead.close()

    def _take_prepared(self, layer: int | None) -> _Prepared | None:
        """Return what was prepared for a layer; drop what was prepared for another one."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.tensors.layer == layer:
            return prepared
        self.loader.abandon(prepared.weights)
        return None

    def _open_tensors(self, layer: int) -> LayerTensors:
        return LayerTensors.open(self._reader, self._setup.spec, layer, self._setup.dtype)

    def _read_ahead(self, layer: int, next_layer: int | None) -> None:
        if self._ahead is None or not self._target.reads_weights:
            return
        # The layer itself comes first: two that are read at once would each take twice as long.
        self._ahead.request(layer)
        if next_layer is not None:
            self._ahead.request(next_layer)
