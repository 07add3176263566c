"""Mistakes of the positions that rotary embedding rotates by. B batch, S sequence.

Most show only at large positions: on prompts that are too short for it, these mistakes have no candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from compare.diagnosis.clues import Clues
from compare.diagnosis.evaluation import Change, Evaluation, GraphNode, LayerInputs, Stage
from compare.diagnosis.mistake import Mistake, Parameters, Value, once_if
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import frequencies, rotate_halves, split_heads

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
