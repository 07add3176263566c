"""Extent: the point at which a bisection ends."""

from __future__ import annotations

from minimax_tools.text_enum import TextEnum


class Extent(TextEnum):
    """The point at which a bisection ends."""

    FIRST = "first"  # the first finding that proves the port wrong
    ALL = "all"  # the last layer: the search goes on after every finding
    EXHAUSTIVE = "exhaustive"  # the last layer, and every layer runs alone
