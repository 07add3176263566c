"""Whole models of the example port with a planted mistake in one layer, as targets that their names describe.

`SwappedGateUp_at_2` shows all sites, `SwappedGateUp_at_2_without_experts` hides the choice of experts, and
`SwappedGateUp_at_2_outputs` shows its output alone; `Nothing_at_2` and so on plant nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import planted

_NAME = re.compile(r"(?P<mistake>\w+?)_at_(?P<layer>\d+)(_(?P<shows>outputs|without_experts))?")
_HIDDEN = ("router_experts", "router_weights")


def __getattr__(name):
    """The target of a name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise AttributeError(name)
    wrong = getattr(planted, found["mistake"], None)
    layers = (int(found["layer"]),)

    def build(config, layer_idx):
        chosen = wrong if layer_idx in layers and wrong is not None else planted.port.DecoderLayer
        module = chosen(config, layer_idx)
        if found["shows"] == "outputs":
            module.sites = {}
        elif found["shows"]:
            module.sites = {site: place for site, place in module.sites.items() if site not in _HIDDEN}
        return module

    return build
