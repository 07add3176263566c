"""ModelPlant: a whole port with one mistake, or a right one, and what mm2 should say of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from minimax_tools.text_enum import TextEnum

# The folder of the ports. They read as a user's file does: no annotations, and imports from the file beside it.
PORTS = Path(__file__).parents[1] / "whole_ports"
# Environment variables that `layers.py:WrongLayer` there reads: a mistake as it prints itself, and a layer's number.
MISTAKE_VARIABLE, LAYER_VARIABLE = "MM2_PLANTED_MISTAKE", "MM2_PLANTED_LAYER"


class FirstPass(TextEnum):
    """The pass at which a mistake first shows."""

    PREFILL = "prefill"
    DECODE = "decode"  # the prefill is right
    CHUNKS = "chunks"  # prefill and steps are right, a pass of several tokens behind a cache is not
    REPEATED = "repeated"  # both are right, a second run of the same prompts is not
    NONE = "none"  # no number of the run is wrong


@dataclass(frozen=True, slots=True)
class ModelPlant:
    """A whole port that `mm2-test model` judges."""

    port: str  # its file in the folder of the ports, and its name there, as `ends.py:HeadTied`
    _: KW_ONLY
    first: FirstPass = FirstPass.NONE  # pass at which it first shows
    layers: tuple[int, ...] = ()  # layers that may be blamed; empty outside the layers
    sites: tuple[str, ...] = ()  # sites of which at least one must be blamed
    names: tuple[str, ...] = ()  # names of mm2's catalogues that are right answers; empty for a right port
    num_ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of its run
    # Backends on which it can run: what torch traced for the CPU runs there alone.
    backends: tuple[str, ...] = ("cpu", "xla-cpu")

    @property
    def name(self) -> str:
        """The mistake, or the style of a right port, as `head_tied`."""
        return re.sub(
            "(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.port.partition(":")[2]
        ).lower()

    @property
    def is_right(self) -> bool:
        """True for a right port, which must never be flagged."""
        return not self.names

    @property
    def target(self) -> str:
        """The value of `--target`."""
        return f"{PORTS / self.port}"
