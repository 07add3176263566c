"""Limits fitted to the differences of right ports from their goldens.

Implementations round in different places: the usual figure is that of the one that is furthest off. Logarithms of
the figures of layers, seeds and prompts stray around it about normally, and more with fewer tokens. A limit is the
usual figure times the factor of chance at the allowed share of false alarms. Planted mistakes play no part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compare.limits.limit import Limit, quantile
from compare.limits.limits import (
    ALL_SITES,
    FEWEST_FOR_STRUCTURE,
    NOISE_FIGURES,
    RATIO_FIGURES,
    STRUCTURE_FIGURES,
)
from minimax_tools.model.sites import ModelSite, Site

Record = Mapping[str, Any]
Table = dict[str, dict[str, Limit]]

# With more tokens than this, figures stray no less.
_MANY_TOKENS = 100
# Equal bits on both sides do not stray. On other hardware they would, and more so in a chain.
_LEAST_SPREAD = {"isolated": 0.02, "chained": 0.05}
# These figures average few values: chance alone makes them stray by this over √T, for T tokens, where the port's
# roundings are independent of the golden's. On one machine most roundings are equal, on others they are not.
_LEAST_TOKEN_SPREAD = {"token_gain": 1.0, "channel_worst": 1.0, "massive": 0.5}
# Few of the worst possible tokens were measured.
_WORST_MARGIN = 1.5
# Averages resolve less than the noise, and systematic differences of right ports grow with model and prompts.
_STRUCTURE_MARGIN = 1.25
# Without a noise floor of the model itself, right ports may stray more than on synthetic models.
_FLOORLESS_MARGIN = 1.5
# Margins for models that were not measured. Tokens share the rounding of the keys before them, so that averages over
# many tokens stray as much as a single value. On such models right ports reached 1.1 of the limits of errors, 1.2 of
# those of single tokens, and 1.5 of those of averages.
_MODEL_MARGINS = {
    **dict.fromkeys(RATIO_FIGURES, 1.15),
    **dict.fromkeys(("token_p99", "token_worst"), 1.25),
    **dict.fromkeys(STRUCTURE_FIGURES, 2.0),
}
# The error of one token in a few dozen channels strays by about this much. The floor is the largest of three draws,
# so most figures are below 1 and do not show it.
_TOKEN_SPREAD = 0.1
# A smaller inherited error, of a few roundings to BF16, tells nothing of its growth: the site's own error outweighs it.
_LEAST_INHERITED = 5e-3
# A limit without a floor is at most this times the largest error that was measured, at the rarest chance.
_FURTHEST = 1.25
_RAREST = 1e-8
_WORST_OF = {"token_worst": "tokens", "channel_worst": "channels"}
# Figures of k routing weights have too few values to stand for other sites.
_APART = (Site.ROUTER_WEIGHTS,)
# Sites where all ports equal the golden bit for bit do not stand for other sites.
_TELLING = 1.001
_PLACES = (*(str(site) for site in Site), *(str(site) for site in ModelSite))


def fit_ratios(records: Sequence[Record], *, mode: str, floor: str) -> Table:
    """Fit the limits on ρ and the figures in its unit, by site.

    Values below 1 are better than the golden, and count as 1.

    Args:
        records: Records of right ports.
        mode: `isolated` or `chained`.
        floor: Kind of the goldens' noise floor: `full` or `stats`, with `_variants` behind it where it is widened.
    """
    chosen = [
        record
        for record in records
        if (record["mode"], record["floor"]) == (mode, floor)
        and record.get("whole") is not None
        # The first layer of a chain inherits no error: it is judged as an isolated one.
        and (record["incoming"] > 0.0) == (mode == "chained")
    ]
    figures = NOISE_FIGURES if mode == "isolated" and floor.startswith("full") else RATIO_FIGURES
    table: Table = defaultdict(dict)
    for figure in figures:
        by_site = {
            site: fitted
            for site in _PLACES
            if (fitted := _fit([r for r in chosen if r["site"] == site], figure)) is not None
        }
        if by_site:
            largest = {site: max(r[figure] or 0.0 for r in chosen if r["site"] == site) for site in by_site}
            telling = [site for site in by_site if site not in _APART and largest[site] > _TELLING]
            pooled = _each([by_site[site] for site in telling or by_site], np.median)
            if figure in STRUCTURE_FIGURES:
                pooled = _times(pooled, _STRUCTURE_MARGIN)
                by_site = {site: _times(limit, _STRUCTURE_MARGIN) for site, limit in by_site.items()}
            table[ALL_SITES][figure] = pooled
            for site, limit in by_site.items():
                wider = _each((limit, pooled), max)
                if wider != pooled:
                    table[site][figure] = wider
    return dict(table)


def widen(table: Table, other: Table) -> Table:
    """Return the wider limit of both tables, for each site and figure of either."""
    sites = list(dict.fromkeys((*table, *other)))
    figures = list(dict.fromkeys(name for one in (table, other) for own in one.values() for name in own))

    def find(one: Table, site: str, figure: str) -> Limit | None:
        return one.get(site, {}).get(figure) or one.get(ALL_SITES, {}).get(figure)

    wide: Table = {}
    for site in sites:
        wide[site] = {}
        for figure in figures:
            found = [limit for one in (table, other) if (limit := find(one, site, figure)) is not None]
            if found:
                wide[site][figure] = _each(found, max)
    everywhere = wide[ALL_SITES]
    return {
        site: {
            figure: limit
            for figure, limit in own.items()
            if site == ALL_SITES or limit != everywhere.get(figure)
        }
        for site, own in wide.items()
    }


def with_model_margin(table: Table) -> Table:
    """Widen limits by the margins for models that were not measured."""

    def widened(figure: str, limit: Limit) -> Limit:
        least = _TOKEN_SPREAD if figure in RATIO_FIGURES else 0.0
        return replace(
            limit, usual=_MODEL_MARGINS[figure] * limit.usual, token_spread=max(limit.token_spread, least)
        )

    return {
        site: {figure: widened(figure, limit) for figure, limit in own.items()} for site, own in table.items()
    }


def fit_floorless(records: Sequence[Record], ratios: Table) -> Table:
    """Fit the limits on the relative error, for goldens without a noise floor.

    Args:
        records: Records of right ports.
        ratios: Limits on ρ of isolated layers. Golden and port may each be so far from the exact value.
    """
    table: Table = defaultdict(dict)
    off = [record for record in records if record["floor"] == "off" and record.get("relative_l2") is not None]
    for site in _PLACES:
        limit = _fit_relative([r for r in records if r["site"] == site], ratios)
        if limit is not None:
            table[site]["relative_l2"] = limit
    usual = [figures["relative_l2"] for figures in table.values()]
    table[ALL_SITES]["relative_l2"] = max(usual, key=lambda limit: limit.usual)
    growths = defaultdict(list)
    for record in off:
        if record["mode"] == "chained" and record["incoming"] >= _LEAST_INHERITED and not record["hidden"]:
            growths[record["site"]].append({**record, "growth": record["relative_l2"] / record["incoming"]})
    for site, own in growths.items():
        fitted = _fit_growth(own)
        if fitted is not None:
            table[site]["amplification"] = _times(fitted, _FLOORLESS_MARGIN)
    grown = [figures["amplification"] for figures in table.values() if "amplification" in figures]
    if grown:
        table[ALL_SITES]["amplification"] = max(grown, key=lambda limit: limit.usual)
    share = _flipped_share(records, table[Site.ROUTER_LOGITS]["relative_l2"].usual)
    table[ALL_SITES]["flipped_share"] = Limit(usual=_rounded(_FLOORLESS_MARGIN * share))
    return dict(table)


def _fit(records: Sequence[Record], figure: str) -> Limit | None:
    """Fit the limit on one figure of one site; None where it was not measured."""
    is_ratio = figure in NOISE_FIGURES
    known = [
        {**r, figure: max(r[figure], 1.0) if is_ratio else r[figure]}
        for r in records
        if r.get(figure) is not None
        and r[figure] > 0.0
        and (figure not in STRUCTURE_FIGURES or r["tokens"] >= FEWEST_FOR_STRUCTURE)
    ]
    many = [r for r in known if r["tokens"] >= _MANY_TOKENS]
    few = [r for r in known if r["tokens"] < _MANY_TOKENS]
    if not many:
        return None
    groups = _grouped(many)
    among = _WORST_OF.get(figure)
    if among is not None:
        return _fit_worst(many, few, figure, among)
    usual = max(float(np.median([r[figure] for r in group])) for group in groups)
    spread = max(_least(many), _pooled_deviation(groups, figure), _reach(many, figure, usual))
    token_spread = _LEAST_TOKEN_SPREAD.get(figure, 0.0)
    for num_tokens in {r["tokens"] for r in few}:
        own = [r for r in few if r["tokens"] == num_tokens]
        deviation = max(_pooled_deviation(_grouped(own), figure), _reach(own, figure, usual))
        token_spread = max(token_spread, (deviation - spread) * num_tokens**0.5)
    return Limit(usual=_rounded(usual), spread=_rounded(spread), token_spread=_rounded(token_spread))


def _fit_worst(many: Sequence[Record], few: Sequence[Record], figure: str, among: str) -> Limit:
    """Fit the limit on the worst of many tokens or channels, each of which strays around the golden's own error."""

    def deviation(records: Sequence[Record]) -> float:
        num_drawn = sum(r[among] for r in records)
        largest = max(r[figure] for r in records)
        return max(float(np.log(largest)) / quantile(0.5 / num_drawn), 0.0)

    spread = max([_least(many), *(deviation(group) for group in _grouped(many))])
    token_spread = _LEAST_TOKEN_SPREAD.get(figure, 0.0)
    for num_tokens in {r["tokens"] for r in few}:
        own = [r for r in few if r["tokens"] == num_tokens]
        token_spread = max(token_spread, (deviation(own) - spread) * num_tokens**0.5)
    margin = _WORST_MARGIN if figure == "token_worst" else 1.0
    return Limit(usual=margin, spread=_rounded(spread), token_spread=_rounded(token_spread))


