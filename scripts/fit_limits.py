"""Limits fitted to the differences of right ports from their goldens.

A *figure* is one measure of the difference, such as ρ. A *record*, by `measure_noise`, holds the figures of one site in
one comparison: `whole` is ρ over all tokens, `incoming` the inherited error, `tokens` the number of tokens judged;
`hidden` is true if the run hid its choice of experts. `floor` says what the golden kept: `full` (with twins), `stats`
(statistics alone), either with `_variants`, or `off`. A `Limit` has three parts:

- `usual`: the median figure of the implementation that is furthest off. Implementations round in different places.
- `spread`: standard deviation of the figure's logarithm around it, over layers, seeds and prompts.
- `token_spread`: what is added to `spread`, over √T, for few tokens T.

The limit grows from the usual figure until chance exceeds it in the allowed share of cases: `quantile` gives the number
of standard deviations that chance exceeds in a share of cases. Planted mistakes play no part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compare.limits.limits import (
    ALL_SITES,
    FEWEST_FOR_STRUCTURE,
    NOISE_FIGURES,
    RATIO_FIGURES,
    STRUCTURE_FIGURES,
    Limit,
    quantile,
)
from minimax_tools.model.sites import ModelSite, Site

Record = Mapping[str, Any]
Table = dict[str, dict[str, Limit]]  # limits by site and figure

# From this many tokens on, more tokens do not lower the spread.
_MANY_TOKENS = 100
# Where port and golden have equal bits, nothing spreads. On other hardware it would, and more so in a chain.
_LEAST_SPREAD = {"isolated": 0.02, "chained": 0.05}
# These figures average few values. If the port's roundings are independent of the golden's, chance alone gives them
# this token spread. On the machine that is measured most roundings are equal, on others they are not.
_LEAST_TOKEN_SPREAD = {"token_gain": 1.0, "channel_worst": 1.0, "massive": 0.5}
# Factor on the worst token's limit: few of the worst possible tokens were measured.
_WORST_MARGIN = 1.5
# Factor on structure figures, averages in which noise almost cancels: they show differences below the noise, and those
# of right ports grow with model and prompts.
_STRUCTURE_MARGIN = 1.25
# Factor on limits without a noise floor: on other models right ports may differ more than on synthetic ones.
_FLOORLESS_MARGIN = 1.5
# Factors for models that were not measured. Tokens share the rounding of the keys before them, so averages over many
# tokens spread as much as a single value. On such models right ports reached 1.1 times the limits of errors, 1.2 times
# those of single tokens, and 1.5 times those of averages.
_MODEL_MARGINS = {
    **dict.fromkeys(RATIO_FIGURES, 1.15),
    **dict.fromkeys(("token_p99", "token_worst"), 1.25),
    **dict.fromkeys(STRUCTURE_FIGURES, 2.0),
}
# Least token spread of ρ with a floor that variants (copies that round elsewhere) widen: that of one token's error in a
# few dozen channels. The floor is the largest of three draws, so most figures are below 1 and do not show it.
_TOKEN_SPREAD = 0.1
# A smaller inherited error, of a few roundings to BF16, tells nothing of its growth: the site's own error outweighs it.
_LEAST_INHERITED = 5e-3
# A limit without a floor is at most this times the largest error measured, at the rarest chance that is judged.
_MAX_OVER_LARGEST = 1.25
_RAREST_CHANCE = 1e-8
# Figures of the worst of many, and the record's field with the number of these.
_NUMBER_FIELDS = {"token_worst": "tokens", "channel_worst": "channels"}
# Figures of k routing weights have too few values to stand for other sites.
_UNLIKE_OTHERS = (Site.ROUTER_WEIGHTS,)
# If no figure of a site is above this, all ports equal the golden there: the site does not stand for others.
_LEAST_OF_LARGEST = 1.001
_SITES = (*(str(site) for site in Site), *(str(site) for site in ModelSite))


def fit_ratios(records: Sequence[Record], *, mode: str, floor: str) -> Table:
    """Fit the limits on ρ and the figures in its unit, by site, and for `ALL_SITES` the median of the sites.

    Values below 1 are better than the golden, and count as 1. A site gets a limit of its own if that is wider. Only
    records count that have this mode, `isolated` or `chained`, and this floor, other than `off`.
    """
    chosen = [
        record
        for record in records
        if (record["mode"], record["floor"]) == (mode, floor)
        and record.get("whole") is not None
        # The first layer of a chain inherits no error: it is judged as an isolated one.
        and (record["incoming"] > 0.0) == (mode == "chained")
    ]
    # Structure figures need float32 twins, and an error that is the layer's own.
    figures = NOISE_FIGURES if mode == "isolated" and floor.startswith("full") else RATIO_FIGURES
    table: Table = defaultdict(dict)
    for figure in figures:
        by_site = {
            site: limit
            for site in _SITES
            if (limit := _fit_figure([r for r in chosen if r["site"] == site], figure)) is not None
        }
        if not by_site:
            continue
        # A figure that a comparison could not measure is None.
        largest = {site: max(r[figure] or 0.0 for r in chosen if r["site"] == site) for site in by_site}
        typical = [
            site for site in by_site if site not in _UNLIKE_OTHERS and largest[site] > _LEAST_OF_LARGEST
        ]
        pooled = _combine([by_site[site] for site in typical or by_site], np.median)
        if figure in STRUCTURE_FIGURES:
            pooled = _scale(pooled, _STRUCTURE_MARGIN)
            by_site = {site: _scale(limit, _STRUCTURE_MARGIN) for site, limit in by_site.items()}
        table[ALL_SITES][figure] = pooled
        for site, limit in by_site.items():
            wider = _combine((limit, pooled), max)
            if wider != pooled:
                table[site][figure] = wider
    return dict(table)


def widen(table: Table, other: Table) -> Table:
    """Return the wider limit of both tables, for each site and figure of either."""
    tables = (table, other)
    figures = list(dict.fromkeys(figure for each in tables for limits in each.values() for figure in limits))
    wide: Table = {}
    for site in dict.fromkeys((*table, *other)):
        wide[site] = {}
        for figure in figures:
            limits = [limit for each in tables if (limit := _find(each, site, figure)) is not None]
            if limits:
                wide[site][figure] = _combine(limits, max)
    everywhere = wide[ALL_SITES]
    # A site needs no limit that equals that of all sites.
    return {
        site: {
            figure: limit
            for figure, limit in limits.items()
            if site == ALL_SITES or limit != everywhere.get(figure)
        }
        for site, limits in wide.items()
    }


def with_model_margin(table: Table) -> Table:
    """Widen limits by the margins for models that were not measured."""

    def widened(figure: str, limit: Limit) -> Limit:
        least = _TOKEN_SPREAD if figure in RATIO_FIGURES else 0.0
        return replace(
            limit, usual=_MODEL_MARGINS[figure] * limit.usual, token_spread=max(limit.token_spread, least)
        )

    return {
        site: {figure: widened(figure, limit) for figure, limit in limits.items()}
        for site, limits in table.items()
    }


def fit_floorless(records: Sequence[Record], ratios: Table) -> Table:
    """Fit the limits for goldens without a noise floor: relative error, growth of an inherited error, share of flips.

    `ratios` are the limits on ρ of isolated layers, which tell how far a port may be from the exact value.
    """
    table: Table = defaultdict(dict)
    for site in _SITES:
        limit = _fit_relative([r for r in records if r["site"] == site], ratios)
        if limit is not None:
            table[site]["relative_l2"] = limit
    errors = [figures["relative_l2"] for figures in table.values()]
    table[ALL_SITES]["relative_l2"] = max(errors, key=lambda limit: limit.usual)
    for site, grown in _measure_growth(records).items():
        limit = _fit_growth(grown)
        if limit is not None:
            table[site]["amplification"] = _scale(limit, _FLOORLESS_MARGIN)
    growths = [figures["amplification"] for figures in table.values() if "amplification" in figures]
    if growths:
        table[ALL_SITES]["amplification"] = max(growths, key=lambda limit: limit.usual)
    share = _flipped_share(records, table[Site.ROUTER_LOGITS]["relative_l2"].usual)
    table[ALL_SITES]["flipped_share"] = Limit(usual=_rounded(_FLOORLESS_MARGIN * share))
    return dict(table)


def _find(table: Table, site: str, figure: str) -> Limit | None:
    """Find the limit of a site, else that of all sites."""
    return table.get(site, {}).get(figure) or table.get(ALL_SITES, {}).get(figure)


def _fit_figure(records: Sequence[Record], figure: str) -> Limit | None:
    """Fit the limit on one figure of one site; None if it was not measured with many tokens."""
    is_ratio = figure in NOISE_FIGURES
    usable = [
        {**r, figure: max(r[figure], 1.0) if is_ratio else r[figure]}
        for r in records
        if r.get(figure) is not None
        and r[figure] > 0.0
        and (figure not in STRUCTURE_FIGURES or r["tokens"] >= FEWEST_FOR_STRUCTURE)
    ]
    many = [r for r in usable if r["tokens"] >= _MANY_TOKENS]
    few = [r for r in usable if r["tokens"] < _MANY_TOKENS]
    if not many:
        return None
    if figure in _NUMBER_FIELDS:
        return _fit_worst(many, few, figure)
    groups = _group(many)
    usual = max(float(np.median([r[figure] for r in group])) for group in groups)
    spread = max(_least_spread(many), _pooled_deviation(groups, figure), _needed_spread(many, figure, usual))
    token_spread = _LEAST_TOKEN_SPREAD.get(figure, 0.0)
    for num_tokens in {r["tokens"] for r in few}:
        alike = [r for r in few if r["tokens"] == num_tokens]
        deviation = max(_pooled_deviation(_group(alike), figure), _needed_spread(alike, figure, usual))
        token_spread = max(token_spread, (deviation - spread) * num_tokens**0.5)
    return Limit(usual=_rounded(usual), spread=_rounded(spread), token_spread=_rounded(token_spread))


def _fit_worst(many: Sequence[Record], few: Sequence[Record], figure: str) -> Limit:
    """Fit the limit on the worst of many tokens or channels; each spreads around the golden's own error."""

    def deviation(records: Sequence[Record]) -> float:
        # The largest of n draws is about the one that chance exceeds in half of 1/n of the cases.
        num_drawn = sum(r[_NUMBER_FIELDS[figure]] for r in records)
        largest = max(r[figure] for r in records)
        return max(float(np.log(largest)) / quantile(0.5 / num_drawn), 0.0)

    spread = max([_least_spread(many), *(deviation(group) for group in _group(many))])
    token_spread = _LEAST_TOKEN_SPREAD.get(figure, 0.0)
    for num_tokens in {r["tokens"] for r in few}:
        alike = [r for r in few if r["tokens"] == num_tokens]
        token_spread = max(token_spread, (deviation(alike) - spread) * num_tokens**0.5)
    margin = _WORST_MARGIN if figure == "token_worst" else 1.0
    return Limit(usual=margin, spread=_rounded(spread), token_spread=_rounded(token_spread))


