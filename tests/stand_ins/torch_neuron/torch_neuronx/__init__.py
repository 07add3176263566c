"""A stand-in for TorchNeuron, `torch_neuronx` 2.14: what mm2 calls of it, on a device whose memory is the host's.

It is written anew, from AWS's pages on TorchNeuron ("What is TorchNeuron?", "torch.compile backend reference",
"TorchNeuron environment variables", "How to use torch.distributed on Neuron", October 2026) and from how the sources
of its beta name and order things. The device is one that torch itself drives, of kind PrivateUse1 and named `neuron`.
So it shows that mm2 moves weights, waits, compiles, counts and adds up over ranks by the calls that TorchNeuron
answers. It does not show that a NeuronCore computes rightly.

Importing torch loads it, by the entry point `torch.backends` in its metadata. TORCH_NEURON_STAND_IN_LIBRARY names the
compiled `device.cpp`. Operations named in TORCH_NEURON_STAND_IN_MISSING count as run on the CPU.
"""

from __future__ import annotations

import os

import torch

torch.ops.load_library(os.environ["TORCH_NEURON_STAND_IN_LIBRARY"])
_device = torch.ops.torch_neuron_stand_in

from torch_neuronx import neuron  # noqa: E402 - the device comes first, as in TorchNeuron

torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", neuron)
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def _autoload() -> None:
    """The entry point: importing this module has done all."""
    from torch_neuronx import compiling, distributed

    compiling.register()
    distributed.register()


def get_fallback_ops() -> list[str]:
    """Return the operations that ran on the CPU: a name for each time."""
    return list(_device.fallbacks())


def synchronisations() -> int:
    """Return how often the device was waited for; TorchNeuron has no such function."""
    return int(_device.synchronisations())
