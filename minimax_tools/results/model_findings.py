"""ModelFinding: something wrong in a whole port's run, with the pass and the layer at which it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.model.sites import ModelSite

_EMBEDDING = str(ModelSite.EMBEDDING)
# Behind every pass and every layer.
_LAST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFinding:
    """A finding in a whole port's run."""

    # The pass: 0 for the prefill or the first chunk, t for the t-th decoding step or the chunk behind t others; None if
    # no pass is known
    number: int | None
    layer: int | None  # None outside the layers
    # Sites, or `cache`, `layer_order`, `chosen_token`, `repeated_run`, `padded_logits`, `generated_tokens`
    sites: tuple[str, ...]
    reason: str  # what differs, with figures
    mistake: str | None = None  # name of the known mistake that explains it; None if none does
    what: str = ""  # the mistake in a sentence
    look_at: str = ""  # the part of the port to look at
    parameters: Mapping[str, Any] = field(default_factory=dict)  # numbers or text, by name

    is_warning: bool = False  # whether it says that something was not judged, and not that it is wrong
    is_of_sites: bool = False  # whether sites of the comparison show it, which are blamed anyway
    # Operation that computes this site and that of another finding, if both are one cause; empty if not
    operation: str = ""

    # Whether the pass is one of several tokens behind a cache: these come after the prefill and its steps
    in_chunks: bool = False

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key: what came first in the run. The embedding is before the layers, all else behind them."""
        outside = -1 if _EMBEDDING in self.sites else _LAST
        place = outside if self.layer is None else self.layer
        return self.in_chunks, _LAST if self.number is None else self.number, place
