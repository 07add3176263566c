"""Mistakes of FP8 checkpoints: codes, or their block scales, read wrongly.

Tensors are named as in reports: the attention's projections, and the experts' matrices w1, w2 and w3.

Low bits: values rounded as ports round them that hold fewer bits; all functions return float32.

R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from compare.diagnosis.evaluation import Change, ExpertValue, GraphNode, LayerInputs, Stage
from compare.diagnosis.expert_pass import Allocate, Decoding, LayerWeights, Recipe
from compare.diagnosis.mistake import Mistake, each, once_if, values_of
from minimax_tools.checkpoint.fp8 import CODE_NUMBERS
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import EXPERT_MATRICES, expert_weight
from minimax_tools.reference.float32_stages import PROJECTIONS

_LARGEST_FP8 = 448.0  # of float8_e4m3fn
# Keeps the scale of a block of zeros from being zero.
_LEAST_SCALE = 1e-12


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round to BF16."""
    return values.bfloat16().float()


def fp8_blocks(weight: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Round [R,C] to FP8 (e4m3) with one scale for each `block` x `block` elements."""
    rounded = torch.empty_like(weight)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            place = slice(row, row + block), slice(column, column + block)
            rounded[place] = _fp8_scaled(weight[place], weight[place].abs().amax())
    return rounded


def fp8_groups(states: torch.Tensor, width: int = 128) -> torch.Tensor:
    """Round [...,C] to FP8 (e4m3) with one scale for each `width` neighbours of a row."""
    parts = [_fp8_scaled(part, part.abs().amax(-1, keepdim=True)) for part in states.split(width, dim=-1)]
    return torch.cat(parts, dim=-1)


def integer_groups(weight: torch.Tensor, width: int, *, largest: float) -> torch.Tensor:
    """Round [R,C] to integers up to `largest` (7 in four bits), with one scale for each `width` neighbours of a row."""
    parts = []
    for part in weight.split(width, dim=-1):
        scale = (part.abs().amax(-1, keepdim=True) / largest).clamp(min=_LEAST_SCALE)
        parts.append((part / scale).round().clamp(-largest - 1, largest) * scale)
    return torch.cat(parts, dim=-1)


def offset_groups(weight: torch.Tensor, width: int, *, num_steps: int) -> torch.Tensor:
    """Round [R,C] to `num_steps` even steps from the least to the largest of each `width` neighbours of a row."""
    parts = []
    for part in weight.split(width, dim=-1):
        least = part.amin(-1, keepdim=True)
        step = ((part.amax(-1, keepdim=True) - least) / num_steps).clamp(min=_LEAST_SCALE)
        parts.append(((part - least) / step).round() * step + least)
    return torch.cat(parts, dim=-1)


def _fp8_scaled(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Round values that share a scale: `largest`, their largest magnitude, becomes the largest FP8 number."""
    scale = (largest / _LARGEST_FP8).clamp(min=_LEAST_SCALE)
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def _fp8_unscaled(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).float()


# Dtypes in which a port may hold the embedding or the head [R,C], and how their rows are rounded to them.
ROUNDINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "bfloat16": bfloat16,
        "float16": lambda rows: rows.half().float(),
        "float8_e4m3fn": _fp8_unscaled,
        "float8_e4m3fn with a scale for each row": lambda rows: fp8_groups(rows, rows.shape[-1]),
        "int8 with a scale for each row": lambda rows: integer_groups(rows, rows.shape[-1], largest=127.0),
    }
)
# Candidates of a mistake's parameter `dtype`.
rounding_dtypes = values_of("dtype", *ROUNDINGS)


# Sites at which a wrongly read projection shows.
_SITES = {"q_proj": Site.Q_PROJ, "k_proj": Site.K_PROJ, "v_proj": Site.V_PROJ, "o_proj": Site.ATTN_DELTA}
_TENSORS = (*_SITES, *EXPERT_MATRICES)


