"""The kinds of targets, and the search for the target of a --target."""

from __future__ import annotations

from minimax_tools.errors import UsageError
from neuron.ports.mm2_targets import BuiltinTarget, ReferenceTarget
from neuron.ports.nxdi import NxdiTarget
from neuron.ports.port_target import PortTarget
from neuron.ports.target import Target
from neuron.ports.traced import TracedTarget

# In the order of the search: a prefix such as `nxdi:` would be a module of PortTarget.
_KINDS: tuple[type[Target], ...] = (BuiltinTarget, ReferenceTarget, NxdiTarget, TracedTarget, PortTarget)


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
        next_step="Name what to call after a colon, as in port.py:DecoderLayer.",
    )
