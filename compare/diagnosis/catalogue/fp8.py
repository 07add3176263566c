"""Mistakes of FP8 checkpoints: codes and block scales read wrongly. R rows, C columns of a matrix."""

from __future__ import annotations

import torch

from compare.diagnosis.catalogue.low_bits import fp8_groups
from compare.diagnosis.evaluation import Change, ExpertValue, GraphNode, LayerInputs, Stage
from compare.diagnosis.expert_pass import Recipe
from compare.diagnosis.layer_weights import Decode, LayerWeights, read_codes, spread_scales
from compare.diagnosis.mistake import Mistake, each, once_if
from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EXPERT_MATRICES, expert_weight
from minimax_tools.reference.float32_stages import PROJECTIONS

_SITES = {"q_proj": Site.Q_PROJ, "k_proj": Site.K_PROJ, "v_proj": Site.V_PROJ, "o_proj": Site.ATTN_DELTA}
TENSORS = (*_SITES, *EXPERT_MATRICES)


def _decoded(decode: Decode, *tensors: str) -> Change:
    """Read these tensors' codes and scales in another way."""

    def product(source: Site, name: str) -> Stage:
        return lambda at: at[source] @ at.weights.decoded(name, decode).T

    sites = [_SITES[tensor] for tensor in tensors if tensor in _SITES]
    stages: dict[GraphNode, Stage] = {site: product(*PROJECTIONS[site]) for site in sites}
    matrices = tuple(tensor for tensor in tensors if tensor in EXPERT_MATRICES)

    def read(weights: LayerWeights, expert: int, matrix: str) -> torch.Tensor:
        return weights.decoded(expert_weight(expert, matrix), decode)

    return Change(stages=stages, recipe=Recipe(read=read, changed=matrices) if matrices else None)


def _without_scale(codes: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return read_codes(codes)


def _averaged(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantise(codes, scales.mean().expand(scales.shape).contiguous(), dtype=torch.float32)


def _clipped(limit: float) -> Decode:
    return lambda codes, scales: read_codes(codes).clamp(-limit, limit) * spread_scales(scales, codes.shape)


def _power_of_two(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantise(codes, torch.exp2(scales.log2().ceil()), dtype=torch.float32)


def _transposed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return dequantise(codes, scales.T.reshape(scales.shape), dtype=torch.float32)


def _as_integers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).float() * spread_scales(scales, codes.shape)


def _activations() -> Change:
    def mix(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return fp8_groups(torch.nn.functional.silu(gate) * up)

    return Change(
        stages={ExpertValue.EXPERT_INPUT: lambda at: fp8_groups(at[Site.POST_NORM])}, recipe=Recipe(mix=mix)
    )


def is_fp8(scene: LayerInputs) -> bool:
    """Decide whether the checkpoint stores matrices of the layer in FP8."""
    return bool(_stored(scene))


def _stored(scene: LayerInputs) -> tuple[str, ...]:
    """List the tensors that the checkpoint stores in FP8."""
    of_tensor = {
        **{tensor: PROJECTIONS[site][1] for tensor, site in _SITES.items()},
        **{matrix: expert_weight(0, matrix) for matrix in EXPERT_MATRICES},
    }
    return tuple(tensor for tensor, name in of_tensor.items() if scene.weights.is_fp8(name))


def _of_tensor(
    name: str, *, what: str, look_at: str, decode: Decode, sources: tuple[str, ...] = ()
) -> Mistake:
    """Build a mistake of one tensor, whichever of those that are stored in FP8."""
    return Mistake(
        name=name,
        what=what,
        look_at=look_at,
        build=lambda tensor: _decoded(decode, tensor),
        candidates=each("tensor", _stored),
        sources=sources,
    )


def _is_all_fp8(scene: LayerInputs) -> bool:
    return len(_stored(scene)) == len(TENSORS)


FP8_MISTAKES = (
    _of_tensor(
        "fp8_scale_missing",
        what="The FP8 codes of a tensor are used without their scales.",
        look_at="how weight_scale_inv is found and bound for this tensor",
        decode=_without_scale,
    ),
    _of_tensor(
        "fp8_scale_averaged",
        what="All blocks of a tensor share one scale.",
        look_at="slices that are smaller than a block of 128",
        decode=_averaged,
    ),
    Mistake(
        name="fp8_clipped",
        what="The FP8 codes are clipped at another format's largest number.",
        look_at="the range of the device's FP8 type: 240 against 448",
        build=lambda limit: _decoded(_clipped(limit), *TENSORS),
        candidates=each("limit", lambda scene: (240,) if _is_all_fp8(scene) else ()),
    ),
    Mistake(
        name="fp8_scale_power_of_two",
        what="The scales are rounded up to powers of two after quantising.",
        look_at="the scale format (ue8m0)",
        build=lambda: _decoded(_power_of_two, *TENSORS),
        candidates=once_if(_is_all_fp8),
        sources=("transformers#46763",),
    ),
    _of_tensor(
        "fp8_scale_transposed",
        what="The grid of a tensor's scales is read transposed.",
        look_at="the order of the block scales' two dims",
        decode=_transposed,
    ),
    _of_tensor(
        "fp8_codes_as_integers",
        what="The FP8 bytes of a tensor are taken for integers.",
        look_at="the dtype that the codes are viewed as",
        decode=_as_integers,
        sources=("mlx-lm#1192",),
    ),
    Mistake(
        name="fp8_activations",
        what="The experts' activations are quantised to FP8, one scale for each token and 128 channels.",
        look_at="whether the matmul is FP8 on both sides",
        build=_activations,
        is_rounding=True,
    ),
)