def _decode_with(decoding: Decoding, *tensors: str) -> Change:
    """Read these tensors by another decoding."""

    def product(site: Site) -> Stage:
        source, weight_name = PROJECTIONS[site]
        return lambda layer: layer[source] @ layer.weights.value(weight_name, decoding).T

    sites = [_SITES[tensor] for tensor in tensors if tensor in _SITES]
    stages: dict[GraphNode, Stage] = {site: product(site) for site in sites}
    matrices = tuple(tensor for tensor in tensors if tensor in EXPERT_MATRICES)
    if not matrices:
        return Change(stages=stages)

    def read(weights: LayerWeights, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
        return weights.value(expert_weight(expert, matrix), decoding, allocate=allocate)

    return Change(stages=stages, recipe=Recipe(read=read, changed=matrices))


_WITHOUT_SCALES = Decoding(scales=torch.ones_like)
_SCALES_AVERAGED = Decoding(scales=lambda scales: scales.mean().expand(scales.shape))
_SCALES_ROUNDED_UP_TO_POWERS_OF_TWO = Decoding(scales=lambda scales: torch.exp2(scales.log2().ceil()))
_SCALES_TRANSPOSED = Decoding(scales=lambda scales: scales.T.reshape(scales.shape))
_CODES_AS_INTEGERS = Decoding(numbers=torch.arange(256, dtype=torch.float32))


def _codes_clipped(limit: float) -> Decoding:
    return Decoding(numbers=CODE_NUMBERS.clamp(-limit, limit))


def _activations_quantised() -> Change:
    """Quantise the input of the experts, and the input of their down projection."""

    def mix(gate: torch.Tensor, up: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return fp8_groups(torch.nn.functional.silu(gate) * up)

    return Change(
        stages={ExpertValue.EXPERT_INPUT: lambda layer: fp8_groups(layer[Site.POST_NORM])},
        recipe=Recipe(mix=mix),
    )


def has_fp8_weights(inputs: LayerInputs) -> bool:
    """Decide whether the checkpoint stores matrices of the layer in FP8."""
    return bool(_fp8_tensors(inputs))


def _fp8_tensors(inputs: LayerInputs) -> tuple[str, ...]:
    """List the tensors that the checkpoint stores in FP8; expert 0 stands for all experts."""
    # `PROJECTIONS` holds the input and the weight's name of each site.
    names = {
        **{tensor: PROJECTIONS[site][1] for tensor, site in _SITES.items()},
        **{matrix: expert_weight(0, matrix) for matrix in EXPERT_MATRICES},
    }
    return tuple(tensor for tensor, name in names.items() if inputs.weights.is_fp8(name))


def _of_tensor(
    name: str, *, what: str, look_at: str, decoding: Decoding, sources: tuple[str, ...] = ()
) -> Mistake:
    """Build a mistake that is made in one tensor; every tensor that is stored in FP8 is a candidate."""
    return Mistake(
        name=name,
        what=what,
        look_at=look_at,
        build=lambda tensor: _decode_with(decoding, tensor),
        candidates=each("tensor", _fp8_tensors),
        sources=sources,
    )


def _is_all_fp8(inputs: LayerInputs) -> bool:
    return len(_fp8_tensors(inputs)) == len(_TENSORS)


FP8_MISTAKES = (
    _of_tensor(
        "fp8_scale_missing",
        what="The FP8 codes of a tensor are used without their scales.",
        look_at="how weight_scale_inv is found and bound for this tensor",
        decoding=_WITHOUT_SCALES,
    ),
    _of_tensor(
        "fp8_scale_averaged",
        what="All blocks of a tensor share one scale.",
        look_at="slices that are smaller than a block of 128",
        decoding=_SCALES_AVERAGED,
    ),
    Mistake(
        name="fp8_clipped",
        what="The FP8 codes are clipped at another format's largest number.",
        look_at="the range of the device's FP8 type: 240 against 448",
        build=lambda limit: _decode_with(_codes_clipped(limit), *_TENSORS),
        candidates=each("limit", lambda inputs: (240,) if _is_all_fp8(inputs) else ()),
    ),
    Mistake(
        name="fp8_scale_power_of_two",
        what="The scales are rounded up to powers of two after quantising.",
        look_at="the scale format (ue8m0)",
        build=lambda: _decode_with(_SCALES_ROUNDED_UP_TO_POWERS_OF_TWO, *_TENSORS),
        candidates=once_if(_is_all_fp8),
        sources=("transformers#46763",),
    ),
    _of_tensor(
        "fp8_scale_transposed",
        what="The grid of a tensor's scales is read transposed.",
        look_at="the order of the block scales' two dims",
        decoding=_SCALES_TRANSPOSED,
    ),
    _of_tensor(
        "fp8_codes_as_integers",
        what="The FP8 bytes of a tensor are taken for integers.",
        look_at="the dtype that the codes are viewed as",
        decoding=_CODES_AS_INTEGERS,
        sources=("mlx-lm#1192",),
    ),
    Mistake(
        name="fp8_activations",
        what="The experts' activations are quantised to FP8, one scale for each token and 128 channels.",
        look_at="whether the matmul is FP8 on both sides",
        build=_activations_quantised,
        is_rounding=True,
    ),
)
