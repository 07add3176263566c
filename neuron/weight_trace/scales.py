"""Scales: the factors by which a port multiplied each source tensor, and scales that it moved to another tensor.

A scale is *moved* if one tensor is divided by numbers, channel by channel, and all that read these channels are
multiplied by them, as SmoothQuant and AWQ do. R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.model.spec import ModelSpec
from neuron.weight_trace.agreement import Severity, WeightFinding
from neuron.weight_trace.source_tensors import SourceTensor, SourceTensors, TensorOrigin, word_kinds

# A factor that is read in BF16, and its inverse, are each within a BF16 step of the true one.
_SLACK = 2.0**-7
# Kinds that give away a scale, channel by channel, and those whose columns read these channels.
_READERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_layernorm": ("q_proj", "k_proj", "v_proj"),
        "post_attention_layernorm": ("gate", "w1", "w3"),
        "v_proj": ("o_proj",),
        "w3": ("w2",),
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

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that the scale changed."""
        return (self.giver, *self.takers)

    def __str__(self) -> str:
        text = (
            f"{word_kinds([self.giver])} is multiplied by a number for each channel, {_word_range(self.factors)}, "
            f"and {word_kinds(self.takers)} by the inverse"
        )
        return f"{text}, {word_kinds(self.missing)} not" if self.missing else text


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
                severity=Severity.SUSPECT,
                kinds=(kind,),
                text=f"{word_kinds([kind])} is multiplied by {word_factors(scales.of_kind(kind))}",
            )


def _find_moved(scales: Scales, spec: ModelSpec) -> Iterator[MovedScale]:
    """Yield the scales that a kind of tensors gave away, and that at least one kind of its readers took."""
    for giver, readers in _READERS.items():
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
            yield MovedScale(giver=giver, factors=given, read=read, takers=takers, missing=missing)


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
