"""Noise of right ports as records: one record for each judged site of each comparison. `calibrate.py` writes them.

Variants are copies of a layer that round in other places, as other correct implementations do. A floor that they widen
is the error of the farthest of them, so ρ is smaller there. A run is compared with several forms of its golden, named
in `FLOORS`:

| floor | the golden has |
|---|---|
| `full` | float32 twins |
| `stats` | only the statistics of the noise floor |
| `off` | no noise floor |
| `full_variants`, `stats_variants` | the first two, with a floor that variants widen |

With `full` and `off`, a copy of the run that hides its choice of experts is compared too: then nobody knows which
tokens are past a flip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from clean_ports import CleanModel, CleanPort, Setting

from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.noise_floor import error_name, token_rows
from minimax_tools.model.sites import Site
from minimax_tools.results.results import SiteResult

FLOORS = ("full", "stats", "off", "full_variants", "stats_variants")
_WITH_VARIANTS = "_variants"
# Fields of `SiteResult.noise` that a record holds.
_NOISE_FIELDS = (
    "whole", "ordinary", "massive", "token_median", "token_p99", "token_worst", "incoming", "interval",
    "token_gain", "channel_gain", "channel_offset", "channel_worst",
)  # fmt: skip
# Sites that are judged differently if the choice of experts is hidden.
_PAST_A_FLIP = ("router_weights", "moe_delta", "output")


class PartialFloor(Capture):
    """A golden that uses less of its noise floor than its files hold."""

    def __init__(self, capture: Capture, floor: str) -> None:
        super().__init__(capture.directory, capture.manifest)
        self._floor = floor

    @property
    def description(self) -> Description:
        """Description with the floor that is used, of `FLOORS`."""
        whole = self.manifest.description
        return replace(
            whole,
            noise_floor=self._floor.removesuffix(_WITH_VARIANTS),
            floor_variants=whole.floor_variants if self._floor.endswith(_WITH_VARIANTS) else (),
        )


class HiddenExperts(Capture):
    """A run of a port that does not show its choice of experts."""

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return all sites except the choice of experts."""
        return tuple(site for site in super().sites(layer) if site is not Site.ROUTER_EXPERTS)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Return the sites that are not shown, with the choice of experts."""
        return (*super().not_exposed(layer), Site.ROUTER_EXPERTS)


def measure(
    clean: CleanModel, setting: Setting, port: CleanPort, mode: str, run: Capture
) -> Iterator[dict[str, Any]]:
    """Yield the records of one run of a port, compared with each form of its golden.

    `mode` is how the run was made: `isolated` or `chained`.
    """
    hidden = HiddenExperts(run.directory, run.manifest)
    pairs: list[tuple[str, Capture]] = [
        *((floor, run) for floor in FLOORS),
        *((floor, hidden) for floor in ("full", "off")),
    ]
    for floor, target in pairs:
        comparison = compare_captures(
            PartialFloor(clean.golden, floor),
            target,
            criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
            layer_pattern="layer_*",
        )
        common = {
            "shape": setting.shape,
            "seed": setting.seed,
            "lengths": setting.lengths,
            # The attention and experts implementations of transformers that the golden ran with.
            "golden": f"{setting.attention}, {setting.experts}",
            "port": str(port),
            "mode": mode,
            "floor": floor,
            "hidden": target is hidden,
            "torch": torch.__version__,
        }
        for site in comparison.sites:
            if target is not hidden or site.site in _PAST_A_FLIP:
                yield {**common, **_figures(site), "floor_relative": _relative_floor(clean.golden, site)}


def _relative_floor(golden: Capture, site: SiteResult) -> float | None:
    """Compute the noise floor of the golden at a site, relative to its values, over all real tokens."""
    if site.layer is None or site.site == Site.ROUTER_EXPERTS:
        return None
    name = Site(site.site)
    error = golden.read_floor(site.layer, error_name(name))
    assert error is not None, "a golden of this script keeps its whole floor"
    real = golden.read_attention_mask().bool()
    rows = token_rows(golden.read(site.layer, name), name)[real]
    return float(error[real].double().norm() / rows.double().norm())


def _figures(site: SiteResult) -> dict[str, Any]:
    """Return the fields of a record that come from the site's judgement."""
    record: dict[str, Any] = {
        "layer": site.layer,
        "site": site.site,
        "status": site.status.value,
        "tokens": site.num_judged,
    }
    if site.noise is not None:
        assert site.metrics is not None, "a site with ρ has the metrics of a pair too"
        # Metrics cover all real tokens: those judged, and those set aside because they are past a flip.
        record["channels"] = site.metrics.num_elements // (site.num_judged + site.num_set_aside)
        record |= {name: getattr(site.noise, name) for name in _NOISE_FIELDS}
    if site.relative is not None:
        record["relative_l2"] = site.relative.value
        record["incoming"] = site.relative.incoming
    if site.routing is not None:
        record["tokens"] = site.routing.num_tokens
        record["flipped"] = site.routing.num_flipped
        record["unexplained"] = site.routing.num_unexplained
    return record
