"""Mistakes of rotary embedding: its width, frequencies, pairing of dims, and precision.

B batch, S sequence, D head_dim; angles are [B,S,width/2], where `width` dims of a head are rotated.

Mistakes of the positions that rotary embedding rotates by. B batch, S sequence.

Most show only at large positions: on prompts that are too short for it, these mistakes have no candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.catalogue.fp8 import bfloat16
from compare.diagnosis.clues import Clues
from compare.diagnosis.evaluation import Change, Evaluation, GraphNode, LayerInputs, Stage
from compare.diagnosis.mistake import Mistake, Parameters, Value, each, once_if, values_of
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import frequencies, rotate_halves, rotation_angles, split_heads

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


def _rotate_by(reposition: _Reposition, of: tuple[Site, ...] = (Site.Q_ROPE, Site.K_ROPE)) -> Change:
    """Rotate queries and keys, or one of them, by other positions."""

    def rotate(layer: Evaluation, source: Site) -> torch.Tensor:
        spec = layer.spec
        positions = reposition(layer.position_ids).float()[:, :, None]
        angles = positions * frequencies(spec.rotary_dim, spec.rope_theta)
        return rotate_halves(split_heads(layer[source], spec.head_dim), angles)

    stages: dict[GraphNode, Stage] = {
        Site.Q_ROPE: lambda layer: rotate(layer, Site.Q_NORM),
        Site.K_ROPE: lambda layer: rotate(layer, Site.K_NORM),
    }
    return Change(stages={site: stages[site] for site in of})


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
    """Decide whether the position of some real token changes."""
    # In float64: next to a BF16 tensor, torch would compare the integers in BF16 too.
    differs = reposition(inputs.position_ids).double() != inputs.position_ids
    return bool((differs & inputs.attention_mask.bool()).any())


ROPE_POSITION_MISTAKES = (
    Mistake(
        name="rope_positions_modulo",
        what="Positions begin anew after so many.",
        look_at="how position_ids become rows of the table of cos and sin, and the size of a cache's ring",
        build=lambda modulo: _rotate_by(_modulo(modulo)),
        candidates=lambda inputs: _those_that_show(inputs, "modulo", _SIZES, _modulo),
        find=lambda clues: _from_first_wrong(clues, "modulo"),
    ),
    Mistake(
        name="rope_positions_clamped",
        what="Positions past the last row of a table take that row: XLA's gather clamps what lies outside.",
        look_at="the length of the table of cos and sin, against max_position_embeddings",
        build=lambda last: _rotate_by(_clamped(last)),
        candidates=lambda inputs: _those_that_show(
            inputs, "last", tuple(size - 1 for size in _SIZES), _clamped
        ),
        find=lambda clues: _from_first_wrong(clues, "last", shift=-1),
    ),
    Mistake(
        name="rope_positions_low_precision",
        what="Positions are held in a dtype that has no such integers: BF16 is exact to 256, float16 to 2048.",
        look_at="the dtype that position_ids are cast to before they meet inv_freq",
        build=lambda dtype: _rotate_by(_rounded(dtype)),
        candidates=lambda inputs: _those_that_show(inputs, "dtype", tuple(_DTYPES), _rounded),
    ),
    Mistake(
        name="rope_positions_counted",
        what="Rows of the batch are counted from 0, padding included; position_ids are not used.",
        look_at="where the layer takes its positions from: torch.arange, or position_ids",
        build=lambda: _rotate_by(_counted),
        candidates=once_if(lambda inputs: _shows(inputs, _counted)),
    ),
    Mistake(
        name="rope_positions_at_chunk_edges",
        what="The first token of each chunk of a row stands at the position of the token before it.",
        look_at="where a chunk's positions begin: at the number of tokens before it, not at the last of them",
        build=lambda size, of, counted="positions": _rotate_by(_early_at_edges(size, counted), _OF_EDGES[of]),
        candidates=_chunks,
    ),
)


# From heads [B,heads,S,D] to rotated heads.
_Rotate = Callable[[Evaluation, torch.Tensor], torch.Tensor]


def _rotate_with(rotate: _Rotate) -> Change:
    """Rotate queries and keys, the float32 values `layer[site]` behind their norms, in another way."""

    def stage(source: Site) -> Stage:
        return lambda layer: rotate(layer, split_heads(layer[source], layer.spec.head_dim))

    return Change(stages={Site.Q_ROPE: stage(Site.Q_NORM), Site.K_ROPE: stage(Site.K_NORM)})


def _with_angles(angles: Callable[[Evaluation], torch.Tensor]) -> Change:
    return _rotate_with(lambda layer, heads: rotate_halves(heads, angles(layer)))


def _positions(layer: Evaluation) -> torch.Tensor:
    return layer.position_ids[:, :, None].float()


def _with_frequencies(**changed: Any) -> Change:
    """Rotate with other frequencies; `changed` are the arguments of `frequencies` that the port has wrong."""

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
    thetas = (1e4, 1e6, 5e5, 1e5, 1e7, 5e7, 1e3)
    return tuple(theta for theta in thetas if theta != inputs.spec.rope_theta)


def _periods(inputs: LayerInputs) -> tuple[int, ...]:
    spec = inputs.spec
    # Behind rotary_dim, there must be as many dims to rotate.
    if spec.head_dim < 2 * spec.rotary_dim:
        return ()
    return tuple(period for period in (2, 4, 8, 16) if period <= spec.num_attention_heads)


# `build` takes the parameters of a candidate. The one named by `fitted` is then searched between the candidates.
ROPE_MISTAKES = (
    Mistake(
        name="rope_width",
        what="Another width than rotary_dim is rotated, with the frequencies of that width.",
        look_at="whether rotary_dim reaches the rotary embedding, and not head_dim",
        build=_with_frequencies,
        candidates=each("rotary_dim", _other_widths),
        sources=("transformers#48241", "transformers#48486"),
    ),
    Mistake(
        name="rope_theta",
        what="The base of the frequencies is another one than rope_theta.",
        look_at="the default of rope_theta",
        build=_with_frequencies,
        candidates=each("theta", _other_thetas),
        fitted="theta",
        is_constant=True,
        sources=("SpecForge#265",),
    ),
    Mistake(
        name="rope_interleaved",
        what="Neighbouring dims are paired (GPT-J), not dim i with i + rotary_dim/2 (NeoX).",
        look_at="rotate_half, and the layout of cos and sin",
        build=lambda: _rotate_with(_interleaved),
        sources=("vllm-ascend#12765", "vllm-ascend#12780"),
        repair=repairs.ROTATED_DIMS_INTERLEAVED,
    ),
    Mistake(
        name="rope_missing",
        what="Queries and keys are not rotated.",
        look_at="whether this path applies rotary embedding",
        build=lambda: _rotate_with(lambda _, heads: heads),
    ),
    Mistake(
        name="rope_reversed",
        what="Heads are turned the other way.",
        look_at="the sign of sin in the rotation",
        build=lambda: _with_angles(lambda layer: -rotation_angles(layer)),
    ),
    Mistake(
        name="rope_last_dims",
        what="The last rotary_dim dims of each head are rotated, not the first.",
        look_at="how a head is split into rotated and passed dims",
        build=lambda: _rotate_with(_last_dims),
        repair=repairs.ROTATED_DIMS_BEHIND,
    ),
    Mistake(
        name="rope_position_scaled",
        what="Positions are multiplied by a factor.",
        look_at="rope scaling, and how position_ids are made",
        build=lambda factor: _with_angles(lambda layer: rotation_angles(layer) * factor),
        candidates=values_of("factor", 0.5, 2.0, 0.25, 4.0, 0.125, 8.0, 1 / 16, 1 / 32),
        fitted="factor",
        is_constant=True,
    ),
    Mistake(
        name="rope_frequency_width",
        what="The exponents of the frequencies are divided by another width than rotary_dim.",
        look_at="the divisor in inv_freq",
        build=_with_frequencies,
        candidates=each("width", _other_frequency_widths),
    ),
    Mistake(
        name="rope_low_precision",
        what="Angles, or what they are made of, are held in BF16.",
        look_at="the dtype of inv_freq, positions and their product",
        build=_low_precision,
        candidates=values_of("rounded", "angles", "frequencies", "all"),
    ),
    Mistake(
        name="rope_wrong_slice",
        what="All heads but one of each period rotate the dims behind rotary_dim.",
        look_at="a fused norm and rotation where rotary_dim is less than head_dim",
        build=_wrong_slice,
        candidates=each("period", _periods),
        sources=("vllm#51049",),
    ),
)
