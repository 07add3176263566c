"""Agreement: weights that belong together lie alike, in one order and on one rank; and the finding of a fault.

All experts lie alike. Rows and columns that meet in the forward are partners: a row of q_proj and a column of o_proj
are of one head. What disagrees may be on purpose, if the forward knows of it: then the output is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text_enum import TextEnum
from neuron.weight_trace.port_tensors import name_pattern
from neuron.weight_trace.source_tensors import SourceTensors, kinds_of, word_experts, word_kinds
from neuron.weight_trace.tensor_layout import (
    IndexSequence,
    Matrix,
    TensorLayout,
    expert_orders,
    stack_matrices,
)


class Severity(TextEnum):
    """Certainty that a finding is a fault."""

    WRONG = "wrong"  # certain: the port fails
    SUSPECT = "suspect"  # a port may do it on purpose: running the layer (the trial) decides
    NOTE = "note"  # the port does it on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFinding:
    """A fault in a port's weights, or something that may be one: `severity` tells which."""

    mistake: WeightMistake
    severity: Severity
    kinds: tuple[str, ...]  # kinds of the source tensors concerned: `q_proj`, `w1`
    text: str
    details: str = ""  # what lies where, if the text does not say
    port_tensors: tuple[str, ...] = ()  # names of the port's tensors concerned
    # True if the name of the port's tensor claims another weight than lies there: wrong, unless the trial is right.
    contradicts_names: bool = False

    def cleared(self, reason: str) -> WeightFinding:
        """Return the finding as a note, with the reason why it is no fault."""
        return replace(self, severity=Severity.NOTE, text=f"{self.text}; {reason}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertMatrices:
    """The matrices that hold one expert, by the name pattern of their tensors."""

    expert: int
    matrices: Mapping[str, Matrix]
    numbers: Mapping[str, torch.Tensor]  # source numbers of their elements; negative ones without a source

    def numbers_of(self, expert: int, sources: SourceTensors) -> dict[str, torch.Tensor]:
        """Return the source numbers of the matrices that hold another expert in the same layout."""
        shifts = torch.zeros(len(sources.all), dtype=torch.int64)
        for index, source in enumerate(sources.all):
            if source.expert == self.expert:
                partner = sources.get(source.name.replace(f".{self.expert}.", f".{expert}.", 1))
                shifts[index] = 0 if partner is None else partner.start - source.start
        return {
            pattern: torch.where(numbers >= 0, numbers + shifts[sources.find(numbers.clamp(min=0))], numbers)
            for pattern, numbers in self.numbers.items()
        }

    def unlike(self, model: ExpertMatrices, sources: SourceTensors) -> tuple[str, ...]:
        """Return the name patterns of the tensors in which this expert lies otherwise than another one."""
        expected = model.numbers_of(self.expert, sources)
        both = self.numbers.keys() & expected.keys()
        alike = {pattern for pattern in both if torch.equal(self.numbers[pattern], expected[pattern])}
        return tuple(dict.fromkeys(name for name in (*self.numbers, *expected) if name not in alike))

    def kinds_in(self, patterns: Iterable[str]) -> tuple[str, ...]:
        """Return the kinds of weights that lie in some of the tensors."""
        segments = (segment for pattern in patterns for segment in self.matrices.get(pattern, ()))
        return kinds_of(segment.source for segment in segments if segment.source)


def group_experts(layouts: Sequence[TensorLayout], sources: SourceTensors) -> list[list[ExpertMatrices]]:
    """Group the experts of a rank that lie alike: the largest group first."""
    matrices: dict[int, dict[str, Matrix]] = {}
    numbers: dict[int, dict[str, torch.Tensor]] = {}
    for tensors, _ in expert_orders(layouts):
        for layout in tensors:
            pattern = name_pattern(layout.origin.name)
            stacked = stack_matrices(layout.origin, sources)
            for expert, matrix, of_matrix in zip(layout.experts, layout.matrices, stacked, strict=True):
                matrices.setdefault(expert, {}).setdefault(pattern, matrix)
                numbers.setdefault(expert, {}).setdefault(pattern, of_matrix)
    groups: list[list[ExpertMatrices]] = []
    for expert in sorted(matrices):
        held = ExpertMatrices(expert=expert, matrices=matrices[expert], numbers=numbers[expert])
        alike = next((group for group in groups if not held.unlike(group[0], sources)), None)
        if alike is None:
            groups.append([held])
        else:
            alike.append(held)
    return sorted(groups, key=len, reverse=True)


def find_unlike_experts(layouts: Sequence[TensorLayout], sources: SourceTensors) -> Iterator[WeightFinding]:
    """Yield the experts of a rank that lie otherwise than most."""
    most, *others = group_experts(layouts, sources) or [[]]
    for group in others:
        patterns = group[0].unlike(most[0], sources)
        lies, expected = (
            "; ".join(_word_matrix(held, name) for name in patterns) for held in (group[0], most[0])
        )
        yield WeightFinding(
            mistake=WeightMistake.ORDER,
            severity=Severity.SUSPECT,
            kinds=_unlike_kinds(group[0], patterns),
            port_tensors=tuple(group[0].matrices),
            text=word_unlike(group, most, sources),
            details=f"{lies}; not {expected}",
        )


def word_unlike(
    group: Sequence[ExpertMatrices], model: Sequence[ExpertMatrices], sources: SourceTensors
) -> str:
    """Return that some experts lie otherwise than others."""
    experts, others = ([held.expert for held in part] for part in (group, model))
    weights = word_kinds(_unlike_kinds(group[0], group[0].unlike(model[0], sources)))
    return f"{weights} of {word_experts(experts)} lie otherwise than of {word_experts(others)}"


def _word_matrix(held: ExpertMatrices, pattern: str) -> str:
    segments = held.matrices.get(pattern, ())
    return f"{pattern} {', '.join(segment.as_text() for segment in segments) or 'nothing'}"


def _unlike_kinds(held: ExpertMatrices, patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(held.kinds_in(patterns))) or held.kinds_in(held.matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A partner: the rows or the columns of a kind, in units of `width` indices."""

    kind: str
    is_columns: bool
    width: int
    unit: str


def find_parted(layouts: Sequence[TensorLayout], spec: ModelSpec) -> Iterator[WeightFinding]:
    """Yield partners that a rank does not hold together, or in another order."""
    for first, second in _partners(spec):
        for expert, held in _held(layouts, first).items():
            others = _held(layouts, second).get(expert, ())
            # A rank may hold all of one and a part of the other.
            if others == held or set(held) < set(others) or set(others) < set(held):
                continue
            of_expert = "" if expert is None else f" of expert {expert}"
            yield WeightFinding(
                mistake=WeightMistake.ORDER,
                severity=Severity.SUSPECT,
                kinds=(first.kind, second.kind),
                text=f"{_word_side(first, held)}{of_expert} lie here, with {_word_side(second, others)}",
            )
            break


def _partners(spec: ModelSpec) -> Iterator[tuple[_Side, _Side]]:
    """Yield rows and columns that meet in the forward."""
    head = spec.head_dim
    group = head * spec.num_attention_heads // spec.num_key_value_heads
    heads, groups = (
        partial(_Side, width=head, unit="heads"),
        partial(_Side, width=group, unit="groups of heads"),
    )
    yield heads(kind="q_proj", is_columns=False), heads(kind="o_proj", is_columns=True)
    yield heads(kind="q_proj", is_columns=False), heads(kind="q_norm", is_columns=False)
    yield heads(kind="k_proj", is_columns=False), heads(kind="v_proj", is_columns=False)
    yield heads(kind="k_proj", is_columns=False), heads(kind="k_norm", is_columns=False)
    # The kv heads are the groups of query heads.
    yield (
        groups(kind="q_proj", is_columns=False),
        _Side(kind="k_proj", is_columns=False, width=head, unit="kv heads"),
    )
    channels = partial(_Side, width=1, unit="channels")
    yield channels(kind="w1", is_columns=False), channels(kind="w3", is_columns=False)
    yield channels(kind="w1", is_columns=False), channels(kind="w2", is_columns=True)
    experts = partial(_Side, width=1, unit="experts", is_columns=False)
    yield experts(kind="gate"), experts(kind="e_score_correction_bias")


def _held(layouts: Iterable[TensorLayout], side: _Side) -> dict[int | None, tuple[int, ...]]:
    """Return the units that a rank holds of a kind, in the order in which they lie, by expert."""
    units: dict[int | None, list[int]] = {}
    for layout in layouts:
        for segment in layout.segments:
            if segment.source is None or segment.source.kind != side.kind:
                continue
            order = segment.columns if side.is_columns else segment.rows
            assert order is not None, "a segment with a source has rows and columns"
            units.setdefault(segment.source.expert, []).extend((order.indices // side.width).tolist())
    return {expert: tuple(dict.fromkeys(of_expert)) for expert, of_expert in units.items()}


def _word_side(side: _Side, held: Sequence[int]) -> str:
    part = "columns" if side.is_columns else "rows"
    return f"{part} of {word_kinds([side.kind])} of {side.unit} {IndexSequence(indices=torch.tensor(held))}"
