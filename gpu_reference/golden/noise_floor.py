"""The noise floor of a golden: the error of BF16 alone, measured against the float32 twin of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.memory import give_back_freed_pages
from minimax_tools.metrics.noise_floor import error_norms, floor_statistics, variant_statistics
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.router import Router
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, head_name
from minimax_tools.reference.rounded_layer import run_variants
from minimax_tools.reference.rounding import Float32Head
from minimax_tools.reference.twin import Float32Twin

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class TwinWeights(Protocol):
    """A source of the weights that a golden computes with."""

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return a layer's weights by the hub's relative names; valid until the next layer runs."""

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the final norm [H] and the lm_head [vocab,H]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointTwinWeights:
    """The weights of a golden that was loaded whole, read again in its `dtype`: itself, it holds the experts fused."""

    reader: CheckpointReader
    spec: ModelSpec
    dtype: torch.dtype

    def layer(self, layer: int) -> Mapping[str, torch.Tensor]:
        """Return the layer's tensors; each is read when it is looked up."""
        return LayerTensors.open(self.reader, self.spec, layer, self.dtype)

    def head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the final norm [H] and the lm_head [vocab,H]."""
        lm_head = head_name(self.spec)
        return self.reader.read_weight(FINAL_NORM, self.dtype), self.reader.read_weight(lm_head, self.dtype)


SiteKind = TypeVar("SiteKind", Site, ModelSite)

# Sites of the golden that the twin and the statistics need, captured or not.
FLOOR_SITES = frozenset((Site.INPUT, Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredFloor(Generic[SiteKind]):
    """The floor of one layer, or of the sites outside the layers."""

    twin: Mapping[SiteKind, torch.Tensor]  # float32 twins by site
    # Statistics, float32 [B,S], by the names in `minimax_tools.metrics.noise_floor`
    statistics: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseFloor:
    """The floor of a golden, measured layer by layer.

    Variants are other correct ways to compute a layer in BF16; their errors widen the floor.
    """

    config: PretrainedConfig  # transformers' config of the golden
    weights: TwinWeights  # the weights that the golden computes with
    spec: ModelSpec
    inputs: Inputs
    variants: tuple[str, ...] = ()  # names of the variants to run

    def measure_layer(
        self,
        layer: int,
        captured: Mapping[Site, torch.Tensor],
        *,
        sites: tuple[Site, ...],
        device: torch.device,
    ) -> MeasuredFloor[Site]:
        """Compute a layer's float32 twin from the layer's own input, and measure the golden against it.

        Args:
            layer: Number of the layer.
            captured: `FLOOR_SITES` of the golden, and the sites to measure, on the CPU.
            sites: Sites whose twins are computed; the router's logits are added to them.
            device: Device to compute the twin and the variants on.
        """
        weights = self.weights.layer(layer)
        twin = Float32Twin(self.config, weights, spec=self.spec, layer=layer, device=device).run(
            captured[Site.INPUT],
            self.inputs,
            router_experts=captured.get(Site.ROUTER_EXPERTS),
            sites=tuple(site for site in Site if site in (*sites, Site.ROUTER_LOGITS)),
        )
        router, judged = Router.of(self.spec, weights), self.inputs.is_kept.long()
        statistics = floor_statistics(
            captured,
            twin,
            attention_mask=judged,
            router=router,
        )
        if self.variants:
            computed = run_variants(
                self.variants,
                captured[Site.INPUT].to(device),
                self.inputs,
                spec=self.spec,
                tensors=weights,
                router_experts=captured.get(Site.ROUTER_EXPERTS),
                layer=layer,
            )
            wanted = [site for site in twin if site in captured]
            statistics |= variant_statistics(
                {name: {site: found[site].cpu() for site in wanted} for name, found in computed.items()},
                twin,
                attention_mask=judged,
                router=router,
                golden=captured,
            )
            # Freed memory of the variants lies in pieces too small for a layer: return it to the system.
            del computed
            give_back_freed_pages()
        return MeasuredFloor(twin=twin, statistics=statistics)

    def measure_head(
        self, captured: Mapping[ModelSite, torch.Tensor], hidden_states: torch.Tensor
    ) -> MeasuredFloor[ModelSite]:
        """Compute the float32 twin of final norm and logits, and measure the golden against it.

        `hidden_states` [B,S,H] are the last layer's output.
        """
        norm, lm_head = (weight.cpu() for weight in self.weights.head())
        twin = Float32Head(norm, lm_head, spec=self.spec).run(hidden_states)
        real = self.inputs.is_kept
        statistics: dict[str, torch.Tensor] = {}
        for site, exact in twin.items():
            statistics |= error_norms(site, captured[site], exact, real=real)
        return MeasuredFloor(twin=twin, statistics=statistics)
