"""Limits fitted to what clean ports were measured to differ by.

Implementations differ in where they round, so the one that is furthest off gives what is usual; layers, seeds and
prompts stray around that, about as their logarithms' normal distribution, and the fewer tokens, the more. A limit is
the usual figure times what chance adds at the share of false alarms that is allowed. No planted mistake is looked at.
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

# Figures of so many tokens or more stray as little as they ever will.
_MANY_TOKENS = 100
# Where both sides compute the same bits nothing strays; on other hardware it would, and a chain adds to it.
_LEAST_SPREAD = {"isolated": 0.02, "chained": 0.05}
# Of so few values does a figure of T tokens consist that chance alone makes it stray by this over √T, where a port's
# roundings are other draws than the golden's: on one machine most of them are the same, on others not.
_LEAST_TOKEN_SPREAD = {"token_gain": 1.0, "channel_worst": 1.0, "massive": 0.5}
# Of the worst tokens there are, few were among those that were measured.
_WORST_MARGIN = 1.5
# Averages show less than noise, and what is systematic in a right port grows with its size and its prompts.
_STRUCTURE_MARGIN = 1.25
# Synthetic models are not the most that a right port may come to where nothing was measured on the model itself.
_FLOORLESS_MARGIN = 1.5
# Models stray apart as their layers do, and few were measured; the rounding of a few keys is shared by all tokens
# behind them, so that averages over many tokens stray as a single value does. Where nothing was fitted, right ports
# came to 1.1 of the limits of errors, 1.2 of those of single tokens and 1.5 of those of averages.
_MODEL_MARGINS = {
    **dict.fromkeys(RATIO_FIGURES, 1.15),
    **dict.fromkeys(("token_p99", "token_worst"), 1.25),
    **dict.fromkeys(STRUCTURE_FIGURES, 2.0),
}
# The error of one token in a few dozen channels strays by about this much from draw to draw. The floor is the largest
# of three draws, so that most figures are below 1 and do not show it.
_TOKEN_SPREAD = 0.1
# Of less than a few roundings to BF16 nothing tells what grew: a site's own error, which its limit holds already, would
# be taken for what became of the error that was handed on.
_LEAST_HANDED_ON = 5e-3
# How far beyond the largest that was measured the limit of an error without a floor may lie, at the rarest chance.
_FURTHEST = 1.25
_RAREST = 1e-8
_WORST_OF = {"token_worst": "tokens", "channel_worst": "channels"}
# A figure of k routing weights is of too few values to speak for other sites.
_APART = (Site.ROUTER_WEIGHTS,)
# The first sites, where every port computed the same bits as the golden, tell nothing of how others stray.
_TELLING = 1.001
_PLACES = (*(str(site) for site in Site), *(str(site) for site in ModelSite))


def fit_ratios(records: Sequence[Record], *, mode: str, floor: str) -> Table:
    """Limits on ρ and its like, of one mode (`isolated`, `chained`) and one kind of floor (`full`, `stats`).

    With `_variants` behind it the kind is that of goldens whose floor is widened.

    What lies below 1 is better than the golden, and says nothing of how far a right port goes the other way.
    """
    chosen = [
        record
        for record in records
        if (record["mode"], record["floor"]) == (mode, floor)
        and record.get("whole") is not None
        # The first layer of a chain is handed nothing: it is judged as an isolated one.
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
            table[ALL_SITES][figure] = _pool([by_site[site] for site in telling or by_site])
            if figure in STRUCTURE_FIGURES:
                table[ALL_SITES][figure] = _times(table[ALL_SITES][figure], _STRUCTURE_MARGIN)
                by_site = {site: _times(limit, _STRUCTURE_MARGIN) for site, limit in by_site.items()}
            for site, limit in by_site.items():
                wider = _wider(limit, table[ALL_SITES][figure])
                if wider != table[ALL_SITES][figure]:
                    table[site][figure] = wider
    return dict(table)


def widen(table: Table, other: Table) -> Table:
    """Limits as wide as the wider of both; a figure that one alone limits is limited as there."""
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
    """Widen limits by what models that were not measured may stray further."""

    def widened(figure: str, limit: Limit) -> Limit:
        least = _TOKEN_SPREAD if figure in RATIO_FIGURES else 0.0
        return replace(
            limit, usual=_MODEL_MARGINS[figure] * limit.usual, token_spread=max(limit.token_spread, least)
        )

    return {
        site: {figure: widened(figure, limit) for figure, limit in own.items()} for site, own in table.items()
    }


def fit_floorless(records: Sequence[Record], ratios: Table) -> Table:
    """Limits on the error itself, where a golden keeps no floor.

    Args:
        records: All of them.
        ratios: Limits on ρ of isolated layers: two ports that are right may each be that far from the exact value.
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
        if record["mode"] == "chained" and record["incoming"] >= _LEAST_HANDED_ON and not record["hidden"]:
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
    """The limit on one figure of one site; None where it was never measured."""
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
    """Of the worst of many tokens or channels: each strays around the golden's own error."""

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
    """Of what became of an error that was handed on.

    Experts that pass it on to nobody, and tokens past a flip that are left out, make it less than usual, by far and
    among few tokens above all: that says nothing of how much more than usual it may be. Flips leave any number of
    tokens, hardly a number twice: of one or two layers chance cannot be told, so numbers up to twice as large are
    taken together.
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
    """Of each number of tokens the largest that counts as about as many; many stay as many as they are."""
    largest: dict[int, int] = {}
    for number in sorted(number for number in numbers if number < _MANY_TOKENS):
        largest[number.bit_length()] = number
    return {number: number if number >= _MANY_TOKENS else largest[number.bit_length()] for number in numbers}


def _fit_relative(records: Sequence[Record], ratios: Table) -> Limit | None:
    """From the golden's own error: the port's may be as large, times its limit."""
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
    """A limit on an error that nowhere lies far beyond the largest that was measured.

    Models differ more than the tokens of one do, and the logarithm of what they differ by is not normal: a deviation
    that is extrapolated to a single token would let any error pass.

    Args:
        limit: As it was fitted.
        largest: The golden's largest error at the site, of any number of tokens.
        rho: What ports that are right come to in units of the golden's error.
    """
    furthest = _FURTHEST * _FLOORLESS_MARGIN * float(np.hypot(1.0, rho)) * largest
    reach = math.log(max(furthest / limit.usual, _FURTHEST)) / quantile(_RAREST)
    spread = min(limit.spread, reach)
    return replace(
        limit, spread=_rounded(spread), token_spread=_rounded(min(limit.token_spread, reach - spread))
    )


def _flipped_share(records: Sequence[Record], logits_error: float) -> float:
    """The share of tokens that flip at the usual error of the logits, of the group that flips most."""
    handed = {
        _run_of(r): r["incoming"]
        for r in records
        if r["site"] == Site.ROUTER_LOGITS and r["floor"] == "off" and r.get("relative_l2") is not None
    }
    flips: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        if record.get("flipped") is not None and record["floor"] == "off" and not record["hidden"]:
            widening = float(np.hypot(logits_error, handed.get(_run_of(record), 0.0))) / logits_error
            group = (*_group_of(record), record["mode"])
            counts = flips[group]
            counts[0] += record["flipped"]
            counts[1] += record["tokens"] * widening
    return max(flipped / max(tokens, _MANY_TOKENS) for flipped, tokens in flips.values())


def _group_of(record: Record) -> tuple[Any, ...]:
    """What differs systematically: implementations, and the model's shape."""
    return record["port"], record["golden"], record["shape"]


