"""Whole models of the example port with a planted mistake in one layer, as targets that their names describe.

`SwappedGateUp_at_2` shows all sites, `SwappedGateUp_at_2_without_experts` hides the choice of experts and their
weights, `SwappedGateUp_at_2_without_choice` the choice alone, and `SwappedGateUp_at_2_outputs` shows its output alone.
`SwappedGateUp_at_1_and_3` is wrong in two layers, and `Nothing_at_2` and so on plant nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import planted

_NAME = re.compile(
    r"(?P<mistake>\w+?)_at_(?P<layers>\d+(_and_\d+)*)(_(?P<shows>outputs|without_experts|without_choice))?"
)
_HIDDEN = {"without_experts": ("router_experts", "router_weights"), "without_choice": ("router_experts",)}


class InFloat32(planted.port.DecoderLayer):
    """A right layer that computes in float32 on BF16 weights, and gives float32."""

    def forward(self, hidden_states, attention_mask, position_ids):
        self.float()
        return super().forward(hidden_states.float(), attention_mask, position_ids)


class OneToken(planted.Planted):
    """The experts' output of a single token is half as large again."""

    class moe_class(planted.port.Moe):  # noqa: N801 - the name of the part it replaces
        def forward(self, states):
            output = super().forward(states).clone()
            output[0, 5] *= 1.5
            return output


def __getattr__(name):
    """The target of a name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise AttributeError(name)
    wrong = OneToken if found["mistake"] == "OneToken" else getattr(planted, found["mistake"], None)
    layers = [int(number) for number in found["layers"].split("_and_")]

    def build(config, layer_idx):
        chosen = wrong if layer_idx in layers and wrong is not None else planted.port.DecoderLayer
        module = chosen(config, layer_idx)
        if found["shows"] == "outputs":
            module.sites = {}
        elif found["shows"]:
            hidden = _HIDDEN[found["shows"]]
            module.sites = {site: place for site, place in module.sites.items() if site not in hidden}
        return module

    return build
