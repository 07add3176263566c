"""Agreement: weights that belong together lie alike, in one order and on one rank, and are scaled alike.

All experts lie alike. Rows and columns that meet in the forward are partners: a row of q_proj and a column of o_proj
are of one head. What disagrees may be on purpose, if the forward knows of it: then the output is right.

A scale is *moved* if one tensor is divided by numbers, channel by channel, and all that read these channels are
multiplied by them, as SmoothQuant and AWQ do. R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.stored_names import StoredNames
from minimax_tools.text_enum import TextEnum
from neuron.weight_trace.port_tensors import name_pattern
from neuron.weight_trace.source_tensors import (
    SHARED_EXPERTS,
    SourceTensor,
    SourceTensors,
    TensorOrigin,
    kinds_of,
    word_experts,
    word_kinds,
)
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
    kinds: tuple[str, ...]  # kinds of the source tensors concerned: `q_proj`, `w1`
    text: str
    severity: Severity = Severity.SUSPECT
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
    weights = sources.word(_unlike_kinds(group[0], group[0].unlike(model[0], sources)))
    return f"{weights} of {word_experts(experts)} lie otherwise than of {word_experts(others)}"


def _word_matrix(held: ExpertMatrices, pattern: str) -> str:
    segments = held.matrices.get(pattern, ())
    return f"{pattern} {', '.join(segment.as_text() for segment in segments) or 'nothing'}"


def _unlike_kinds(held: ExpertMatrices, patterns: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(held.kinds_in(patterns))) or held.kinds_in(held.matrices)


# Kinds whose columns, not rows, meet the partner's.
_BY_COLUMNS = ("o_proj", "w2", "down_proj", "shared_experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """A partner: the rows or the columns of a kind, in units of `width` indices."""

    kind: str
    width: int
    unit: str

    @property
    def is_columns(self) -> bool:
        return self.kind in _BY_COLUMNS


def find_parted(layouts: Sequence[TensorLayout], spec: ModelSpec) -> Iterator[WeightFinding]:
    """Yield partners that a rank does not hold together, or in another order."""
    names = spec.family.stored_names
    for first, second in _partners(spec):
        for expert, held in _held(layouts, first).items():
            others = _held(layouts, second).get(expert, ())
            # A rank may hold all of one and a part of the other.
            if others == held or set(held) < set(others) or set(others) < set(held):
                continue
            of_expert = "" if expert is None else f" of expert {expert}"
            yield WeightFinding(
                mistake=WeightMistake.ORDER,
                kinds=(first.kind, second.kind),
                text=f"{_word_side(first, held, names)}{of_expert} lie here, with {_word_side(second, others, names)}",
            )
            break


def _partners(spec: ModelSpec) -> Iterator[tuple[_Side, _Side]]:
    """Yield rows and columns that meet in the forward."""
    head = spec.head_dim
    group = head * spec.num_attention_heads // spec.num_key_value_heads
    for first, second, width, unit in (
        ("q_proj", "o_proj", head, "heads"),
        ("q_proj", "q_norm", head, "heads"),
        ("k_proj", "v_proj", head, "heads"),
        ("k_proj", "k_norm", head, "heads"),
        ("w1", "w3", 1, "channels"),
        ("w1", "w2", 1, "channels"),
        ("gate", "e_score_correction_bias", 1, "experts"),
        *((kind, f"{kind}.bias", head, "heads") for kind in ("q_proj", "k_proj", "v_proj")),
        *(
            (f"{mlp}gate_proj", f"{mlp}{other}", 1, "channels")
            for mlp in ("", f"{SHARED_EXPERTS}.")
            for other in ("up_proj", "down_proj")
        ),
    ):
        if second in ("q_norm", "k_norm") and spec.graph.qk_norm is QkNorm.PER_HEAD:
            # All heads have one weight of the norm.
            continue
        yield _Side(kind=first, width=width, unit=unit), _Side(kind=second, width=width, unit=unit)
    # The kv heads are the groups of query heads.
    yield (
        _Side(kind="q_proj", width=group, unit="groups of heads"),
        _Side(kind="k_proj", width=head, unit="kv heads"),
    )


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


def _word_side(side: _Side, held: Sequence[int], names: StoredNames) -> str:
    part = "columns" if side.is_columns else "rows"
    return f"{part} of {word_kinds([side.kind], names)} of {side.unit} {IndexSequence(indices=torch.tensor(held))}"


# A factor that is read in BF16, and its inverse, are each within a BF16 step of the true one.
_SLACK = 2.0**-7
# Kinds that give away a scale, channel by channel, and those whose columns read these channels.
_READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_layernorm": ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
        "post_attention_layernorm": (
            *("gate", "w1", "w3", "gate_proj", "up_proj"),
            *(f"{SHARED_EXPERTS}.gate_proj", f"{SHARED_EXPERTS}.up_proj"),
        ),
        "v_proj": ("o_proj",),
        "w3": ("w2",),
        "up_proj": ("down_proj",),
        f"{SHARED_EXPERTS}.up_proj": (f"{SHARED_EXPERTS}.down_proj",),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MovedScale:
    """A scale that a kind of tensors gave away, and what became of it in those that read its channels."""

    giver: str
    factors: tuple[torch.Tensor, ...]  # factors of the giver's channels: one vector, or one for each expert
    # The same for the columns of the readers [C], which for `o_proj` are those of all query heads.
    read: tuple[torch.Tensor, ...]
    takers: tuple[str, ...]  # kinds that are multiplied by the inverse
    missing: tuple[str, ...]  # kinds that read these channels, and are not
    names: StoredNames

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that the scale changed."""
        return (self.giver, *self.takers)

    def __str__(self) -> str:
        text = (
            f"{word_kinds([self.giver], self.names)} is multiplied by a number for each channel, "
            f"{_word_range(self.factors)}, and {word_kinds(self.takers, self.names)} by the inverse"
        )
        return f"{text}, {word_kinds(self.missing, self.names)} not" if self.missing else text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scales:
    """The factor of every element of a layer's tensors, as far as factors differ within a port tensor."""

    sources: SourceTensors
    factors: torch.Tensor  # float32, by the number of the source element; 1 where nothing differs
    scaled: tuple[str, ...]  # kinds whose factors differ
    moved: tuple[MovedScale, ...]

    @classmethod
    def of(cls, origins: Iterable[TensorOrigin], sources: SourceTensors, spec: ModelSpec) -> Scales:
        """Read the factors from the origins of all port tensors of a model, on all ranks."""
        factors = torch.ones(sources.size)
        scaled: dict[str, None] = {}
        for origin in origins:
            if origin.gains is None:
                continue
            landed = origin.numbers >= 0
            numbers, gains = origin.numbers[landed], origin.gains[landed]
            factors[numbers] = gains
            changed = numbers[(gains - 1).abs() > _SLACK]
            scaled |= dict.fromkeys(
                sources.all[index].kind for index in sources.find(changed).unique().tolist()
            )
        scales = cls(sources=sources, factors=factors, scaled=tuple(scaled), moved=())
        return replace(scales, moved=tuple(_find_moved(scales, spec)))

    def of_source(self, source: SourceTensor) -> torch.Tensor:
        """Return the factors of a source tensor, of its shape."""
        return self.factors[source.start : source.start + source.size].reshape(source.shape)

    def of_kind(self, kind: str) -> list[torch.Tensor]:
        """Return the factors of each tensor of a kind."""
        return [self.of_source(source) for source in self.sources.all if source.kind == kind]