def _run_of(record: Record) -> tuple[Any, ...]:
    """One layer of one run, however it was compared."""
    return (*_group_of(record), record["seed"], tuple(record["lengths"]), record["mode"], record["layer"])


def _grouped(records: Iterable[Record]) -> list[list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[_group_of(record)].append(record)
    return list(groups.values())


def _least(records: Sequence[Record]) -> float:
    return max(_LEAST_SPREAD[record["mode"]] for record in records)


def _pooled_deviation(groups: Sequence[Sequence[Record]], figure: str) -> float:
    """Standard deviation of the figure's logarithm within groups."""
    squares, freedom = 0.0, 0
    for group in groups:
        logarithms = np.log([r[figure] for r in group])
        squares += float(((logarithms - logarithms.mean()) ** 2).sum())
        freedom += len(group) - 1
    return (squares / freedom) ** 0.5 if freedom > 0 else 0.0


def _reach(records: Sequence[Record], figure: str, usual: float) -> float:
    """The deviation at which the largest of so many is just what is to be expected."""
    largest = max(r[figure] for r in records)
    return max(float(np.log(largest / usual)) / quantile(0.5 / max(len(records), 2)), 0.0)


def _pool(limits: Sequence[Limit]) -> Limit:
    """What holds for sites at large: the median of those that were measured, a part at a time."""
    return _each(limits, lambda values: float(np.median(values)))


def _times(limit: Limit, factor: float) -> Limit:
    return replace(limit, usual=_rounded(factor * limit.usual))


def _wider(one: Limit, other: Limit) -> Limit:
    return _each((one, other), max)


def _each(limits: Sequence[Limit], choose: Callable[[list[float]], float]) -> Limit:
    return Limit(
        **{
            name: _rounded(choose([getattr(limit, name) for limit in limits]))
            for name in ("usual", "spread", "token_spread")
        }
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