def _fit_growth(records: Sequence[Record]) -> Limit | None:
    """Fit the limit on the growth of an inherited error.

    Growth below the usual is raised to it: it is small where experts ignore the error, or where tokens past a flip are
    left out. That tells nothing of how large it may be. Flips leave varying numbers of tokens, each in few layers, so
    numbers up to twice as large are taken together.
    """
    medians = [
        float(np.median([r["growth"] for r in group]))
        for group in _grouped([r for r in records if r["tokens"] >= _MANY_TOKENS])
    ]
    if not medians:
        return None
    as_many = _taken_together({r["tokens"] for r in records})
    alike = [{**r, "growth": max(r["growth"], max(medians)), "tokens": as_many[r["tokens"]]} for r in records]
    return _fit(alike, "growth")


def _taken_together(numbers: Iterable[int]) -> Mapping[int, int]:
    """Map each number of tokens to the largest of its group; numbers from `_MANY_TOKENS` on stay."""
    largest: dict[int, int] = {}
    for number in sorted(number for number in numbers if number < _MANY_TOKENS):
        largest[number.bit_length()] = number
    return {number: number if number >= _MANY_TOKENS else largest[number.bit_length()] for number in numbers}


def _fit_relative(records: Sequence[Record], ratios: Table) -> Limit | None:
    """Fit the limit on the relative error to the golden's own error and the limit on ρ."""
    floors = [
        {**r, "both": r["floor_relative"]}
        for r in records
        if r["floor"] == "full" and not r["hidden"] and r["mode"] == "isolated" and r.get("floor_relative")
    ]
    fitted = _fit(floors, "both")
    if fitted is None:
        return None
    rho = ratios.get(records[0]["site"], {}).get("whole", ratios[ALL_SITES]["whole"]).usual
    return Limit(
        usual=_rounded(_FLOORLESS_MARGIN * fitted.usual * float(np.hypot(1.0, rho))),
        spread=fitted.spread,
        token_spread=fitted.token_spread,
    )


