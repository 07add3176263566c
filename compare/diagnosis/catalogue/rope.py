"""Mistakes of rotary embedding: its width, frequencies, pairing of dims, and precision.

B batch, S sequence, D head_dim; angles are [B,S,width/2], where `width` dims of a head are rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.catalogue.low_bits import bfloat16
from compare.diagnosis.evaluation import Change, Evaluation, LayerInputs, Stage
from compare.diagnosis.mistake import Mistake, each, values_of
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import frequencies, rotate_halves, rotation_angles, split_heads

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