def _measure_growth(records: Sequence[Record]) -> Mapping[str, list[Record]]:
    """Return by site the records of chains that inherit an error, with its growth: relative over inherited error."""
    grown: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        is_measured = r["floor"] == "off" and r.get("relative_l2") is not None and not r["hidden"]
        if is_measured and r["mode"] == "chained" and r["incoming"] >= _LEAST_INHERITED:
            grown[r["site"]].append({**r, "growth": r["relative_l2"] / r["incoming"]})
    return grown


def _fit_growth(records: Sequence[Record]) -> Limit | None:
    """Fit the limit on the growth of an inherited error.

    Growth below the usual is raised to the usual. It is small if experts ignore the error, or if tokens past a flip are
    left out, which tells nothing of how large it may be. Flips leave varying numbers of tokens, each in few layers. So
    similar numbers of tokens are taken together.
    """
    medians = [
        float(np.median([r["growth"] for r in group]))
        for group in _group([r for r in records if r["tokens"] >= _MANY_TOKENS])
    ]
    if not medians:
        return None
    rounded_up = _round_up_tokens({r["tokens"] for r in records})
    raised = [{**r, "growth": max(r["growth"], *medians), "tokens": rounded_up[r["tokens"]]} for r in records]
    return _fit_figure(raised, "growth")


