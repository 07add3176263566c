"""Tensor layout: which source tensors a port tensor holds, matrix by matrix, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from neuron.weight_trace.layout_segment import MAX_SEGMENTS, LayoutSegment, read_segments
from neuron.weight_trace.port_tensors import name_numbers, name_pattern
from neuron.weight_trace.source_tensors import SourceTensors, kinds_of, word_experts, word_kinds
from neuron.weight_trace.tensor_origin import TensorOrigin

# Segments of one matrix.
Matrix = tuple[LayoutSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Layout of a port tensor."""

    origin: TensorOrigin
    matrices: tuple[Matrix, ...]  # segments of each matrix, in the order in which the tensor stacks them
    # The expert of each matrix; empty unless each holds tensors of exactly one expert.
    experts: tuple[int, ...]
    text: str  # the layout as text, such as `experts 0–11: w2 (down)`

    @property
    def segments(self) -> Matrix:
        """Segments of all matrices."""
        return tuple(segment for matrix in self.matrices for segment in matrix)

    @property
    def source_kinds(self) -> tuple[str, ...]:
        """Kinds of the source tensors whose rows lie here, each once."""
        return kinds_of(segment.source for segment in self.segments if segment.source is not None)


def read_layout(origin: TensorOrigin, sources: SourceTensors) -> TensorLayout:
    """Read the layout of a port tensor from the origins of its elements.

    `origin.numbers` holds the source number of each element, negative for an element without one.
    """
    stacked = stack_matrices(origin, sources)
    matrices = tuple(tuple(read_segments(matrix, sources)) for matrix in stacked)
    experts = _experts_of(matrices)
    return TensorLayout(
        origin=origin,
        matrices=matrices,
        experts=experts,
        text=_word_layout(matrices, experts, stacked.shape[-2:], is_stacked=origin.numbers.dim() > 2),
    )


def stack_matrices(origin: TensorOrigin, sources: SourceTensors) -> torch.Tensor:
    """Return the source numbers of a port tensor as matrices [n,R,C].

    The last two dims are a matrix, after the dim that counts experts has moved to the front. A single matrix may be cut
    by rows into several.
    """
    numbers = _experts_first(origin.numbers, sources)
    if numbers.dim() < 2:
        numbers = numbers.reshape(-1, 1)
    stacked = numbers.reshape(-1, *numbers.shape[-2:])
    return _cut_where_repeated(stacked[0], sources) if len(stacked) == 1 else stacked


def expert_orders(layouts: Sequence[TensorLayout]) -> Iterator[tuple[list[TensorLayout], tuple[int, ...]]]:
    """Group expert tensors by name pattern; yield each group, sorted by the names' numbers, and its experts.

    So `experts.0.w2`, `experts.1.w2` and so on are a group, and its experts should be 0, 1 and so on.
    """
    groups: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        if layout.experts:
            groups.setdefault(name_pattern(layout.origin.name), []).append(layout)
    for group in groups.values():
        group.sort(key=lambda layout: name_numbers(layout.origin.name))
        yield group, tuple(expert for layout in group for expert in layout.experts)


def _experts_first(numbers: torch.Tensor, sources: SourceTensors) -> torch.Tensor:
    """Move the dim that counts experts to the front; the dims stay if none does."""
    if numbers.dim() < 3:
        return numbers
    experts = torch.where(numbers >= 0, sources.find_experts(numbers.clamp(min=0)), -1)
    for dim in range(numbers.dim()):
        # The dim that counts experts: each of its slices holds elements of one expert, besides those of no expert.
        slices = experts.movedim(dim, 0).flatten(1)
        expert_of_slice = slices.max(dim=1, keepdim=True).values
        if bool(((slices == expert_of_slice) | (slices < 0)).all()):
            return numbers.movedim(dim, 0)
    return numbers


def _cut_where_repeated(matrix: torch.Tensor, sources: SourceTensors) -> torch.Tensor:
    """Cut a matrix [R,C] into n matrices [n,R/n,C] where its kinds begin to repeat; [1,R,C] if they do not.

    Two layouts need it: experts stacked by rows in one matrix, and a fused projection with q, k and v of one head after
    the other. A matrix of one expert, or of none, is not cut if it has few segments. Nor is a matrix with an element
    without a source.
    """
    if bool((matrix < 0).any()):
        return matrix[None]
    first_column = matrix[:, 0]
    indices = sources.find(first_column)
    experts = sources.find_experts(first_column)
    num_changes = int((indices[1:] != indices[:-1]).sum())
    if num_changes < MAX_SEGMENTS and len(experts.unique()) == 1:
        return matrix[None]
    kind_numbers = {kind: number for number, kind in enumerate(kinds_of(sources.all))}
    kinds = torch.tensor([kind_numbers[source.kind] for source in sources.all])[indices]
    is_start = (kinds[1:] != kinds[:-1]) | (experts[1:] != experts[:-1])
    for start in is_start.nonzero().flatten().add(1).tolist():
        if len(kinds) % start == 0 and start > 1 and bool((kinds[start:] == kinds[:-start]).all()):
            return matrix.reshape(-1, start, matrix.shape[1])
    return matrix[None]


def _experts_of(matrices: tuple[Matrix, ...]) -> tuple[int, ...]:
    """Return the expert of each matrix; empty if a matrix holds no expert, or several."""
    experts: list[int] = []
    for matrix in matrices:
        experts_held = {segment.source.expert for segment in matrix if segment.source is not None}
        if len(experts_held) != 1:
            return ()
        expert = experts_held.pop()
        if expert is None:
            return ()
        experts.append(expert)
    return tuple(experts)


def _word_layout(
    matrices: tuple[Matrix, ...], experts: tuple[int, ...], shape: torch.Size, *, is_stacked: bool
) -> str:
    """Return a layout of matrices [R,C] as text; `is_stacked` if a dim of the port tensor counts the matrices."""
    texts = [", ".join(segment.as_text() for segment in matrix) for matrix in matrices]
    if len(matrices) == 1:
        return f"{texts[0]} of expert {experts[0]}" if experts else texts[0]
    each = "" if is_stacked else f" of {shape[0]} rows each"
    first_other = next((index for index, text in enumerate(texts) if text != texts[0]), None)
    if experts and first_other is None:
        return f"{word_experts(experts)}{each}: {texts[0]}"
    continued = _word_continued(matrices)
    if continued is not None:
        return continued
    if first_other is None:
        return f"{len(texts)} times{each}: {texts[0]}"
    return (
        f"{len(texts)} parts{each}, of unequal content: the first {texts[0]}; "
        f"number {first_other} {texts[first_other]}"
    )


def _word_continued(matrices: tuple[Matrix, ...]) -> str | None:
    """Return the text of matrices that each continue the rows of the matrix before; None if they do not.

    So lies a projection that fuses q, k and v of one group of heads after the other.
    """
    if len({tuple(segment.lines for segment in matrix) for matrix in matrices}) > 1:
        return None
    sizes = []
    # The segments at one place of all matrices: q of each group of heads, then k, then v.
    for segments in zip(*matrices, strict=True):
        next_row: dict[str, int] = {}
        for segment in segments:
            source, rows = segment.source, segment.rows
            if source is None or rows is None or not segment.is_in_order or segment.is_transposed:
                return None
            if int(rows.indices[0]) != next_row.get(source.name, 0):
                return None
            next_row[source.name] = int(rows.indices[0]) + len(rows.indices)
        sizes.append(f"{len(segments[0].lines)} rows of {word_kinds(kinds_of([source]))}")
    return f"{len(matrices)} times the next {', '.join(sizes)}"