def capped(limit: Limit, *, largest: float, rho: float) -> Limit:
    """Cap a limit on the relative error near the largest error that was measured.

    Models differ more than the tokens of one model, and not normally. A deviation extrapolated to a single token would
    let any error pass.

    Args:
        limit: The fitted limit.
        largest: Largest error of a golden at the site, for any number of tokens.
        rho: Usual ρ of right ports.
    """
    furthest = _FURTHEST * _FLOORLESS_MARGIN * float(np.hypot(1.0, rho)) * largest
    reach = math.log(max(furthest / limit.usual, _FURTHEST)) / quantile(_RAREST)
    spread = min(limit.spread, reach)
    return replace(
        limit, spread=_rounded(spread), token_spread=_rounded(min(limit.token_spread, reach - spread))
    )


def _flipped_share(records: Sequence[Record], logits_error: float) -> float:
    """Return the share of tokens that flip at the usual error of the logits, in the group that flips most."""
    inherited = {
        _run_of(r): r["incoming"]
        for r in records
        if r["site"] == Site.ROUTER_LOGITS and r["floor"] == "off" and r.get("relative_l2") is not None
    }
    flips: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        if record.get("flipped") is not None and record["floor"] == "off" and not record["hidden"]:
            widening = float(np.hypot(logits_error, inherited.get(_run_of(record), 0.0))) / logits_error
            group = (*_group_of(record), record["mode"])
            counts = flips[group]
            counts[0] += record["flipped"]
            counts[1] += record["tokens"] * widening
    return max(flipped / max(tokens, _MANY_TOKENS) for flipped, tokens in flips.values())


