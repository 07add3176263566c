"""The port in which mistakes are planted: a target of mm2 that is right in all layers but the chosen ones.

The port knows nothing of the diagnosis and its catalogue.
B prompts, S tokens of this pass, P tokens of the past, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from faults.arithmetic import Arithmetic, FusedWeights, KeyValues
from faults.plant import Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from neuron.ports.targets import PortTarget


class PlantedLayer(nn.Module):
    """A decoder layer with a submodule for each site to show.

    Args:
        config: Quantities and graph of the model, with Hugging Face's names.
        layer_idx: Number of the layer.
        plant: The mistake; None for the right port.
        decode_only: Whether only decoded tokens are wrong.
    """

    takes_own_names = True  # in all families its weights come by mm2's names

    def __init__(
        self, config: Any, layer_idx: int, plant: Plant | None = None, *, decode_only: bool = False
    ) -> None:
        super().__init__()
        self.weights = FusedWeights(config, layer_idx)
        sites = config.graph.layer(layer_idx).sites
        shown = tuple(str(site) for site in sites if site not in (Site.INPUT, Site.OUTPUT))
        self.taps = nn.ModuleDict({site: nn.Identity() for site in shown})
        hidden = set() if plant is None else {str(site) for site in plant.hides}
        # mm2 reads from `sites` which submodule shows a site.
        self.sites = {site: f"taps.{site}" for site in shown if site not in hidden}
        self._right = Arithmetic(config, self.weights, layer_idx)
        self._planted = self._right if plant is None else plant.build(config, self.weights, layer_idx)
        self._decode_only = decode_only

    def convert_state_dict(
        self, tensors: LayerTensors, config: Any, layer_idx: int
    ) -> Mapping[str, torch.Tensor]:
        """Fuse and group the layer's tensors, with the mistakes that are in the weights.

        If only decoded tokens are wrong, the weights are right: the prefill computes with them too.
        """
        arithmetic = self._right if self._decode_only else self._planted
        arithmetic.edit(tensors)
        return {f"weights.{name}": tensor for name, tensor in arithmetic.fuse(tensors).items()}

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: KeyValues | None = None,
    ) -> tuple[torch.Tensor, KeyValues]:
        """Compute the output [B,S,H], and keys and values [B,K,P+S,D].

        The mask [B,P+S] is 0 at padding. The past is a pair of keys and values [B,K,P,D]; None in a prefill.
        """
        is_right = self._decode_only and past_key_value is None
        arithmetic = self._right if is_right else self._planted
        return arithmetic.run(hidden_states, attention_mask, position_ids, past_key_value, self._tap)

    def _tap(self, site: str, value: torch.Tensor) -> torch.Tensor:
        """Pass a site's value through its submodule, whose output mm2 records."""
        shown: torch.Tensor = self.taps[site](value)
        return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedPort:
    """Factory of the port's layers, called as `port(config, layer_idx)`."""

    plant: Plant | None  # the mistake; None for the right port
    layers: frozenset[int] = frozenset()  # layers of the mistake
    decode_only: bool = False  # whether only decoded tokens are wrong

    def __call__(self, config: Any, layer_idx: int) -> PlantedLayer:
        """Build the module of one layer, without weights."""
        plant = self.plant if layer_idx in self.layers else None
        return PlantedLayer(config, layer_idx, plant, decode_only=self.decode_only)

    def target(self) -> PortTarget:
        """Build the port as a target of mm2; its digest differs by mistake and layers, as a port's source would."""
        name = f"{self.plant or 'planted port'} in {sorted(self.layers)}"
        name += ", decode rows" if self.decode_only else ""
        return PortTarget(name=name, factory=self, source_digest=hashlib.sha256(name.encode()).hexdigest())
