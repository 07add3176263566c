"""Mistakes of the positions that rotary embedding turns by. B batch, S sequence.

Most show only far out: a scene without such positions has no candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from compare.diagnosis.evaluation import Change, Evaluation, LayerInputs
from compare.diagnosis.mistake import Candidates, Mistake, Value, each, once_if
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import frequencies, rotate_halves, split_heads

# From positions int64 [B,S] to those that a mistaken port turns by, float32 [B,S].
_Wrong = Callable[[torch.Tensor], torch.Tensor]

_SIZES = tuple(2**power for power in range(6, 18))
_DTYPES = MappingProxyType({"bfloat16": torch.bfloat16, "float16": torch.float16})


def _positions(wrong: _Wrong) -> Change:
    def turn(at: Evaluation, source: Site) -> torch.Tensor:
        spec = at.spec
        positions = wrong(at.position_ids).float()[:, :, None]
        angles = positions * frequencies(spec.rotary_dim, spec.rope_theta)
        return rotate_halves(split_heads(at[source], spec.head_dim), angles)

    return Change(
        stages={
            Site.Q_ROPE: lambda at: turn(at, Site.Q_NORM),
            Site.K_ROPE: lambda at: turn(at, Site.K_NORM),
        }
    )


def _modulo(modulo: int) -> _Wrong:
    return lambda positions: positions % modulo


def _clamped(last: int) -> _Wrong:
    return lambda positions: positions.clamp(max=last)


def _rounded(dtype: str) -> _Wrong:
    # Tokens past a dtype's largest number are NaN in a port, and not judged; here they must not spoil the others.
    held = _DTYPES[dtype]
    return lambda positions: positions.to(held).clamp(max=torch.finfo(held).max)


def _counted(positions: torch.Tensor) -> torch.Tensor:
    return torch.arange(positions.shape[1]).expand_as(positions)


def _that_differ(name: str, values: tuple[Value, ...], build: Callable[..., _Wrong]) -> Candidates:
    """Build candidates of one parameter: values with which some real token turns by another position."""
    return each(name, lambda scene: [value for value in values if _shows(scene, build(value))])


def _shows(scene: LayerInputs, wrong: _Wrong) -> bool:
    # An integer beside BF16 would be rounded too.
    differs = wrong(scene.position_ids).double() != scene.position_ids
    return bool((differs & scene.attention_mask.bool()).any())


ROPE_POSITION_MISTAKES = (
    Mistake(
        name="rope_positions_modulo",
        what="Positions begin anew after so many.",
        look_at="how position_ids become rows of the table of cos and sin, and the size of a cache's ring",
        build=lambda modulo: _positions(_modulo(modulo)),
        candidates=_that_differ("modulo", _SIZES, _modulo),
    ),
    Mistake(
        name="rope_positions_clamped",
        what="Positions past the last row of a table take that row: XLA's gather clamps what lies outside.",
        look_at="the length of the table of cos and sin, against max_position_embeddings",
        build=lambda last: _positions(_clamped(last)),
        candidates=_that_differ("last", tuple(size - 1 for size in _SIZES), _clamped),
    ),
    Mistake(
        name="rope_positions_low_precision",
        what="Positions are held in a dtype that has no such integers: BF16 is exact to 256, float16 to 2048.",
        look_at="the dtype that position_ids are cast to before they meet inv_freq",
        build=lambda dtype: _positions(_rounded(dtype)),
        candidates=_that_differ("dtype", tuple(_DTYPES), _rounded),
    ),
    Mistake(
        name="rope_positions_counted",
        what="Rows of the batch are counted from 0, padding included; position_ids are not used.",
        look_at="where the layer takes its positions from: torch.arange, or position_ids",
        build=lambda: _positions(_counted),
        candidates=once_if(lambda scene: _shows(scene, _counted)),
    ),
)
