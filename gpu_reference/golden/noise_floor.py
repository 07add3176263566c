"""NoiseFloor: what BF16 alone costs the golden, measured from the float32 twin of each of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpu_reference.model.twin_weights import TwinWeights
from minimax_tools.machine.memory import give_back_freed_pages
from minimax_tools.metrics.noise_floor import error_norms, floor_statistics, variant_statistics
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import CORRECTION_BIAS
from minimax_tools.reference.head import Float32Head
from minimax_tools.reference.twin import Float32Twin
from minimax_tools.reference.variants import run_variants

if TYPE_CHECKING:
    from transformers import MiniMaxM2Config

# What the twin and the statistics need of the golden, captured or not.
FLOOR_SITES = frozenset((Site.INPUT, Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseFloor:
    """Measures the floor of one layer after the other.

    Args:
        config: transformers' config of the golden.
        weights: The golden's weights.
        spec: The model.
        inputs: The token rows.
        variants: Names of the variants of a layer that widen its floor (see `reference.variants`).
    """

    config: MiniMaxM2Config
    weights: TwinWeights
    spec: ModelSpec
    inputs: Inputs
    variants: tuple[str, ...] = ()

    def run_layer(
        self,
        layer: int,
        captured: Mapping[Site, torch.Tensor],
        *,
        sites: tuple[Site, ...],
        device: torch.device,
    ) -> dict[Site, torch.Tensor]:
        """The float32 twin of `sites` and of the router's logits, computed from the layer's own input.

        Args:
            layer: The layer's number.
            captured: `FLOOR_SITES` of the golden.
            sites: Sites to compute.
            device: Where to compute.
        """
        twin = Float32Twin(self.config, self.weights.layer(layer), layer=layer, device=device)
        return twin.run(
            captured[Site.INPUT],
            self.inputs,
            router_experts=captured[Site.ROUTER_EXPERTS],
            sites=tuple(site for site in Site if site in (*sites, Site.ROUTER_LOGITS)),
        )

    def measure_layer(
        self, layer: int, captured: Mapping[Site, torch.Tensor], twin: Mapping[Site, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The statistics of a layer's floor by name, float32 [B,S] (see `minimax_tools.metrics.noise_floor`)."""
        return floor_statistics(
            captured,
            twin,
            attention_mask=self.inputs.attention_mask,
            correction_bias=self.weights.layer(layer)[CORRECTION_BIAS].cpu(),
            num_experts_per_tok=self.spec.num_experts_per_tok,
        )

    def measure_variants(
        self,
        layer: int,
        captured: Mapping[Site, torch.Tensor],
        twin: Mapping[Site, torch.Tensor],
        *,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """The statistics of the variants of a layer by name, float32 [B,S]: all run side by side.

        Args:
            layer: The layer's number.
            captured: `FLOOR_SITES` of the golden, and the sites whose variants are measured.
            twin: What `run_layer` gave.
            device: Where to compute.
        """
        if not self.variants:
            return {}
        weights = self.weights.layer(layer)
        computed = run_variants(
            self.variants,
            captured[Site.INPUT].to(device),
            self.inputs,
            spec=self.spec,
            tensors=weights,
            router_experts=captured[Site.ROUTER_EXPERTS],
            layer=layer,
        )
        wanted = [site for site in twin if site in captured]
        statistics = variant_statistics(
            {name: {site: sites[site].cpu() for site in wanted} for name, sites in computed.items()},
            twin,
            attention_mask=self.inputs.attention_mask,
            correction_bias=weights[CORRECTION_BIAS].cpu(),
            num_experts_per_tok=self.spec.num_experts_per_tok,
            golden=captured,
        )
        # What ran before left memory in pieces that nothing large fits into.
        give_back_freed_pages()
        return statistics

    def run_head(self, hidden_states: torch.Tensor) -> dict[ModelSite, torch.Tensor]:
        """The float32 twin of final norm and logits, of the last layer's output [B,S,H]."""
        norm, lm_head = (weight.cpu() for weight in self.weights.head())
        return Float32Head(norm, lm_head, eps=self.spec.rms_norm_eps).run(hidden_states)

    def measure_head(
        self, captured: Mapping[ModelSite, torch.Tensor], twin: Mapping[ModelSite, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The statistics of final norm and logits by name, as `measure_layer` gives those of a layer."""
        real = self.inputs.attention_mask.bool()
        statistics: dict[str, torch.Tensor] = {}
        for site, exact in twin.items():
            statistics |= error_norms(site, captured[site], exact, real=real)
        return statistics
