"""What clean ports differ by, as records: one for each judged site of each comparison.

Each run is compared as different goldens would have it: with float32 twins, with the floor's statistics alone, without
a floor, and with a floor that other right ways to compute a layer widen; and with the port's choice of experts hidden,
where tokens past a flip cannot be told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from clean_ports import CleanModel, CleanPort, Setting

from compare.comparer import compare_captures
from compare.limits.criteria import DEFAULT_ATOL, DEFAULT_RTOL, Criteria
from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.noise_floor import error_name, token_rows
from minimax_tools.model.sites import Site
from minimax_tools.results.results import SiteResult

# A floor that variants widen is named apart: it is another unit.
FLOORS = ("full", "stats", "off", "full_variants", "stats_variants")
_WITH_VARIANTS = "_variants"
# Sites that a hidden choice of experts changes anything for.
_PAST_A_FLIP = ("router_weights", "moe_delta", "output")


class PartialFloor(Capture):
    """A golden that kept less of its floor than its files hold."""

    def __init__(self, capture: Capture, floor: str) -> None:
        super().__init__(capture.directory, capture.manifest)
        self._floor = floor

    @property
    def description(self) -> Description:
        """With the floor that it is said to have kept, of `FLOORS`."""
        whole = self.manifest.description
        return replace(
            whole,
            noise_floor=self._floor.removesuffix(_WITH_VARIANTS),
            floor_variants=whole.floor_variants if self._floor.endswith(_WITH_VARIANTS) else (),
        )


class HiddenExperts(Capture):
    """A run of a port that does not show which experts it chose."""

    def sites(self, layer: int) -> tuple[Site, ...]:
        """All but the choice."""
        return tuple(site for site in super().sites(layer) if site is not Site.ROUTER_EXPERTS)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """The choice too."""
        return (*super().not_exposed(layer), Site.ROUTER_EXPERTS)


def measure(
    clean: CleanModel,
    setting: Setting,
    port: CleanPort,
    mode: str,
    run: Capture,
    *,
    floors: Collection[str] = FLOORS,
) -> Iterator[dict[str, Any]]:
    """The records of one run, against goldens of these floors."""
    hidden = HiddenExperts(run.directory, run.manifest)
    views: list[tuple[str, Capture]] = [
        *((floor, run) for floor in FLOORS if floor in floors),
        *((floor, hidden) for floor in ("full", "off") if floor in floors),
    ]
    for floor, target in views:
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
    """What BF16 cost the golden at a site, relative to its value, over all real tokens."""
    if site.layer is None or site.site == Site.ROUTER_EXPERTS:
        return None
    name = Site(site.site)
    error = golden.read_floor(site.layer, error_name(name))
    assert error is not None, "a golden of this script keeps its whole floor"
    real = golden.read_attention_mask().bool()
    rows = token_rows(golden.read(site.layer, name), name)[real]
    return float(error[real].double().norm() / rows.double().norm())


def _figures(site: SiteResult) -> dict[str, Any]:
    record: dict[str, Any] = {"layer": site.layer, "site": site.site, "status": site.status.value}
    record["tokens"] = site.num_judged
    if site.noise is not None:
        assert site.metrics is not None, "ρ is measured beside the seeds' metrics"
        record["channels"] = site.metrics.num_elements // (site.num_judged + site.num_set_aside)
        for name in (
            *(
                "whole",
                "ordinary",
                "massive",
                "token_median",
                "token_p99",
                "token_worst",
                "incoming",
                "interval",
            ),
            *("token_gain", "channel_gain", "channel_offset", "channel_worst"),
        ):
            record[name] = getattr(site.noise, name)
    if site.relative is not None:
        record["relative_l2"] = site.relative.value
        record["incoming"] = site.relative.incoming
    if site.routing is not None:
        record["tokens"] = site.routing.num_tokens
        record["flipped"] = site.routing.num_flipped
        record["unexplained"] = site.routing.num_unexplained
    return record
