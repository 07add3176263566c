"""Equivalents: changes that look like mistakes but leave the layer's output the same; mm2 must fail none of them.

They hide (`hides`) the sites whose values do change, such as those with another order of heads or experts.
"""

from __future__ import annotations

from functools import partial

import torch

from faults.arithmetic import Arithmetic, KeyValues, Tap
from faults.plant import Kind, Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import K_NORM, K_PROJ, O_PROJ, Q_NORM, Q_PROJ, V_PROJ

_ROPE = (Site.Q_ROPE, Site.K_ROPE)
_HEADS = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ, Site.Q_NORM, Site.K_NORM, *_ROPE, Site.ATTN_CONTEXT)
_ROUTER = (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)


class PositionsOffset(Arithmetic):
    """Positions are three higher: attention sees only their differences."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        return super().angles(positions + 3)


class PaddingGarbage(Arithmetic):
    """Padding holds other numbers."""

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask[:, :, None].bool(), moe, 1000.0)


class WeightsBfloat16(Arithmetic):
    """Routing weights are rounded to BF16, as transformers 4.57 does."""

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        return super().balance(chosen).bfloat16().float()


class HeadsPermuted(Arithmetic):
    """The kv groups stand in reverse order, in all matrices."""

    def edit(self, tensors: LayerTensors) -> None:
        groups = self.config.num_key_value_heads
        for name in (Q_PROJ, K_PROJ, V_PROJ, Q_NORM, K_NORM):
            tensors[name] = tensors[name].unflatten(0, (groups, -1)).flip(0).flatten(0, 1)
        tensors[O_PROJ] = tensors[O_PROJ].unflatten(1, (groups, -1)).flip(1).flatten(1)


class WidthPermuted(Arithmetic):
    """The channels inside every expert stand in reverse order, in all of its matrices."""

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        state = super().fuse(tensors)
        halves = state["gate_up"].unflatten(1, (2, -1))
        return {**state, "gate_up": halves.flip(2).flatten(1, 2), "down": state["down"].flip(2)}


class ExpertsPermuted(Arithmetic):
    """The experts have other numbers, in the router too."""

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        state = super().fuse(tensors)
        return {**state, **{name: state[name].flip(0) for name in ("gate", "bias", "gate_up", "down")}}


class OtherPadding(Arithmetic):
    """Padding is moved to the other side before the layer, and back behind it."""

    def run(
        self,
        states: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        past: KeyValues | None,
        tap: Tap,
    ) -> tuple[torch.Tensor, KeyValues]:
        assert past is None, "decoded tokens are not moved"
        length = mask.shape[1]
        places = torch.arange(length, device=mask.device)
        # A prompt moves by the length of its padding: right if it is padded on the right, else left. A prompt that is
        # padded on the right begins with a real token, whose mask is 1: 2 · 1 − 1 = 1. Else 2 · 0 − 1 = −1.
        shift = (length - mask.sum(-1)) * (2 * mask[:, 0] - 1)
        there = (places[None] - shift[:, None]) % length
        back = (places[None] + shift[:, None]) % length

        def tap_moved(site: str, value: torch.Tensor) -> torch.Tensor:
            """Show a site's value [T,…], [B,S,…] or [B,heads,S,D] with its padding moved back; return it as it is."""
            if value.ndim == 2:
                shown = _move(value.unflatten(0, mask.shape), back, dim=1).flatten(0, 1)
            else:
                shown = _move(value, back, dim=2 if value.ndim == 4 else 1)
            tap(site, shown)
            return value

        output, (keys, values) = super().run(
            _move(states, there, dim=1), mask.gather(1, there), positions.gather(1, there), None, tap_moved
        )
        return _move(output, back, dim=1), (_move(keys, back, dim=2), _move(values, back, dim=2))


class QueriesHoldTheScale(Arithmetic):
    """The norm of the queries holds a part of attention's scale."""

    def q_norm(self, flat: torch.Tensor) -> torch.Tensor:
        return super().q_norm(flat) * 0.25

    def attention_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().attention_scores(q, k) * 4


class ReverseOrder(Arithmetic):
    """The experts are added up from the last to the first."""

    def accumulate(self, total: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        for output in outputs.flip(0):
            total = total + output
        return total


class NormWeightFloat32(Arithmetic):
    """The norms' weights are multiplied in float32, and rounded after it."""

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps())
        return (exact * weight.float()).to(states.dtype)


class ExpertsFloat32(Arithmetic):
    """The experts' activation is computed in float32."""

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super().activate(gate.float(), up.float()).to(gate.dtype)


_plant = partial(Plant, sites=(Site.OUTPUT,), kind=Kind.EQUIVALENT)  # sites: where the effect is measured
PLANTS = (
    _plant("positions_offset", arithmetic=PositionsOffset, hides=_ROPE),
    _plant("padding_garbage", arithmetic=PaddingGarbage),
    _plant("weights_bfloat16", arithmetic=WeightsBfloat16),
    _plant("heads_permuted", arithmetic=HeadsPermuted, hides=_HEADS),
    _plant("width_permuted", arithmetic=WidthPermuted),
    _plant("experts_permuted", arithmetic=ExpertsPermuted, hides=_ROUTER),
    _plant("other_padding", arithmetic=OtherPadding),
    _plant("queries_hold_the_scale", arithmetic=QueriesHoldTheScale, hides=(Site.Q_NORM, Site.Q_ROPE)),
    _plant("experts_in_reverse_order", arithmetic=ReverseOrder),
    _plant("norm_weight_float32", arithmetic=NormWeightFloat32),
    _plant("activation_float32", arithmetic=ExpertsFloat32),
)


def _move(value: torch.Tensor, places: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Take the tokens of dim `dim` of [B,…] from other places in their prompt, int64 [B,S]."""
    shape = [1] * value.ndim
    shape[0], shape[dim] = places.shape
    return value.gather(dim, places.view(shape).expand(value.shape))
