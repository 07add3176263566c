"""SiteInputs: the inputs of a site, as both sides show them, and as the port may have computed with.

T real tokens, E experts, k experts per token, F channels of a site.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from compare.sides.sides import Sides
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.reference.float32_stages import expert_shares

# Rows [T,F] of sites, float32; experts int64.
Values = Mapping[Site, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteInputs:
    """Inputs of one site, on both sides.

    Args:
        usable: Tokens that can be computed from the port's, bool [T]: numbers, and experts that there are.
    """

    site: Site
    golden: Values
    port: Values
    usable: torch.Tensor

    @classmethod
    def read(cls, site: Site, *, sides: Sides, layer: int, prompt_of: torch.Tensor) -> SiteInputs | None:
        """Read both sides' inputs of a site; None where one lacks a part, or holds it in another shape.

        Args:
            site: The site.
            sides: The captures.
            layer: The layer.
            prompt_of: The prompt that each token belongs to, [T].
        """
        golden: dict[Site, torch.Tensor] = {}
        port: dict[Site, torch.Tensor] = {}
        usable = torch.ones_like(prompt_of, dtype=torch.bool)
        for source in SITE_INPUTS[site]:
            rows = sides.read_rows(layer, source)
            if rows is None:
                return None
            golden[source], port[source] = (_as_computed(source, side, site) for side in rows)
            usable &= _are_usable(port[source], sides, layer)
        if site is Site.ATTN_CONTEXT:
            # Tokens attend to others of their prompt.
            usable = ~torch.isin(prompt_of, prompt_of[~usable])
        return cls(site=site, golden=golden, port=port, usable=usable)

    def variants(self, doubted: frozenset[Site], router: SiteInputs | None) -> Iterator[Values]:
        """Yield possible inputs of the port's site: first all values that the port shows.

        These may be copies of the values that it computes with, scaled or in another order. So the golden's values, or
        recomputed weights of experts, take the place of doubted ones next.

        Args:
            doubted: Sites that are wrong by themselves, and do not only inherit an error.
            router: Inputs of the router's weights; of `moe_delta` alone.
        """
        groups = [[one] for one in SITE_INPUTS[self.site]]
        if self.site is Site.MOE_DELTA:
            # A choice and its weights go together.
            groups = [[Site.POST_NORM], [Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS]]
        choices = [list(self._alternatives(group, doubted, router)) for group in groups]
        for chosen in itertools.product(*choices):
            values = {name: rows for part in chosen for name, rows in part.items()}
            if any(values[name] is not self.golden[name] for name in values):
                yield values

    def _alternatives(
        self, group: list[Site], doubted: frozenset[Site], router: SiteInputs | None
    ) -> Iterator[Values]:
        yield {site: self.port[site] for site in group}
        if not doubted & set(group):
            return
        if Site.ROUTER_WEIGHTS in group and router is not None and bool(router.usable.all()):
            # Whatever order the port shows their weights in.
            experts = self.port[Site.ROUTER_EXPERTS]
            shares = expert_shares(router.port[Site.ROUTER_LOGITS].sigmoid(), experts)
            yield {Site.ROUTER_EXPERTS: experts, Site.ROUTER_WEIGHTS: shares}
        yield {site: self.golden[site] for site in group}


def _as_computed(site: Site, rows: torch.Tensor, consumer: Site) -> torch.Tensor:
    """Return rows [T,F] of a site in the form in which another is computed from them."""
    if site is not Site.ROUTER_EXPERTS:
        return rows.float()
    # The router's weights are judged in the order of their experts.
    return rows.long().sort(dim=-1).values if consumer is Site.ROUTER_WEIGHTS else rows.long()


def _are_usable(rows: torch.Tensor, sides: Sides, layer: int) -> torch.Tensor:
    """Find tokens that can be computed with, bool [T]."""
    if rows.is_floating_point():
        return rows.isfinite().all(dim=-1)
    if Site.ROUTER_LOGITS not in sides.reference.sites(layer):
        return torch.zeros(len(rows), dtype=torch.bool)
    num_experts = sides.reference.read(layer, Site.ROUTER_LOGITS).shape[-1]
    return ((rows >= 0) & (rows < num_experts)).all(dim=-1)
