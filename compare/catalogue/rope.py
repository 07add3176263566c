"""Mistakes of rotary embedding: its width, frequencies, pairing of dims, precision, and positions.

B batch, S sequence, D head_dim; angles are [B,S,width/2], where `width` dims of a head are rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from compare.catalogue import repairs
from compare.catalogue.candidates import Parameters, Value, each, once_if, values_of
from compare.catalogue.clues import Clues
from compare.catalogue.low_bits import bfloat16
from compare.catalogue.mistake import Mistake
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Change, Evaluation, LayerInputs, Stage
from minimax_tools.reference.float32_stages import (
    frequencies,
    rotate_halves,
    rotation_angles,
    unrotated_heads,
)

# From the right positions, int64 [B,S], to those that a port rotates by, [B,S] of any dtype.
_Reposition = Callable[[torch.Tensor], torch.Tensor]

# Usual numbers of rows of a table of cos and sin, or of a ring of cached keys: 64 to 131072.
_SIZES = tuple(2**power for power in range(6, 18))
# Usual sizes of chunks that a prefill is divided into, and what is rotated wrongly at their edges.
_CHUNKS = tuple(2**power for power in range(3, 12))
_OF_EDGES: Mapping[str, tuple[Site, ...]] = MappingProxyType(
    {"keys": (Site.K_ROPE,), "queries and keys": (Site.Q_ROPE, Site.K_ROPE)}
)
_DTYPES = MappingProxyType({"bfloat16": torch.bfloat16, "float16": torch.float16})


# From heads [B,heads,S,D] to rotated heads.
_Rotate = Callable[[Evaluation, torch.Tensor], torch.Tensor]
_ROTATED = (Site.Q_ROPE, Site.K_ROPE)


def _rotate_with(rotate: _Rotate, of: Iterable[Site] = _ROTATED) -> Change:
    """Rotate queries and keys, float32 heads behind their norms, in another way."""

    def stage(site: Site) -> Stage:
        return lambda layer: rotate(layer, unrotated_heads(layer, site))

    return Change(stages={site: stage(site) for site in of})


def _with_angles(angles: Callable[[Evaluation], torch.Tensor], of: Iterable[Site] = _ROTATED) -> Change:
    return _rotate_with(lambda layer, heads: rotate_halves(heads, angles(layer)), of)


def _rotate_by(reposition: _Reposition, of: Iterable[Site] = _ROTATED) -> Change:
    return _with_angles(lambda layer: rotation_angles(layer, reposition(layer.position_ids)), of)


def _modulo(modulo: int) -> _Reposition:
    return lambda positions: positions % modulo


def _clamped(last: int) -> _Reposition:
    return lambda positions: positions.clamp(max=last)


def _rounded(dtype: str) -> _Reposition:
    # A port gives NaN for positions past the dtype's largest number, and these tokens are not judged. Here they are
    # clamped, since a NaN would spread to the other tokens.
    rounded = _DTYPES[dtype]
    return lambda positions: positions.to(rounded).clamp(max=torch.finfo(rounded).max)


def _counted(positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(positions.shape[1]).expand_as(positions)


def _early_at_edges(size: int, counted: str = "positions") -> _Reposition:
    """Move the first token of each chunk but the first one position back; chunks are of positions or of columns."""

    def reposition(positions: torch.Tensor) -> torch.Tensor:
        places = positions if counted == "positions" else _counted(positions)
        return positions - ((places % size == 0) & (places > 0)).long()

    return reposition


def _chunks(inputs: LayerInputs) -> tuple[Parameters, ...]:
    """List sizes of chunks that have an edge within a row; of columns, where these are no positions."""
    ways = [{"size": size} for size in _CHUNKS if _shows(inputs, _early_at_edges(size))]
    if _shows(inputs, _counted):
        columns = "columns"
        ways += [
            {"size": size, "counted": columns}
            for size in _CHUNKS
            if _shows(inputs, _early_at_edges(size, columns))
        ]
    return tuple({**way, "of": of} for way in ways for of in _OF_EDGES)


def _those_that_show(
    inputs: LayerInputs, name: str, values: tuple[Value, ...], build: Callable[..., _Reposition]
) -> tuple[Parameters, ...]:
    """List one parameter's values that change the position of some real token."""
    return tuple(MappingProxyType({name: value}) for value in values if _shows(inputs, build(value)))


