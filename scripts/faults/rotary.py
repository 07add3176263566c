"""Mistakes of the rotary embedding: each class overrides a step of the right arithmetic (`attention_stages`).

`rotate` takes heads [B,heads,S,D] and positions [B,S]. It gives the first `rotary_width` dims of each head and the
angles [B,1,S,width/2] to `turn`. Angles are positions times `frequencies`. `ladder(width, divisor, theta, …)` makes
these: theta^(−dim ∕ divisor) for dims 0, 2, 4, … below `width`. `parameters` and `number` give a plant's parameters.
"""

from __future__ import annotations

import torch

from faults.arithmetic import Arithmetic
from faults.plant import Plant
from minimax_tools.model.sites import Site

_ROPE = (Site.Q_ROPE, Site.K_ROPE)


class OtherWidth(Arithmetic):
    """Another width is rotated, at the frequencies of that width."""

    def rotary_width(self) -> int:
        return min(int(self.parameters.rotary_dim), int(self.config.head_dim))


class OtherTheta(Arithmetic):
    """The frequencies have another base."""

    def frequencies(self, device: torch.device) -> torch.Tensor:
        width = self.rotary_width()
        return self.ladder(width, width, self.number("theta"), device)


class Interleaved(Arithmetic):
    """Neighbours are paired instead of halves."""

    def turn(self, part: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos().to(part.dtype), angles.sin().to(part.dtype)
        even, odd = part.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class Missing(Arithmetic):
    """The rotation is left out."""

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return heads


class Reversed(Arithmetic):
    """The rotation goes the other way."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return -super().angles(positions)


class LastDims(Arithmetic):
    """The last dims of a head are rotated."""

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        start = heads.shape[-1] - self.rotary_width()
        return torch.cat((heads[..., :start], self.turn(heads[..., start:], self.angles(positions))), dim=-1)


class PositionScaled(Arithmetic):
    """Positions are stretched, as for a longer context."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(positions) * self.number("factor")


class FrequencyWidth(Arithmetic):
    """The right width is rotated, at frequencies of another width."""

    def frequencies(self, device: torch.device) -> torch.Tensor:
        return self.ladder(self.rotary_width(), self.parameters.width, float(self.config.rope_theta), device)


class LowPrecisionAngles(Arithmetic):
    """Positions, frequencies and their product are in BF16."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        frequencies = self.frequencies(positions.device).bfloat16()
        return (positions[:, None, :, None].bfloat16() * frequencies).float()


class WrongSlice(Arithmetic):
    """The second slice of dims is rotated, not the first, except in every `period`-th head."""

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        width = self.rotary_width()
        if heads.shape[-1] < 2 * width:
            # There is no second slice to rotate.
            return super().rotate(heads, positions)
        angles = self.angles(positions)
        second = self.turn(heads[..., width : 2 * width], angles)
        wrong = torch.cat((heads[..., :width], second, heads[..., 2 * width :]), dim=-1)
        numbers = torch.arange(heads.shape[1], device=heads.device)
        is_first = (numbers % self.parameters.period == 0)[None, :, None, None]
        return torch.where(is_first, super().rotate(heads, positions), wrong)


class ModuloPositions(Arithmetic):
    """Positions begin anew after every `modulo` tokens."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(positions % self.parameters.modulo)


class ClampedPositions(Arithmetic):
    """The table of angles ends too early: its last entry stands for all later positions."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(positions.clamp(max=self.parameters.last))


class EarlyAtEdges(Arithmetic):
    """The first token of each chunk of `size` stands at the position of the one before it."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        is_first = (positions % self.parameters.size == 0) & (positions > 0)
        return super().angles(positions - is_first.long())


class RoundedPositions(Arithmetic):
    """Positions are in a dtype that cannot hold them, frequencies and products in float32."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(positions.to(getattr(torch, self.parameters.dtype)))


class CountedPositions(Arithmetic):
    """Tokens are counted from 0, whatever their positions."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(torch.arange(positions.shape[1], device=positions.device)[None])


_OF_FAR_POSITIONS = tuple(
    Plant(name, _ROPE, arithmetic, parameters, needs_far_positions=True)
    for name, arithmetic, parameters in (
        ("rope_positions_modulo", ModuloPositions, {"modulo": 128}),
        ("rope_positions_modulo", ModuloPositions, {"modulo": 4096}),
        ("rope_positions_clamped", ClampedPositions, {"last": 4095}),
        ("rope_positions_low_precision", RoundedPositions, {"dtype": "bfloat16"}),
        ("rope_positions_low_precision", RoundedPositions, {"dtype": "float16"}),
        ("rope_positions_counted", CountedPositions, {}),
    )
)

PLANTS = (
    *_OF_FAR_POSITIONS,
    # Numbers that no list has: the first wrong token tells them.
    Plant("rope_positions_modulo", _ROPE, ModuloPositions, {"modulo": 45}),
    Plant("rope_positions_clamped", _ROPE, ClampedPositions, {"last": 40}),
    Plant("rope_positions_at_chunk_edges", _ROPE, EarlyAtEdges, {"size": 16, "of": "queries and keys"}),
    Plant("rope_width", _ROPE, OtherWidth, {"rotary_dim": 64}),
    Plant("rope_width", _ROPE, OtherWidth, {"rotary_dim": 16}),
    Plant("rope_theta", _ROPE, OtherTheta, {"theta": 1e4}, decodes=True),
    Plant("rope_interleaved", _ROPE, Interleaved, decodes=True),
    Plant("rope_missing", _ROPE, Missing),
    Plant("rope_reversed", _ROPE, Reversed),
    Plant("rope_last_dims", _ROPE, LastDims),
    Plant("rope_position_scaled", _ROPE, PositionScaled, {"factor": 0.25}),
    Plant("rope_frequency_width", _ROPE, FrequencyWidth, {"width": 64}),
    Plant("rope_low_precision", _ROPE, LowPrecisionAngles),
    Plant("rope_wrong_slice", _ROPE, WrongSlice, {"period": 4}),
)
