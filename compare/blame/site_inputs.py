"""SiteInputs: the inputs of one site, as both sides show them, and the inputs that the port may have computed with.

T real tokens, F channels of a site.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from compare.sides.sides import Sides
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.reference.float32_stages import expert_shares

# Rows [T,F] by site, float32; experts are int64.
Values = Mapping[Site, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteInputs:
    """Inputs of one site, on both sides."""

    site: Site
    golden: Values
    port: Values
    usable: torch.Tensor  # tokens whose values in `port` are finite, and whose experts exist, bool [T]

    @classmethod
    def read(cls, site: Site, *, sides: Sides, layer: int, prompt_of: torch.Tensor) -> SiteInputs | None:
        """Read both sides' inputs of a site; None if a side lacks one, or holds it in another shape.

        `prompt_of` [T] is the prompt that each token belongs to.
        """
        if site is Site.ATTN_CONTEXT and sides.reference.keeps_last_tokens:
            # Attention reads the keys and values of every token, and those of the last are here.
            return None
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
            # Tokens attend to others of their prompt: one that is not usable spoils all of its prompt.
            usable = ~torch.isin(prompt_of, prompt_of[~usable])
        return cls(site=site, golden=golden, port=port, usable=usable)

    def possible_inputs(self, doubted: frozenset[Site], router: SiteInputs | None) -> Iterator[Values]:
        """Yield possible inputs of the port's site, to recompute it from each: first the values that the port shows.

        What a port shows may be copies of the values that it computes with, scaled or in another order. So next, values
        of `doubted` sites, which may be wrong by themselves, are replaced by the golden's. For `moe_delta`, `router`
        holds the inputs of the router's weights, to recompute these from the port's logits; it is None for other sites.
        """
        groups = [[source] for source in SITE_INPUTS[self.site]]
        if self.site is Site.MOE_DELTA:
            # A choice and its weights go together.
            groups = [[Site.POST_NORM], [Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS]]
        alternatives = [list(self._alternatives(group, doubted, router)) for group in groups]
        for combination in itertools.product(*alternatives):
            values = {source: rows for part in combination for source, rows in part.items()}
            # Without any of the port's values, the golden's own site would be judged.
            if any(values[source] is not self.golden[source] for source in values):
                yield values

    def _alternatives(
        self, group: list[Site], doubted: frozenset[Site], router: SiteInputs | None
    ) -> Iterator[Values]:
        """Yield the port's values of a group of sites, and values that may stand in for doubted ones."""
        yield {site: self.port[site] for site in group}
        if not doubted & set(group):
            return
        if Site.ROUTER_WEIGHTS in group and router is not None and bool(router.usable.all()):
            # The right weights in the order of the experts, whatever order the port shows its weights in.
            experts = self.port[Site.ROUTER_EXPERTS]
            shares = expert_shares(router.port[Site.ROUTER_LOGITS].sigmoid(), experts)
            yield {Site.ROUTER_EXPERTS: experts, Site.ROUTER_WEIGHTS: shares}
        yield {site: self.golden[site] for site in group}


def _as_computed(site: Site, rows: torch.Tensor, consumer: Site) -> torch.Tensor:
    """Return rows [T,F] of a site in the form in which its consumer is computed from them."""
    if site is not Site.ROUTER_EXPERTS:
        return rows.float()
    # The router's weights are judged in the order of their experts.
    return rows.long().sort(dim=-1).values if consumer is Site.ROUTER_WEIGHTS else rows.long()


def _are_usable(rows: torch.Tensor, sides: Sides, layer: int) -> torch.Tensor:
    """Find tokens whose values can be computed with, bool [T]: finite ones, and experts that exist."""
    if rows.is_floating_point():
        return rows.isfinite().all(dim=-1)
    # The golden's logits tell which experts exist.
    if Site.ROUTER_LOGITS not in sides.reference.sites(layer):
        return torch.zeros(len(rows), dtype=torch.bool)
    num_experts = sides.reference.read(layer, Site.ROUTER_LOGITS).shape[-1]
    return ((rows >= 0) & (rows < num_experts)).all(dim=-1)