def _group_of(record: Record) -> tuple[Any, ...]:
    """Return the systematic differences of a record: implementations, and the model's shape."""
    return record["port"], record["golden"], record["shape"]


def _run_of(record: Record) -> tuple[Any, ...]:
    """Return the layer and the run of a record, however they were compared."""
    return (*_group_of(record), record["seed"], tuple(record["lengths"]), record["mode"], record["layer"])


def _grouped(records: Iterable[Record]) -> list[list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[_group_of(record)].append(record)
    return list(groups.values())


def _least(records: Sequence[Record]) -> float:
    return max(_LEAST_SPREAD[record["mode"]] for record in records)


def _pooled_deviation(groups: Sequence[Sequence[Record]], figure: str) -> float:
    """Compute the standard deviation of the figure's logarithm within groups."""
    squares, freedom = 0.0, 0
    for group in groups:
        logarithms = np.log([r[figure] for r in group])
        squares += float(((logarithms - logarithms.mean()) ** 2).sum())
        freedom += len(group) - 1
    return (squares / freedom) ** 0.5 if freedom > 0 else 0.0


def _reach(records: Sequence[Record], figure: str, usual: float) -> float:
    """Compute the deviation at which the largest of the records is just the expected one."""
    largest = max(r[figure] for r in records)
    return max(float(np.log(largest / usual)) / quantile(0.5 / max(len(records), 2)), 0.0)


def _times(limit: Limit, factor: float) -> Limit:
    return replace(limit, usual=_rounded(factor * limit.usual))


def _each(limits: Sequence[Limit], choose: Callable[[list[float]], Any]) -> Limit:
    """Choose each part of a limit among those of `limits`: the largest, or the median."""
    usual, spread, token_spread = (
        _rounded(choose([getattr(limit, name) for limit in limits]))
        for name in ("usual", "spread", "token_spread")
    )
    return Limit(usual=usual, spread=spread, token_spread=token_spread)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