def _from_first_wrong(clues: Clues, name: str, *, shift: int = 0) -> tuple[Parameters, ...]:
    """List values of one parameter: the likely positions of the first wrong token, moved by `shift`."""
    return tuple(
        MappingProxyType({name: position + shift}) for position in clues.wrong_tokens.first_wrong_positions()
    )


def _shows(inputs: LayerInputs, reposition: _Reposition) -> bool:
    # In float64: next to a BF16 tensor, torch would compare the integers in BF16 too.
    differs = reposition(inputs.position_ids).double() != inputs.position_ids
    return bool((differs & inputs.attention_mask.bool()).any())


def _positions(layer: Evaluation) -> torch.Tensor:
    return layer.position_ids[:, :, None].float()


def _with_frequencies(**changed: Any) -> Change:
    def angles(layer: Evaluation) -> torch.Tensor:
        arguments: dict[str, Any] = {"rotary_dim": layer.spec.rotary_dim, "theta": layer.spec.rope_theta}
        return _positions(layer) * frequencies(**(arguments | changed))

    return _with_angles(angles)


def _interleaved(layer: Evaluation, heads: torch.Tensor) -> torch.Tensor:
    """Rotate dim 2i with dim 2i + 1, and not dim i with dim i + width/2."""
    angles = rotation_angles(layer)[:, None]
    width = 2 * angles.shape[-1]
    even, odd = heads[..., 0:width:2], heads[..., 1:width:2]
    turned = torch.stack(
        (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), dim=-1
    )
    return torch.cat((turned.flatten(-2), heads[..., width:]), dim=-1)


def _last_dims(layer: Evaluation, heads: torch.Tensor) -> torch.Tensor:
    kept = heads.shape[-1] - layer.spec.rotary_dim
    return torch.cat((heads[..., :kept], rotate_halves(heads[..., kept:], rotation_angles(layer))), dim=-1)


def _low_precision(rounded: str) -> Change:
    """Round `angles`, `frequencies`, or `all`: these two and the positions."""

    def angles(layer: Evaluation) -> torch.Tensor:
        right = frequencies(layer.spec.rotary_dim, layer.spec.rope_theta)
        if rounded == "angles":
            return bfloat16(_positions(layer) * right)
        if rounded == "frequencies":
            return _positions(layer) * bfloat16(right)
        return bfloat16(bfloat16(_positions(layer)) * bfloat16(right))

    return _with_angles(angles)


def _wrong_slice(period: int) -> Change:
    """Rotate the dims behind rotary_dim in all heads but the first of each `period`."""

    def rotate(layer: Evaluation, heads: torch.Tensor) -> torch.Tensor:
        width, angles = layer.spec.rotary_dim, rotation_angles(layer)
        right = rotate_halves(heads, angles)
        wrong = torch.cat((heads[..., :width], rotate_halves(heads[..., width:], angles)), dim=-1)
        is_right = torch.arange(heads.shape[1]) % period == 0
        return torch.where(is_right[None, :, None, None], right, wrong)

    return _rotate_with(rotate)


