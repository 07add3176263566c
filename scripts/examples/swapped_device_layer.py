"""mm2's own device layer with gate and up swapped: an example mistake that needs no more memory than the right layer.

It also shows how a port streams its weights: a `Deferred` weight is written straight into its storage, so that layers
of MiniMax-M2's true size fit in memory.
"""

from __future__ import annotations

from functools import partial

from minimax_tools.checkpoint.filling import Deferred
from neuron.builtin.layer import DeviceLayer
from neuron.devices.weights import read_in_place


class SwappedDeviceLayer(DeviceLayer):
    """The builtin target with up rows before gate rows."""

    # Without this mark mm2 expects a converted copy of the layer in memory.
    @read_in_place
    def convert_state_dict(self, tensors, config, layer_idx):
        """Put up rows before gate rows."""
        state = super().convert_state_dict(tensors, config, layer_idx)
        for name, weight in state.items():
            if name.endswith("gate_up_proj"):
                state[name] = Deferred(shape=weight.shape, fill=partial(_fill_swapped, weight))
        return state


def _fill_swapped(weight, storage):
    """Fill storage [E,2·I,H] with up rows before gate rows; E experts, I intermediate size, H hidden size."""
    weight.fill(storage)
    gate, up = storage.chunk(2, dim=1)
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)