def find_scaled(scales: Scales) -> Iterator[WeightFinding]:
    """Yield a finding for each scale that was moved, and for each other kind whose elements have several factors."""
    for moved in scales.moved:
        yield WeightFinding(
            mistake=WeightMistake.SCALED,
            # Nothing is lost by a scale that all readers took.
            severity=Severity.SUSPECT if moved.missing else Severity.NOTE,
            kinds=moved.missing or moved.kinds,
            text=str(moved),
        )
    told = {kind for moved in scales.moved for kind in moved.kinds}
    for kind in scales.scaled:
        if kind not in told:
            yield WeightFinding(
                mistake=WeightMistake.SCALED,
                kinds=(kind,),
                text=f"{scales.sources.word([kind])} is multiplied by {word_factors(scales.of_kind(kind))}",
            )


def _find_moved(scales: Scales, spec: ModelSpec) -> Iterator[MovedScale]:
    """Yield the scales that a kind of tensors gave away, and that at least one kind of its readers took."""
    for giver, readers in _READERS.items():
        readers = tuple(kind for kind in readers if scales.of_kind(kind))
        along = [_along(factors, 0) for factors in scales.of_kind(giver)]
        given = tuple(factors for factors in along if factors is not None)
        if giver not in scales.scaled or len(given) < len(along):
            continue
        read = given
        if giver == "v_proj":
            # All query heads of a group read the values of one head.
            num_readers = spec.num_attention_heads // spec.num_key_value_heads
            read = (given[0].reshape(-1, 1, spec.head_dim).expand(-1, num_readers, -1).flatten(),)
        takers = tuple(kind for kind in readers if _takes(scales.of_kind(kind), read))
        if takers:
            missing = tuple(kind for kind in readers if kind not in takers)
            yield MovedScale(
                giver=giver,
                factors=given,
                read=read,
                takers=takers,
                missing=missing,
                names=scales.sources.names,
            )


def _takes(factors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Decide whether the columns of a kind are multiplied by the inverse of what was given."""
    for number, of_tensor in enumerate(factors):
        columns = _along(of_tensor, 1)
        expected = given[number if len(given) > 1 else 0]
        if columns is None or not bool(((columns * expected - 1).abs() <= 2 * _SLACK).all()):
            return False
    return True


def _along(factors: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the factor of each index of a dim; None if it differs along the other one."""
    if factors.dim() == 1:
        return factors
    lines = factors if dim == 0 else factors.T
    first = lines[:, :1]
    return first[:, 0] if bool(((lines / first - 1).abs() <= _SLACK).all()) else None


def word_factors(factors: Sequence[torch.Tensor]) -> str:
    """Return factors in words, by what they depend on."""
    if len(factors) > 1 and all(_is_constant(of_tensor) for of_tensor in factors):
        return f"a number for each expert, {_word_range(factors)}"
    if factors[0].dim() == 1:
        return f"a number for each channel, {_word_range(factors)}"
    for dim, unit in enumerate(("row", "column")):
        if all(_along(of_tensor, dim) is not None for of_tensor in factors):
            return f"a number for each {unit}, {_word_range(factors)}"
    return f"different numbers, {_word_range(factors)}"


def _is_constant(factors: torch.Tensor) -> bool:
    return bool(((factors / factors.flatten()[0] - 1).abs() <= _SLACK).all())


def _word_range(factors: Sequence[torch.Tensor]) -> str:
    low, high = min(float(part.min()) for part in factors), max(float(part.max()) for part in factors)
    return f"{low:.3g} to {high:.3g}"