def _other_widths(inputs: LayerInputs) -> tuple[int, ...]:
    """List eighths of head_dim, the widest first."""
    spec = inputs.spec
    widths = {spec.head_dim * eighths // 8 for eighths in range(1, 9)}
    others = [width for width in widths if width % 2 == 0 and width != spec.rotary_dim]
    return tuple(sorted(others, reverse=True))


def _other_frequency_widths(inputs: LayerInputs) -> tuple[int, ...]:
    spec = inputs.spec
    widths = (spec.head_dim, spec.head_dim // 2, spec.rotary_dim // 2, 2 * spec.head_dim, spec.hidden_size)
    return tuple(dict.fromkeys(width for width in widths if width not in (0, spec.rotary_dim)))


def _other_thetas(inputs: LayerInputs) -> tuple[float, ...]:
    thetas = (1e4, 1e6, 5e5, 1e5, 1e7, 5e7, 1e3, 5e6)
    return tuple(theta for theta in thetas if theta != inputs.spec.rope_theta)


def _periods(inputs: LayerInputs) -> tuple[int, ...]:
    spec = inputs.spec
    # Behind rotary_dim, there must be as many dims to rotate.
    if spec.head_dim < 2 * spec.rotary_dim:
        return ()
    return tuple(period for period in (2, 4, 8, 16) if period <= spec.num_attention_heads)


# `build` takes the parameters of a candidate. The one named by `fitted` is then searched between the candidates.
ROPE_MISTAKES = (
    Mistake(name="rope_width", build=_with_frequencies, candidates=each("rotary_dim", _other_widths)),
    Mistake(
        name="rope_theta",
        build=_with_frequencies,
        candidates=each("theta", _other_thetas),
        fitted="theta",
        is_constant=True,
    ),
    Mistake(
        name="rope_interleaved",
        build=lambda: _rotate_with(_interleaved),
        repair=repairs.interleave_rotated_dims,
        reorders=repairs.QUERIES_AND_KEYS,
    ),
    Mistake(name="rope_missing", build=lambda: _rotate_with(lambda _, heads: heads)),
    Mistake(name="rope_reversed", build=lambda: _with_angles(lambda layer: -rotation_angles(layer))),
    Mistake(
        name="rope_last_dims",
        build=lambda: _rotate_with(_last_dims),
        candidates=once_if(lambda inputs: inputs.spec.rotary_dim < inputs.spec.head_dim),
        repair=repairs.move_rotated_dims_behind,
        reorders=repairs.QUERIES_AND_KEYS,
    ),
    Mistake(
        name="rope_position_scaled",
        build=lambda factor: _with_angles(lambda layer: rotation_angles(layer) * factor),
        candidates=values_of("factor", 0.5, 2.0, 0.25, 4.0, 0.125, 8.0, 1 / 16, 1 / 32),
        fitted="factor",
        is_constant=True,
    ),
    Mistake(
        name="rope_frequency_width",
        build=_with_frequencies,
        candidates=each("width", _other_frequency_widths),
    ),
    Mistake(
        name="rope_low_precision",
        build=_low_precision,
        candidates=values_of("rounded", "angles", "frequencies", "all"),
    ),
    Mistake(name="rope_wrong_slice", build=_wrong_slice, candidates=each("period", _periods)),
    Mistake(
        name="rope_positions_modulo",
        build=lambda modulo: _rotate_by(_modulo(modulo)),
        candidates=lambda inputs: _those_that_show(inputs, "modulo", _SIZES, _modulo),
        find=lambda clues: _from_first_wrong(clues, "modulo"),
    ),
    Mistake(
        name="rope_positions_clamped",
        build=lambda last: _rotate_by(_clamped(last)),
        candidates=lambda inputs: _those_that_show(
            inputs, "last", tuple(size - 1 for size in _SIZES), _clamped
        ),
        find=lambda clues: _from_first_wrong(clues, "last", shift=-1),
    ),
    Mistake(
        name="rope_positions_low_precision",
        build=lambda dtype: _rotate_by(_rounded(dtype)),
        candidates=lambda inputs: _those_that_show(inputs, "dtype", tuple(_DTYPES), _rounded),
    ),
    Mistake(
        name="rope_positions_counted",
        build=lambda: _rotate_by(_counted),
        candidates=once_if(lambda inputs: _shows(inputs, _counted)),
    ),
    Mistake(
        name="rope_positions_at_chunk_edges",
        build=lambda size, of, counted="positions": _rotate_by(_early_at_edges(size, counted), _OF_EDGES[of]),
        candidates=_chunks,
    ),
)
