"""Backend: the device and library that compute; `backend_choice` chooses it."""

from __future__ import annotations

from minimax_tools.text_enum import TextEnum


class Backend(TextEnum):
    """A device with the library that drives it."""

    NEURON = "neuron"  # torch-neuronx >= 2.13, native
    NEURON_XLA = "neuron-xla"  # torch-neuronx <= 2.9 over torch_xla
    XLA_CPU = "xla-cpu"  # torch_xla on PJRT CPU
    CPU = "cpu"  # plain torch

    @property
    def is_lazy(self) -> bool:
        """True if operations are recorded into graphs, which run at a sync."""
        return self in (Backend.NEURON_XLA, Backend.XLA_CPU)

    @property
    def is_neuron(self) -> bool:
        """True if a NeuronCore computes."""
        return self in (Backend.NEURON, Backend.NEURON_XLA)

    @property
    def description(self) -> str:
        """The device in words."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Backend.NEURON: "Neuron, native",
    Backend.NEURON_XLA: "Neuron over torch_xla",
    Backend.XLA_CPU: "CPU over torch_xla (PJRT)",
    Backend.CPU: "cpu",
}
