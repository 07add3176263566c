"""Node: a machine, or a device of one, that can hold a slice of a model; and Stage: a node and what it holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.errors import UsageError, list_faults, naming, shorten
from minimax_tools.machine.files import is_plain_name
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.machine.size import parse_size
from minimax_tools.model.architecture import PART_EMBEDDING
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.text_enum import TextEnum


class Planner(TextEnum):
    """A way to divide layers among nodes."""

    MEMORY = "memory"  # by memory: all nodes are equally full
    BALANCED = "balanced"  # so that the slowest node is as fast as possible
    MANUAL = "manual"  # as each node says


MAX_NODES = 64

# More memory than any machine has: a damaged file may give any number.
_MAX_BYTES = 1 << 60

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NODE_FORM = "NAME:memory=40GB,tflops=312 (tflops and layers=A:B where the planner needs them)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that can hold a slice.

    Raises:
        UsageError: The name has other characters, or a quantity is not positive.
    """

    name: str  # letters, digits, `.`, `_` and `-`, because files are named after it
    memory_bytes: int  # memory for its slice: weights, keys, values and activations
    tflops: float | None = None  # throughput in 10¹² floating-point operations a second; None if unknown
    layers: Span | None = None  # layers chosen by hand for the manual planner; None for the other planners

    def __post_init__(self) -> None:
        faults: list[str] = []
        if not is_node_name(self.name):
            faults.append(f"the name is {shorten(repr(self.name))}")
        if type(self.memory_bytes) is not int or not 1 <= self.memory_bytes <= _MAX_BYTES:
            faults.append(f"memory is {shorten(str(self.memory_bytes))} bytes")
        if self.tflops is not None and not 0 < self.tflops < math.inf:
            faults.append(f"tflops is {self.tflops}")
        if faults:
            raise UsageError(
                f"{shorten(repr(self.name))} is no node", expected=_NODE_FORM, found="; ".join(faults)
            )

    @property
    def flops_per_second(self) -> float:
        """Throughput in floating-point operations a second, of a node whose `tflops` are known."""
        assert self.tflops is not None, "the planner has checked that each node has a throughput"
        return self.tflops * 1e12

    @classmethod
    def parse(cls, text: str) -> Node:
        """Parse a node written as `a100:memory=40GB,tflops=312`.

        Raises:
            UsageError: The text is not of that form.
        """
        name, _, rest = text.partition(":")
        pairs = [pair.partition("=") for pair in rest.split(",")] if rest else []
        values = {key.strip(): value.strip() for key, _, value in pairs}
        if len(values) != len(pairs) or "name" in values:
            raise UsageError(f"node {text!r} gives a value twice", expected=_NODE_FORM)
        return cls.from_values({"name": name.strip(), **values})

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Node:
        """Build a node from the object of a node file, whose values are text or numbers.

        Raises:
            UsageError: A field is missing, unknown or has a wrong value.
        """
        kinds = {"name": (str,), "memory": (int, str), "tflops": (int, float, str), "layers": (str,)}
        given = {key: value for key, value in values.items() if value is not None}
        faults = [f"no {key}" for key in ("name", "memory") if key not in given]
        faults += [
            f"{key} of {value!r}" for key, value in given.items() if type(value) not in kinds.get(key, ())
        ]
        try:
            if faults:
                raise ValueError(list_faults(faults))
            memory, tflops, layers = given["memory"], given.get("tflops"), given.get("layers")
            return cls(
                name=given["name"],
                memory_bytes=memory if isinstance(memory, int) else parse_size(memory),
                tflops=None if tflops is None else float(tflops),
                layers=None if layers is None else Span.parse(layers),
            )
        except (OverflowError, ValueError) as error:
            raise UsageError(
                f"node {values.get('name', '')!r} cannot be understood",
                expected=_NODE_FORM,
                found=shorten(str(error)),
            ) from error


def is_node_name(name: str) -> bool:
    """Decide whether a node may have this name, which its files and folders bear too."""
    return _NAME.fullmatch(name) is not None and is_plain_name(name)


def check_nodes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Check that there are 1 to `MAX_NODES` nodes and that their names differ; return them as a tuple.

    Raises:
        UsageError: There are none or too many, or two have the same name.
    """
    if not 1 <= len(nodes) <= MAX_NODES:
        raise UsageError(
            f"{len(nodes)} nodes cannot share a model", expected=f"1 to {MAX_NODES}", next_step="Give --node."
        )
    names = [node.name for node in nodes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError("nodes share a name", found=list_faults(twice))
    return tuple(nodes)


def read_nodes(path: Path) -> tuple[Node, ...]:
    """Read a JSON file of nodes: a list of objects with `name`, `memory`, and optionally `tflops` and `layers`.

    Raises:
        UsageError: The file is not such a list.
    """
    try:
        records = read_own_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error
    if (
        not isinstance(records, list)
        or not records
        or not all(isinstance(record, dict) for record in records)
    ):
        raise UsageError(
            f"{path} holds no list of nodes",
            expected='[{"name": "a", "memory": "40GB"}, …], perhaps with "tflops": 312 and "layers": "0:31"',
        )
    with naming(path):
        return tuple(Node.from_values(record) for record in records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A node and the parts of the model that it holds."""

    node: Node
    layers: range  # may be empty
    has_embedding: bool = False
    has_head: bool = False  # final norm, lm_head and all that is neither a layer nor the embedding

    @property
    def is_used(self) -> bool:
        """True if the node holds anything."""
        return bool(self.layers) or self.has_embedding or self.has_head

    def holds(self, part: int | str) -> bool:
        """Decide whether a part of the model belongs to this stage: a layer's number, or a name from `part_of`."""
        if isinstance(part, int):
            return part in self.layers
        return self.has_embedding if part == PART_EMBEDDING else self.has_head


def stage_cost(cost: ModelCost, stage: Stage) -> PartCost:
    """Return the cost of all parts of a stage."""
    return cost.of_slice(stage.layers, has_embedding=stage.has_embedding, has_head=stage.has_head)
