"""The kinds of targets, of layers and of whole ports, and the search for the target of a --target."""

from __future__ import annotations

from minimax_tools.errors import UsageError, did_you_mean
from neuron.ports.mm2_targets import BuiltinTarget, ReferenceTarget
from neuron.ports.model_target import ModelTarget, PortModelTarget
from neuron.ports.nxdi import NxdiTarget
from neuron.ports.nxdi_model import NxdiModelTarget
from neuron.ports.port_target import PortTarget
from neuron.ports.target import Target
from neuron.ports.traced import TracedTarget
from neuron.ports.vllm_neuron_model import VllmNeuronModelTarget

# In the order of the search: a prefix such as `nxdi:` would be a module of PortTarget.
_KINDS: tuple[type[Target], ...] = (BuiltinTarget, ReferenceTarget, NxdiTarget, TracedTarget, PortTarget)
# Targets that are named by a word.
_NAMES = (BuiltinTarget.forms, ReferenceTarget.forms)
_MODEL_KINDS: tuple[type[ModelTarget], ...] = (NxdiModelTarget, VllmNeuronModelTarget, PortModelTarget)


def find_target(name: str) -> Target:
    """Find the target of a --target.

    Raises:
        UsageError: The name has none of the known forms.
        TargetError: The file, the module or the name in it does not exist or cannot be imported.
    """
    for kind in _KINDS:
        target = kind.find(name)
        if target is not None:
            return target
    raise UsageError(
        f"--target {name!r} is unknown",
        expected=", ".join(kind.forms for kind in _KINDS),
        next_step=did_you_mean(name, _NAMES)
        or "Name what to call after a colon, as in port.py:DecoderLayer.",
    )


def find_model_target(name: str) -> ModelTarget:
    """Find the whole port of a --target of `mm2-test model`.

    Raises:
        UsageError: The name has none of the known forms.
        TargetError: The file, the module or the name in it does not exist or cannot be imported.
    """
    for kind in _MODEL_KINDS:
        target = kind.find(name)
        if target is not None:
            return target
    raise UsageError(
        f"--target {name!r} is no whole port",
        expected=", ".join(kind.forms for kind in _MODEL_KINDS),
        next_step="Name what to call after a colon, as in port.py:Model.",
    )
