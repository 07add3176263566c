"""Parts of a split model, also called components: bottom, trunk and top, with their decoder layers."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.errors import UsageError, shorten
from minimax_tools.model.span import MAX_LAYERS, Span
from minimax_tools.text_enum import TextEnum


class Role(TextEnum):
    """Name of a component, as files, device maps and messages have it."""

    BOTTOM = "bottom"
    TRUNK = "trunk"
    TOP = "top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component: bottom begins with the embedding, top ends in the final norm and the head.

    Raises:
        UsageError: A component of this role cannot have these layers.
    """

    role: Role
    span: Span  # decoder layers of the component
    num_hidden_layers: int  # of the whole model

    def __post_init__(self) -> None:
        if self.num_hidden_layers > MAX_LAYERS:
            raise UsageError(
                f"a model of {shorten(str(self.num_hidden_layers))} layers cannot be split",
                expected=f"at most {MAX_LAYERS} layers",
                next_step="Copy the files of the component again.",
            )
        self.span.within(self.num_hidden_layers)
        has_first, has_last = self.span.start == 0, self.span.stop == self.num_hidden_layers
        if (has_first, has_last) != (self.role is Role.BOTTOM, self.role is Role.TOP):
            raise UsageError(
                f"{self.span} cannot be the {self.role} of a model of {self.num_hidden_layers} layers",
                expected="bottom to begin with layer 0, top to end with the last layer, trunk to do neither",
            )

    @property
    def layers(self) -> range:
        """Numbers of the decoder layers."""
        return range(self.span.start, self.span.stop)

    @property
    def has_embedding(self) -> bool:
        """True if the component takes token ids, not hidden states."""
        return self.role is Role.BOTTOM

    @property
    def has_head(self) -> bool:
        """True if the component gives logits, not hidden states."""
        return self.role is Role.TOP

    def __str__(self) -> str:
        other_modules = {Role.BOTTOM: " + embedding", Role.TRUNK: "", Role.TOP: " + final norm + lm_head"}
        one_layer = len(self.span) == 1
        layers = f"layer {self.span.start}" if one_layer else f"layers {self.span.start}-{self.span.last}"
        return f"{self.role} ({layers}{other_modules[self.role]})"


def plan_parts(split_point_1: int, split_point_2: int, *, num_hidden_layers: int) -> tuple[Part, Part, Part]:
    """Divide the layers: bottom ends before `split_point_1`, trunk before `split_point_2`, top has the rest.

    Raises:
        UsageError: A component would have no layer.
    """
    points = (split_point_1, split_point_2)
    are_integers = all(isinstance(point, int) and not isinstance(point, bool) for point in points)
    if not are_integers or not 0 < split_point_1 < split_point_2 < num_hidden_layers:
        raise UsageError(
            "these split points leave a component without layers",
            expected=f"0 < split_point_1 < split_point_2 < {num_hidden_layers}, the number of layers",
            found=f"{split_point_1!r} and {split_point_2!r}",
            next_step="Bottom ends before split_point_1, trunk before split_point_2; both count layers from 0.",
        )
    bounds = (0, split_point_1, split_point_2, num_hidden_layers)
    # Each component lies between two neighbouring bounds.
    bottom, trunk, top = (
        Part(role=role, span=Span(start, stop), num_hidden_layers=num_hidden_layers)
        for role, start, stop in zip(Role, bounds, bounds[1:], strict=False)
    )
    return bottom, trunk, top
