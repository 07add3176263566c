"""NoiseLimits: what right ports stay below, by site and figure, for each kind of run and golden.

scripts/calibrate.py measured mm2's own limits on ports without mistakes; they are in calibration.yaml. A limit grows if
fewer tokens T are judged, and if a smaller share of false alarms is allowed:

    limit = usual · exp(z · (spread + token_spread / √T))

Most figures are averages over tokens; with few of them, chance moves these further. For the worst token or channel T is
the same, and the caller divides the share by their number. The two spreads are added, as scripts/fit_limits.py fits
them. z is the standard normal quantile of the allowed share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from scipy.special import bdtrc, ndtri

from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import UsageError

# Smaller shares count as this one: a share of 0 would make a limit infinite.
_SMALLEST_SHARE = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on a figure whose logarithm is about normally distributed among right ports.

    Raises:
        ValueError: `usual` is not above 0, a spread is below 0, or a value is not finite.
    """

    # Value that no limit falls below. As calibrated: mostly the median figure of the right implementation whose median
    # is largest; for the worst token or channel the golden's own error times a margin; for `flipped_share` a
    # probability, which `most_hits` gets.
    usual: float
    spread: float = 0.0  # at least the standard deviation of the figure's logarithm with many tokens
    token_spread: float = 0.0  # what chance adds to it with one token; T tokens: token_spread / √T

    def __post_init__(self) -> None:
        if not (math.isfinite(self.usual) and self.usual > 0.0):
            raise ValueError(f"usual must be above 0, found {self.usual:g}")
        for name in ("spread", "token_spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be at least 0, found {value:g}")

    def at(self, *, num_tokens: int, share: float) -> float:
        """Compute the limit that a right port's figure, of `num_tokens` judged, exceeds in a `share` of the cases."""
        deviation = self.spread + self.token_spread / math.sqrt(max(num_tokens, 1))
        return self.usual * math.exp(quantile(share) * deviation)


def quantile(share: float) -> float:
    """Return the value that a standard normal variable exceeds in a `share` of the cases; 0 for shares above 0.5."""
    return -float(ndtri(min(max(share, _SMALLEST_SHARE), 0.5)))


