"""Mistakes in reading FP8 weights, which need an FP8 checkpoint, and one that rounds activations to FP8."""

from __future__ import annotations

import math
from typing import Any

import torch

from faults.arithmetic import Arithmetic
from faults.plant import Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import ATTENTION_MATRICES, expert_weight, layer_prefix, scale_name

# Site that is wrong if a matrix is read wrongly.
_SITES = {
    "q_proj": Site.Q_PROJ,
    "k_proj": Site.K_PROJ,
    "v_proj": Site.V_PROJ,
    "o_proj": Site.ATTN_DELTA,
    "w1": Site.MOE_DELTA,
    "w2": Site.MOE_DELTA,
    "w3": Site.MOE_DELTA,
}
_ALL_SITES = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.ATTN_DELTA, Site.MOE_DELTA)
_BLOCK = 128  # rows and columns of a block of weights with one scale
_GROUP = 128  # channels of a token with one scale


class Fp8Mistake(Arithmetic):
    """Codes and scales are combined wrongly, in one matrix or in all."""

    def edit(self, tensors: LayerTensors) -> None:
        for name in self._names():
            name_on_hub = layer_prefix(tensors.layer) + name
            codes, scale = tensors.reader.read(name_on_hub), tensors.reader.read(scale_name(name_on_hub))
            tensors[name] = self.weight(codes.float(), scale).to(tensors.given_dtype(name))

    def weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Compute the weight from the values of the codes [R,C] and the scales of the blocks."""
        return codes * spread(scale, codes)

    def _names(self) -> list[str]:
        """Return the names of the wrong matrices: the parameter `tensor` names one kind of them, else all are wrong."""
        experts = range(self.config.num_local_experts)
        tensor = getattr(self.parameters, "tensor", None)
        if tensor is None:
            matrices = [expert_weight(expert, matrix) for expert in experts for matrix in ("w1", "w2", "w3")]
            return [*ATTENTION_MATRICES, *matrices]
        if tensor.startswith("w"):
            return [expert_weight(expert, tensor) for expert in experts]
        return [f"self_attn.{tensor}.weight"]


class ScaleMissing(Fp8Mistake):
    """The codes are used as they are."""

    def weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes


class ScaleAveraged(Fp8Mistake):
    """A single scale per matrix is used."""

    def weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes * scale.mean()


class Clipped(Fp8Mistake):
    """Codes, of up to ±448, are clipped to the range of another format, such as ±240."""

    def weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().weight(codes.clamp(-self.number("limit"), self.number("limit")), scale)


class ScalePowerOfTwo(Fp8Mistake):
    """The scales are rounded up to a power of two after quantising."""

    def weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().weight(codes, torch.exp2(scale.log2().ceil()))


class ScaleTransposed(Fp8Mistake):
    """The grid of scales is read column by column."""

    def weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().weight(codes, scale.T.reshape(scale.shape))


class Activations(Arithmetic):
    """Inputs of the experts' products are rounded to FP8, with a scale for each 128 channels of a token."""

    def activated(self, tokens: torch.Tensor, slab: slice) -> torch.Tensor:
        return round_to_fp8(super().activated(round_to_fp8(tokens), slab))  # slab: experts computed at once


def spread(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Spread the scales of blocks over the codes [R,C]; blocks at the edges may be smaller."""
    wide = scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return wide[: codes.shape[0], : codes.shape[1]]


def round_to_fp8(states: torch.Tensor) -> torch.Tensor:
    """Round to E4M3 and back, with a scale per group of 128 channels, or fewer if 128 does not divide the width."""
    groups = states.float().unflatten(-1, (-1, math.gcd(_GROUP, states.shape[-1])))
    # The least scale keeps groups of zeros from 0 / 0.
    scale = (groups.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    rounded: torch.Tensor = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).to(states.dtype)


def _plant(name: str, sites: tuple[Site, ...], arithmetic: type[Arithmetic], **parameters: Any) -> Plant:
    return Plant(name, sites, arithmetic, parameters, needs_fp8=True)


PLANTS = (
    *(_plant("fp8_scale_missing", (site,), ScaleMissing, tensor=tensor) for tensor, site in _SITES.items()),
    *(
        _plant("fp8_scale_averaged", (_SITES[tensor],), ScaleAveraged, tensor=tensor)
        for tensor in ("q_proj", "o_proj", "w1", "w2")
    ),
    _plant("fp8_clipped", _ALL_SITES, Clipped, limit=240),
    _plant("fp8_scale_power_of_two", _ALL_SITES, ScalePowerOfTwo),
    *(
        _plant("fp8_scale_transposed", (_SITES[tensor],), ScaleTransposed, tensor=tensor)
        for tensor in ("q_proj", "o_proj")
    ),
    Plant("fp8_activations", (Site.MOE_DELTA,), Activations),
)
