"""Limits files: YAML with limits by site, or for all sites; calibration.yaml holds mm2's own.

    isolated:                 # or chained, isolated_estimated, chained_estimated, without_floor, isolated_variants, …
      all: {whole: 1.5}       # for each site without a `whole` of its own in this file
      moe_delta: {token_worst: 4}  # a number, or {usual: …, spread: …, token_spread: …}

Limits that a file does not name stay as in calibration.yaml, but a figure under `all` replaces that figure's limit on
every site. `usual`, `spread` and `token_spread` are fields of `Limit`, other keys of `NoiseLimits`. A file's limits for
isolated layers hold for goldens with variants too, unless the file names limits for these (see `NoiseLimits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from compare.limits.limits import (
    ALL_SITES,
    FLOORLESS_FIGURES,
    NOISE_FIGURES,
    RATIO_FIGURES,
    Limit,
    NoiseLimits,
    SiteLimits,
)
from compare.limits.tolerances import CALIBRATION
from minimax_tools.errors import UsageError, shorten
from minimax_tools.machine.yaml_file import compose_yaml
from minimax_tools.model.sites import ModelSite, Site

_SITES = (
    ALL_SITES,
    *(str(site) for site in Site if site is not Site.INPUT),
    *(str(site) for site in ModelSite),
)
# The tables of a file, and the figures that each may limit.
_TABLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "isolated": NOISE_FIGURES,
        "isolated_estimated": RATIO_FIGURES,
        "isolated_variants": NOISE_FIGURES,
        "isolated_variants_estimated": RATIO_FIGURES,
        "chained": RATIO_FIGURES,
        "chained_estimated": RATIO_FIGURES,
        "without_floor": FLOORLESS_FIGURES,
    }
)
# Tables for goldens with variants, and the table that stands in if a file names only that one.
_STAND_INS: Mapping[str, str] = MappingProxyType(
    {"isolated_variants": "isolated", "isolated_variants_estimated": "isolated_estimated"}
)
# A key for remarks on how the limits were measured; not read.
_REMARK = "measured"
_KEYS = (*_TABLES, "level", "float32", "backends", "slack", "other_graphs", _REMARK)
_LIMIT_KEYS = ("usual", "spread", "token_spread")


@cache
def calibrated_limits() -> NoiseLimits:
    """Read mm2's own limits, measured on right ports.

    Raises:
        UsageError: The installed file is damaged.
    """
    values = _File(CALIBRATION).read()
    try:
        return NoiseLimits(**values)
    except TypeError as error:
        # The file lacks a field.
        raise UsageError(
            f"{CALIBRATION} is not whole", found=str(error), next_step="Install mm2 again."
        ) from error


def read_limits(path: Path) -> NoiseLimits:
    """Read mm2's own limits, replaced by those in the file `path`.

    The limits of a file hold on all backends and for all graphs, unless it names backends or `other_graphs`.

    Raises:
        UsageError: The file cannot be read, or has an unknown key or a wrong value; the message names the line.
    """
    values, limits = _File(path).read(), calibrated_limits()
    named = {name: values.pop(name) for name in tuple(values) if name in _TABLES}
    tables: dict[str, Any] = {name: _table_of(limits, name).overlaid(table) for name, table in named.items()}
    for widened, plain in _STAND_INS.items():
        if plain in named and widened not in named:
            tables[widened] = _table_of(limits, widened).overlaid(named[plain])
    # A file that names tables is meant for every backend, and as it is for every graph.
    backends = values.pop("backends", None if tables else limits.backends)
    other_graphs = values.pop("other_graphs", 1.0 if tables else limits.other_graphs)
    return replace(limits, **tables, **values, backends=backends, other_graphs=other_graphs)


def _table_of(limits: NoiseLimits, name: str) -> SiteLimits:
    """Return a table; for one of goldens with variants that `limits` lacks, the table that stands in for it."""
    table: SiteLimits | None = getattr(limits, name)
    return getattr(limits, _STAND_INS[name]) if table is None else table


class _File:
    """A limits file, read node by node, so that errors name line and key; `where` is a dotted key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """Read the fields of `NoiseLimits` that the file names."""
        root = compose_yaml(self._path)
        if root is None:
            raise UsageError(f"{self._path} names no limit", expected=f"one of {', '.join(_KEYS)}")
        readers: dict[str, Callable[[yaml.Node, str], Any]] = {
            **dict.fromkeys(_TABLES, self._table),
            "level": self._share,
            "float32": self._positive,
            "slack": self._positive,
            "other_graphs": self._positive,
            "backends": self._names,
        }
        return {key: readers[key](node, key) for key, node in self._items(root, "", _KEYS) if key != _REMARK}

    def _table(self, node: yaml.Node, where: str) -> SiteLimits:
        return SiteLimits.of(
            {
                site: {
                    figure: self._limit(value, f"{where}.{site}.{figure}")
                    for figure, value in self._items(figures, f"{where}.{site}", _TABLES[where])
                }
                for site, figures in self._items(node, where, _SITES)
            }
        )

    def _limit(self, node: yaml.Node, where: str) -> Limit:
        if isinstance(node, yaml.ScalarNode):
            return Limit(usual=self._positive(node, where))
        values = {
            key: self._number(value, f"{where}.{key}") for key, value in self._items(node, where, _LIMIT_KEYS)
        }
        if "usual" not in values:
            raise self._wrong(
                node, where, expected="a number, or a mapping with `usual`", found=", ".join(values)
            )
        try:
            return Limit(**values)
        except ValueError as error:
            raise self._wrong(node, where, expected="a limit", found=str(error)) from error

    def _items(
        self, node: yaml.Node, where: str, allowed: tuple[str, ...]
    ) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the entries of a mapping; refuse a key that is not allowed, or there twice."""
        expected = f"a mapping of {', '.join(allowed)}"
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, where or "the file", expected=expected, found=_word_node(node))
        names: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            place = f"{where}.{name}" if where else name
            if name not in allowed:
                raise self._wrong(key, place, expected=f"one of {', '.join(allowed)}", found=repr(name))
            if name in names:
                raise self._wrong(key, place, expected="each key once", found=f"{name} again")
            names.add(name)
            yield name, value

    def _number(self, node: yaml.Node, where: str) -> float:
        try:
            # Parsed here, since YAML takes 1e-3 for text: only 1.0e-3 is a number to it. Callers refuse the NaN of
            # a mapping, a list, or text in quotes.
            return float(node.value) if isinstance(node, yaml.ScalarNode) and not node.style else float("nan")
        except ValueError:
            raise self._wrong(node, where, expected="a number", found=_word_node(node)) from None

    def _positive(self, node: yaml.Node, where: str) -> float:
        number = self._number(node, where)
        if not 0.0 < number < float("inf"):
            raise self._wrong(node, where, expected="a number above 0", found=_word_node(node))
        return number

    def _share(self, node: yaml.Node, where: str) -> float:
        number = self._positive(node, where)
        if number >= 1.0:
            raise self._wrong(node, where, expected="a share between 0 and 1", found=_word_node(node))
        return number

    def _names(self, node: yaml.Node, where: str) -> frozenset[str]:
        if not isinstance(node, yaml.SequenceNode) or not all(
            isinstance(item, yaml.ScalarNode) for item in node.value
        ):
            raise self._wrong(node, where, expected="a list of backends", found=_word_node(node))
        return frozenset(str(item.value) for item in node.value)

    def _wrong(self, node: yaml.Node, where: str, *, expected: str, found: str) -> UsageError:
        return UsageError(
            f"{self._path}, line {node.start_mark.line + 1}, {where}",
            expected=expected,
            found=found,
            next_step="mm2-compare --criteria-template prints a file with every limit.",
        )


def _word_node(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return shorten(repr(node.value))
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