def _round_up_tokens(numbers: Iterable[int]) -> Mapping[int, int]:
    """Map each number of tokens to the largest with as many binary digits; numbers from `_MANY_TOKENS` on stay."""
    largest: dict[int, int] = {}
    for number in sorted(number for number in numbers if number < _MANY_TOKENS):
        largest[number.bit_length()] = number
    return {number: number if number >= _MANY_TOKENS else largest[number.bit_length()] for number in numbers}


def _fit_relative(records: Sequence[Record], ratios: Table) -> Limit | None:
    """Fit the limit on the relative error to the golden's own error and the limit on ρ."""
    floors = [
        r
        for r in records
        if r["floor"] == "full" and not r["hidden"] and r["mode"] == "isolated" and r.get("floor_relative")
    ]
    limit = _fit_figure(floors, "floor_relative")
    if limit is None:
        return None
    rho = ratios.get(records[0]["site"], {}).get("whole", ratios[ALL_SITES]["whole"]).usual
    # The golden is off by its floor, the port by ρ times that, independently.
    return replace(limit, usual=_rounded(_FLOORLESS_MARGIN * limit.usual * float(np.hypot(1.0, rho))))


def capped(limit: Limit, *, largest: float, rho: float) -> Limit:
    """Cap a limit of `fit_floorless` on the relative error near the largest error that was measured.

    Models differ more than the tokens of one model, and not normally. A spread extrapolated to a single token would let
    any error pass. `largest` is the largest error of a golden at the site, for any number of tokens; `rho` is the usual
    ρ of right ports.
    """
    cap = _MAX_OVER_LARGEST * _FLOORLESS_MARGIN * float(np.hypot(1.0, rho)) * largest
    # The spread with which a single token reaches the cap at the rarest chance.
    most = math.log(max(cap / limit.usual, _MAX_OVER_LARGEST)) / quantile(_RAREST_CHANCE)
    spread = min(limit.spread, most)
    return replace(
        limit, spread=_rounded(spread), token_spread=_rounded(min(limit.token_spread, most - spread))
    )


