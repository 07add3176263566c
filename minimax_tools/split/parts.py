"""Part: which of the three components of a split model, and which decoder layers it holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from minimax_tools.errors import UsageError
from minimax_tools.model.span import Span


class Role(str, Enum):
    """A component; the value is its name in files, device maps and messages."""

    BOTTOM = "bottom"
    TRUNK = "trunk"
    TOP = "top"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One component: bottom begins with the embedding, top ends in the final norm and the head.

    Args:
        role: Which of the three.
        span: Its decoder layers.
        num_hidden_layers: How many the whole model has.

    Raises:
        UsageError: The layers are not where that component's are.
    """

    role: Role
    span: Span
    num_hidden_layers: int

    def __post_init__(self) -> None:
        self.span.within(self.num_hidden_layers)
        begins, ends = self.span.start == 0, self.span.stop == self.num_hidden_layers
        if (begins, ends) != (self.role is Role.BOTTOM, self.role is Role.TOP):
            raise UsageError(
                f"{self.span} cannot be the {self.role} of a model of {self.num_hidden_layers} layers",
                expected="bottom to begin with layer 0, top to end with the last layer, trunk to do neither",
            )

    @property
    def layers(self) -> range:
        """Its decoder layers by number."""
        return range(self.span.start, self.span.stop)

    @property
    def has_embedding(self) -> bool:
        """Whether it takes token ids; else it takes hidden states."""
        return self.role is Role.BOTTOM

    @property
    def has_head(self) -> bool:
        """Whether it gives logits; else it gives hidden states."""
        return self.role is Role.TOP

    def __str__(self) -> str:
        also = {Role.BOTTOM: " + embedding", Role.TRUNK: "", Role.TOP: " + final norm + lm_head"}
        numbers = f"{self.span.start}-{self.span.last}" if len(self.span) > 1 else f"{self.span.start}"
        return f"{self.role} (layer{'s' if len(self.span) > 1 else ''} {numbers}{also[self.role]})"


def plan_parts(split_point_1: int, split_point_2: int, *, num_hidden_layers: int) -> tuple[Part, Part, Part]:
    """Bottom with the layers before `split_point_1`, trunk with those before `split_point_2`, top with the rest.

    Raises:
        UsageError: A component would have no layer.
    """
    points = (split_point_1, split_point_2)
    is_whole = all(isinstance(point, int) and not isinstance(point, bool) for point in points)
    if not is_whole or not 0 < split_point_1 < split_point_2 < num_hidden_layers:
        raise UsageError(
            "these split points leave a component without layers",
            expected=f"0 < split_point_1 < split_point_2 < {num_hidden_layers}, the number of layers",
            found=f"{split_point_1!r} and {split_point_2!r}",
            next_step="Bottom ends before split_point_1, trunk before split_point_2; both count layers from 0.",
        )
    bounds = (0, split_point_1, split_point_2, num_hidden_layers)
    bottom, trunk, top = (
        Part(role=role, span=Span(start, stop), num_hidden_layers=num_hidden_layers)
        for role, start, stop in zip(Role, bounds, bounds[1:], strict=False)
    )
    return bottom, trunk, top
