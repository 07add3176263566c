"""Planner: a way to divide layers among nodes, by name; `planners` divides them."""

from __future__ import annotations

from minimax_tools.text_enum import TextEnum


class Planner(TextEnum):
    """A way to divide layers among nodes."""

    MEMORY = "memory"  # by memory: all nodes are equally full
    COMPUTE = "compute"  # by throughput: all nodes take equally long
    BALANCED = "balanced"  # so that the slowest node is as fast as possible
    MANUAL = "manual"  # as each node says
