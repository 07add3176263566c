"""StageFeeds: right values that replace what a port gives at some sites, computed from the port's own inputs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from compare.diagnosis.proof.right_stages import RightStages, waves
from minimax_tools.model.sites import Site
from neuron.runs.layer_run import LayerRequest, LayerRun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFeeds:
    """The sites of one layer to replace, and their right stages."""

    sites: tuple[Site, ...]  # the sites, in execution order
    known: frozenset[
        Site
    ]  # sites whose values the port shows in the right shape; the replaced ones are among them
    right: RightStages

    def feed(self, request: LayerRequest, *, run: Callable[[LayerRequest], LayerRun]) -> LayerRequest:
        """Return the request with the right values at its border.

        `run` runs the layer. It is run once for each group of sites that do not follow from each other: the inputs of a
        later stage are what the port computes once the earlier ones are right.
        """
        asked = tuple(site for site in Site if site in self.known or site is Site.INPUT)
        border = dict(request.border)
        for wave in waves(self.sites):
            shown = run(replace(request, sites=asked, border=border)).tensors
            border |= {site: self.right.value(site, shown) for site in wave}
        return replace(request, border=border)
