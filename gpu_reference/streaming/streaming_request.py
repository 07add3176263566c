"""StreamingRequest: the streaming that a user asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minimax_tools.errors import UsageError

if TYPE_CHECKING:
    from gpu_reference.model.placement import Placement

STREAM_MODES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingRequest:
    """The streaming that a user asked for."""

    stream: str = "auto"  # `on`, `off`, or `auto` to stream a model that does not fit
    prefetch: bool | None = None  # whether to read the next layer while one runs; None to do so if two fit
    packed_experts: bool = False  # whether to keep experts in FP8

    def refuse_contradictions(self, placement: Placement) -> None:
        """Raise UsageError if the options contradict each other or the placement."""
        if (self.stream == "on" or self.packed_experts) and placement.is_by_hand:
            raise UsageError(
                f"{'--stream on' if self.stream == 'on' else '--packed-experts'} runs every layer on one device",
                found="a --device-map of modules, or an --offload-folder",
                next_step="Leave them out, or give --stream off.",
            )
        if self.packed_experts and self.stream == "off":
            raise UsageError(
                "--packed-experts is a way of streaming", found="--stream off", next_step="Use --stream on."
            )
        self.refuse_idle_prefetch()

    def refuse_idle_prefetch(self) -> None:
        """Raise UsageError if --prefetch is given for a model that is not streamed."""
        if self.prefetch is not None and self.stream == "off":
            raise UsageError(
                f"--{'' if self.prefetch else 'no-'}prefetch has no effect on a model that is loaded whole",
                found="--stream off",
                next_step="Leave it out, or use --stream on.",
            )
