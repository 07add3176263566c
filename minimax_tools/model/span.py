"""Span: a half-open range of decoder layers, written `A:B`; and any layers in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from minimax_tools.errors import UsageError, number_ranges, shorten, word_ranges

# More layers than any model has: a damaged file may give any number.
MAX_LAYERS = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Layers `start` to `stop - 1`, at least one; UsageError for an empty range, below 0 or behind `MAX_LAYERS`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= MAX_LAYERS:
            raise UsageError(
                f"layers {shorten(str(self.start))}:{shorten(str(self.stop))} are no span",
                expected=f"0 <= start < stop <= {MAX_LAYERS}",
                next_step="Write --layers A:B with B after the last layer, or --start-layer A --end-layer B.",
            )

    @classmethod
    def single(cls, layer: int) -> Span:
        """Return the span of one layer."""
        return cls(layer, layer + 1)

    @classmethod
    def inclusive(cls, first: int, last: int) -> Span:
        """Return the span from `first` to `last`, both included."""
        return cls(first, last + 1)

    @classmethod
    def parse(cls, text: str) -> Span:
        """Parse `A:B`, layers A to B - 1; raise UsageError for another form, or an empty range."""
        match = re.fullmatch(r"(\d+):(\d+)", text.strip())
        if match is None:
            raise UsageError(f"--layers {text!r} is no span", expected="A:B, half-open, for example 0:6")
        return cls(int(match[1]), int(match[2]))

    @property
    def last(self) -> int:
        """The last layer of the span."""
        return self.stop - 1

    def within(self, num_hidden_layers: int) -> Span:
        """Return this span; raise UsageError unless a model of `num_hidden_layers` layers has all its layers."""
        if self.stop > num_hidden_layers:
            raise UsageError(
                f"layer {self.last} is out of range",
                expected=f"layers 0 to {num_hidden_layers - 1}",
                found=str(self),
                next_step="The checkpoint's config.json says how many layers it has.",
            )
        return self

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __str__(self) -> str:
        return f"layer {self.start}" if len(self) == 1 else f"layers {self.start} to {self.last}"


def word_layers(layers: Iterable[int | None]) -> str:
    """Return layers as ranges, such as `layers 0-3, 5`; None stands for the model outside its layers."""
    wanted = set(layers)
    numbers = sorted(layer for layer in wanted if layer is not None)
    words = []
    if numbers:
        words.append(
            ("layer " if len(numbers) == 1 else "layers ") + ", ".join(word_ranges(number_ranges(numbers)))
        )
    return " and ".join([*words, *(["model"] if None in wanted else [])])