def most_hits(num_trials: int, *, chance: float, share: float) -> int:
    """Return the largest number of hits that chance explains: more occur in at most a `share` of the cases.

    The trials are independent, and each hits with probability `chance`. A `chance` above 1 counts as 1.
    """
    # bdtrc is the chance of more than `hits`, which falls with their number: bisection finds the first small enough.
    return bisect_left(
        range(num_trials), True, key=lambda hits: bool(bdtrc(hits, num_trials, min(chance, 1.0)) <= share)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitContext:
    """Facts of both sides that limits depend on."""

    backend: str | None  # backend that the port ran on; None if its capture does not say
    is_float32: bool  # whether the golden computed in float32, which has no BF16 noise
    share: float  # share of false alarms allowed to each judged figure
    hides_flips: bool = False  # whether flips (tokens sent to other experts) cannot be told from other tokens
    is_other_graph: bool = False  # whether the model's graph is another than MiniMax-M2's


def computes_in_float32(reference: CaptureSource) -> bool:
    """Decide whether a golden computed in float32; a capture that does not say counts as BF16."""
    description = reference.known_description
    return description is not None and description.provenance.dtypes.get("weights") == "float32"


def backend_of(target: CaptureSource) -> str | None:
    """Return the backend that a port ran on; None if its capture does not say."""
    description = target.known_description
    return None if description is None else description.provenance.backend


ALL_SITES = "all"
# Figures of ρ: of all values, without and of the massive channels alone, and of the median, 99th percentile and worst
# token. Those that say most come first: of equally broken limits, the first is named.
RATIO_FIGURES = ("whole", "ordinary", "massive", "token_median", "token_p99", "token_worst")
# ρ of averages of the error, in which rounding cancels and a systematic mistake does not (their meaning is in
# minimax_tools/metrics/noise_floor.py). They need a float32 twin, and a layer whose input is the golden's.
STRUCTURE_FIGURES = ("token_gain", "channel_gain", "channel_offset", "channel_worst")
# Fewest tokens to judge these by: an average over fewer is noise itself.
FEWEST_FOR_STRUCTURE = 16
NOISE_FIGURES = (*RATIO_FIGURES, *STRUCTURE_FIGURES)
# For goldens without a floor: the error itself, its growth over the layer's input error, and the share of flips.
FLOORLESS_FIGURES = ("relative_l2", "amplification", "flipped_share")


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """Limits by site, then by figure; one under `all` holds for each site without a limit of its own on that figure."""

    table: Mapping[str, Mapping[str, Limit]] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, table: Mapping[str, Mapping[str, Limit]]) -> SiteLimits:
        """Build limits from a table, which is copied."""
        return cls(MappingProxyType({site: MappingProxyType(dict(limits)) for site, limits in table.items()}))

    def find(self, site: str, figure: str) -> Limit | None:
        """Return the limit on a figure of a site; None if it is not limited."""
        limit = self.table.get(site, {}).get(figure)
        return limit if limit is not None else self.table.get(ALL_SITES, {}).get(figure)

    def overlaid(self, other: SiteLimits) -> SiteLimits:
        """Return these limits, replaced by the other's.

        A limit that the other has under `all` replaces the limits of every site on that figure.
        """
        kept = self.without(other.table.get(ALL_SITES, {})).table
        sites = (*self.table, *other.table)
        return SiteLimits.of({site: {**kept.get(site, {}), **other.table.get(site, {})} for site in sites})

    def without(self, figures: Collection[str]) -> SiteLimits:
        """Return these limits without those on some figures."""
        return SiteLimits.of(
            {
                site: {name: limit for name, limit in by_figure.items() if name not in figures}
                for site, by_figure in self.table.items()
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLimits:
    """The limits that tell noise from faults.

    Those called `estimated` are for goldens that kept statistics of their floor and no float32 twin. Variants are other
    right ways to round a layer; they widen the golden's floor, so that right ports exceed it less.
    """

    level: float  # share of comparisons of right ports that may fail by chance
    isolated: SiteLimits  # on ρ, also of averages, for layers whose input is the golden's
    chained: SiteLimits  # on ρ, for layers that inherit an error, which widens their floor
    isolated_estimated: SiteLimits
    chained_estimated: SiteLimits
    without_floor: SiteLimits  # on the error itself, for a golden without a noise floor
    float32: float  # limit on the relative L2 error of float32 runs, which have no BF16 noise
    backends: frozenset[str] | None  # those on which the limits were measured; None for limits meant for all
    slack: float  # on other backends a figure up to this many times its limit warns instead of failing
    other_graphs: float = 1.0  # factor on limits on ρ for models of other graphs than MiniMax-M2's
    isolated_variants: SiteLimits | None = None  # for goldens with variants; None to use `isolated`
    isolated_variants_estimated: SiteLimits | None = None

    def of_ratios(self, *, is_chained: bool, is_estimated: bool, is_widened: bool = False) -> SiteLimits:
        """Return the limits on ρ; those of chains hold whether variants widened the floor or not."""
        if is_chained:
            return self.chained_estimated if is_estimated else self.chained
        of_variants = self.isolated_variants_estimated if is_estimated else self.isolated_variants
        if is_widened and of_variants is not None:
            return of_variants
        return self.isolated_estimated if is_estimated else self.isolated

    def floorless(self, site: str, figure: str) -> Limit:
        """Return a limit on the error itself, for a golden without a floor.

        Raises:
            UsageError: The limits have none.
        """
        limit = self.without_floor.find(site, figure)
        if limit is None:
            raise UsageError(
                f"no limit on {figure} of {site} without a floor",
                expected=f"one under without_floor.{site} or without_floor.{ALL_SITES}",
                next_step="Name it in the criteria file.",
            )
        return limit

    def share(self, num_judged: int) -> float:
        """Return the share of false alarms allowed to each of `num_judged` figures."""
        return self.level / max(num_judged, 1)

    def is_measured_on(self, backend: str | None) -> bool:
        """Decide whether the limits were measured on a backend; None is an unknown one."""
        return self.backends is None or backend in self.backends

    def of_noise_alone(self) -> NoiseLimits:
        """Return these limits for every backend, and without those on averages (`STRUCTURE_FIGURES`).

        For bisection, which reports how large an error noise can hide. Averages would show smaller errors.
        """
        isolated: dict[str, Any] = {
            name: table.without(STRUCTURE_FIGURES)
            for name in ("isolated", "isolated_variants")
            if (table := getattr(self, name)) is not None
        }
        return replace(self, **isolated, backends=None)