def _flipped_share(records: Sequence[Record], logits_error: float) -> float:
    """Return the share of tokens that flip at the usual error of the router logits, where it is largest."""
    inherited = {
        _run_of(r): r["incoming"]
        for r in records
        if r["site"] == Site.ROUTER_LOGITS and r["floor"] == "off" and r.get("relative_l2") is not None
    }
    flips: dict[tuple[Any, ...], float] = defaultdict(float)
    tokens: dict[tuple[Any, ...], float] = defaultdict(float)
    for record in records:
        if record.get("flipped") is not None and record["floor"] == "off" and not record["hidden"]:
            group = (*_group_of(record), record["mode"])
            flips[group] += record["flipped"]
            # An inherited error makes more tokens flip: it counts as so many more tokens.
            widening = float(np.hypot(logits_error, inherited.get(_run_of(record), 0.0))) / logits_error
            tokens[group] += record["tokens"] * widening
    return max(flips[group] / max(tokens[group], _MANY_TOKENS) for group in flips)


def _group_of(record: Record) -> tuple[Any, ...]:
    """Return what makes systematic differences: the port's and golden's implementations, and the model's shape."""
    return record["port"], record["golden"], record["shape"]


def _run_of(record: Record) -> tuple[Any, ...]:
    """Return the layer and the run of a record, however they were compared."""
    return (*_group_of(record), record["seed"], tuple(record["lengths"]), record["mode"], record["layer"])


def _group(records: Iterable[Record]) -> list[list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[_group_of(record)].append(record)
    return list(groups.values())


def _least_spread(records: Sequence[Record]) -> float:
    return max(_LEAST_SPREAD[record["mode"]] for record in records)


def _pooled_deviation(groups: Sequence[Sequence[Record]], figure: str) -> float:
    """Compute the standard deviation of the figure's logarithm within groups."""
    squares, freedom = 0.0, 0
    for group in groups:
        logarithms = np.log([r[figure] for r in group])
        squares += float(((logarithms - logarithms.mean()) ** 2).sum())
        freedom += len(group) - 1
    return (squares / freedom) ** 0.5 if freedom > 0 else 0.0


def _needed_spread(records: Sequence[Record], figure: str, usual: float) -> float:
    """Compute the spread with which chance gives the largest of the records."""
    largest = max(r[figure] for r in records)
    return max(float(np.log(largest / usual)) / quantile(0.5 / max(len(records), 2)), 0.0)


def _scale(limit: Limit, factor: float) -> Limit:
    return replace(limit, usual=_rounded(factor * limit.usual))


def _combine(limits: Sequence[Limit], choose: Callable[[list[float]], Any]) -> Limit:
    """Combine limits part by part, by the largest or the median."""
    usual, spread, token_spread = (
        _rounded(choose([getattr(limit, name) for limit in limits]))
        for name in ("usual", "spread", "token_spread")
    )
    return Limit(usual=usual, spread=spread, token_spread=token_spread)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
