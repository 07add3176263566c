"""Modules of the device layer that hold weights of one kind: norms, projections, and an MLP that every token takes.

T tokens, H hidden, W width of an MLP; leading dims are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.reference.float32_stages import activate
from neuron.builtin.rank_cut import RankCut, part_size
from neuron.devices.ranks import Ranks
from neuron.devices.spmd import EXPERT_AXIS, TENSOR_AXIS, Axes
from neuron.devices.weights import Weight

Named = TypeVar("Named")

# What attention and MLPs are divided among: every device, whatever experts it holds.
_ALL_DEVICES = (EXPERT_AXIS, TENSOR_AXIS)
ROW_AXES: Axes = (_ALL_DEVICES, None)
COLUMN_AXES: Axes = (None, _ALL_DEVICES)
BIAS_AXES: Axes = (_ALL_DEVICES,)


def ranks_of(config: Any) -> Ranks:
    """Return the ranks that share the layer; a single rank if the config names none."""
    ranks: Ranks = getattr(config, "ranks", Ranks())
    return ranks


class RMSNorm(nn.Module):
    """RMS norm: float32 statistics, one rounding, then the weight in the run's dtype.

    A gain of 1 + weight is float32, and rounded once behind it. Normed are parts of the states that are as long as the
    weight: all of their width, or each head.
    """

    def __init__(self, width: int, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = config.rms_norm_eps
        self._has_gain_of_one_plus = config.graph.has_gain_of_one_plus

    def forward(self, states: torch.Tensor, mean_square: torch.Tensor | None = None) -> torch.Tensor:
        """Return `states` normed, in their shape and dtype.

        Args:
            states: The states [..., width]; on several ranks, this rank's part of their width.
            mean_square: Mean square [..., 1] over all ranks; None to compute it from `states`.
        """
        width = self.weight.shape[-1]
        parts = states if states.shape[-1] == width else states.unflatten(-1, (-1, width))
        exact = parts.float()
        if mean_square is None:
            mean_square = exact.square().mean(dim=-1, keepdim=True)
        exact = exact * torch.rsqrt(mean_square + self.eps)
        weighted: torch.Tensor
        if self._has_gain_of_one_plus:
            weighted = (exact * (1.0 + self.weight.float())).to(states.dtype)
        else:
            weighted = self.weight * exact.to(states.dtype)
        return weighted.reshape(states.shape)


class UndrawnLinear(nn.Linear):
    """A linear layer whose weight, and bias if it has one, hold anything until they are loaded.

    `torch.nn.utils.skip_init` serves as well, but draws on the meta device, and for that torch loads sympy.
    """

    def __init__(
        self, width_in: int, width_out: int, *, bias: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(width_in, width_out, bias=bias, dtype=dtype)
        self.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Draw nothing."""


class DeviceMlp(nn.Module):
    """An MLP that every token takes: the shared expert, or the whole of a dense layer. All ranks divide its width."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self._ranks, self._graph, self._width = ranks_of(config), config.graph, width
        held = part_size(width, self._ranks.degree)
        self.gate_proj = UndrawnLinear(config.hidden_size, held)
        self.up_proj = UndrawnLinear(config.hidden_size, held)
        self.down_proj = UndrawnLinear(held, config.hidden_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Run the MLP on [...,H]: [...,H]."""
        mixed = activate(self._graph, self.gate_proj(states), self.up_proj(states))
        output: torch.Tensor = self.down_proj(mixed)
        return self._ranks.reduce(output, dtype=states.dtype)

    @property
    def shardings(self) -> dict[str, Axes]:
        """For each dim of each weight, the mesh axes over which devices of one process divide it; see `Spmd`."""
        return {
            "gate_proj.weight": ROW_AXES,
            "up_proj.weight": ROW_AXES,
            "down_proj.weight": COLUMN_AXES,
        }

    def weights(self, tensors: LayerTensors, *, path: str) -> dict[str, Weight]:
        """Return this rank's part of the weights, not yet read, by their names here; `path` is that of this module."""
        rows, columns = (
            RankCut.of_part(self._width, part=self._ranks.rank, num_parts=self._ranks.degree, dim=dim)
            for dim in (0, 1)
        )
        cuts = {"gate_proj.weight": rows, "up_proj.weight": rows, "down_proj.weight": columns}
        return {name: cut.weight(tensors, f"{path}.{name}") for name, cut in cuts.items()}


def behind(path: str, named: Mapping[str, Named]) -> dict[str, Named]:
    """Return what the submodule at `path` names, by the names in the module that holds it."""
    return {f"{path}.{name}": value for name, value in named.items()}
