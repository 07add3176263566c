"""Mixture of experts of the device layer: a router, and experts grouped in chunks of equal shape.

Every expert computes every token, and those that are not chosen get weight zero. So no shape depends on the routing,
and one graph serves all chunks of all layers. Each of several ranks has the whole router, a part of the experts, and a
part of their intermediate size.
T tokens (B·S), B batch, S sequence, H hidden, I intermediate, E experts, C experts per chunk, k experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.filling import Gathered
from minimax_tools.checkpoint.layer_loader import down_places, gate_up_places
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import UsageError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.router import Router
from minimax_tools.reference.float32_stages import activate
from minimax_tools.reference.layer import expert_width_of, router_dtype_of
from neuron.builtin.modules import DeviceMlp, behind, ranks_of
from neuron.builtin.rank_cut import RankCut, part_size
from neuron.devices.runtime import cut_graph
from neuron.devices.spmd import EXPERT_AXIS, TENSOR_AXIS, Axes
from neuron.devices.weights import Weight

# Largest size of one chunk's weights: 512 MiB. Neuron allows tensors of 4 GB, but XLA on the CPU copies a running chunk
# in float32: smaller chunks save host memory.
CHUNK_SIZE_BYTES = 1 << 29


class DeviceRouter(nn.Module):
    """Router: logits in float32 or in the dtype of the states, scores in float32.

    The correction bias changes the choice of experts, not their weights.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_local_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=router_dtype_of(config)), requires_grad=False)

    def forward(
        self, states_th: torch.Tensor, correction_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [T,E], weights [T,k], float32 or in their dtype, and experts [T,k] for states [T,H]."""
        logits = torch.matmul(states_th.to(self.weight.dtype), self.weight.T)
        router = Router(spec=self.config, bias=correction_bias)
        scores = router.scores(logits.float())
        experts = router.choose(scores)
        shares = router.shares(scores, experts)
        has_float32_shares = self.config.graph.has_float32_shares
        return logits, shares if has_float32_shares else shares.to(logits.dtype), experts


class ExpertChunk(nn.Module):
    """A chunk of experts: gate_up_proj [C,2·I,H] with the gate rows first, and down_proj [C,H,I].

    Where ranks share experts, I is each rank's part of the intermediate size.
    """

    def __init__(self, num_experts: int, config: Any) -> None:
        super().__init__()
        self._ranks, self._graph = ranks_of(config), config.graph
        self._intermediate_size = expert_width_of(config)
        hidden = config.hidden_size
        intermediate = part_size(self._intermediate_size, self._ranks.ranks_per_expert)
        self.gate_up_proj = _empty_parameter(num_experts, 2 * intermediate, hidden)
        self.down_proj = _empty_parameter(num_experts, hidden, intermediate)

    def forward(
        self, states_th: torch.Tensor, affinities_tc: torch.Tensor, total_th: torch.Tensor
    ) -> torch.Tensor:
        """Add this chunk's weighted outputs to the float32 total [T,H]."""
        gate_cti, up_cti = torch.matmul(states_th[None], self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        mixed_cti = activate(self._graph, gate_cti, up_cti)
        output_cth = torch.matmul(mixed_cti, self.down_proj.transpose(1, 2))
        # A BF16 sum accumulates in BF16 on some backends: widen first.
        return total_th + (output_cth.float() * affinities_tc.T[:, :, None]).sum(dim=0)

    def weights(self, tensors: LayerTensors, experts: range) -> dict[str, Weight]:
        """Return the chunk's weights by name; loading fills them expert by expert."""
        # For each parameter: a function that finds each expert's place in it, and the dim of I in the hub's matrices.
        # w1 and w3 are [I,H], w2 is [H,I]; ranks that share an expert divide I.
        sources = {"gate_up_proj": (gate_up_places, 0), "down_proj": (down_places, 1)}
        num_parts, part = self._ranks.ranks_per_expert, self._ranks.expert_part
        weights: dict[str, Weight] = {}
        for name, (split_storage, dim) in sources.items():
            cut = RankCut.of_part(self._intermediate_size, part=part, num_parts=num_parts, dim=dim)
            weights[name] = Gathered(
                shape=tuple(self.get_parameter(name).shape),
                read=partial(cut.read, tensors),
                places=partial(split_storage, experts, dtype=tensors.dtype),
            )
        return weights


class DeviceMoe(nn.Module):
    """Router and experts, in chunks of at most `chunk_size_bytes` of weights; on a lazy device each is one graph."""

    def __init__(self, config: Any, *, chunk_size_bytes: int) -> None:
        super().__init__()
        self._ranks = ranks_of(config)
        num_experts = experts_per_rank(config)
        first = self._ranks.expert_group * num_experts
        # Numbers of the experts that this rank holds, whole or in part.
        self._held_experts = range(first, first + num_experts)
        self.gate = DeviceRouter(config)
        has_bias = config.graph.has_correction_bias
        bias = torch.empty(config.num_local_experts, dtype=router_dtype_of(config)) if has_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.chunk_size = experts_per_chunk(
            config, dtype=torch.get_default_dtype(), chunk_size_bytes=chunk_size_bytes
        )
        num_chunks = num_experts // self.chunk_size
        self.experts = nn.ModuleList(ExpertChunk(self.chunk_size, config) for _ in range(num_chunks))
        # A module of no effect: the site where the routed experts' sum is captured.
        self.routed = nn.Identity()
        self._graph: ModelGraph = config.graph
        if self._graph.has_shared_experts:
            self.shared_experts = DeviceMlp(config, self._graph.shared_width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return moe_delta [B,S,H] for states [B,S,H]."""
        states_th = states.flatten(0, 1)
        _, weights, experts = self.gate(states_th, self.e_score_correction_bias)
        affinities_te = self._affinities(weights.float(), experts)
        # One copy per chunk: slices at different offsets would compile into different graphs.
        chunk_affinities = [part_tc.contiguous() for part_tc in affinities_te.split(self.chunk_size, dim=-1)]
        total_th = torch.zeros(states_th.shape, dtype=torch.float32, device=states.device)
        for chunk, affinities_tc in zip(self.experts, chunk_affinities, strict=True):
            # On a lazy device, what was recorded so far becomes a graph: the attention and router, or one chunk.
            cut_graph(states.device)
            total_th = chunk(states_th, affinities_tc, total_th)
        cut_graph(states.device)
        routed: torch.Tensor = self.routed(
            self._ranks.reduce(total_th, dtype=states.dtype).view(states.shape)
        )
        if not self._graph.has_shared_experts:
            return routed
        shared: torch.Tensor = self.shared_experts(states)
        total: torch.Tensor = routed * self._graph.sum_scale + shared
        return total

    @property
    def shardings(self) -> dict[str, Axes]:
        """For each dim of each weight, the mesh axes over which devices of one process divide it; see `Spmd`."""
        axes = {
            "gate_up_proj": (EXPERT_AXIS, TENSOR_AXIS, None),
            "down_proj": (EXPERT_AXIS, None, TENSOR_AXIS),
        }
        of_experts: dict[str, Axes] = {
            f"experts.{index}.{name}": weight_axes
            for index in range(len(self.experts))
            for name, weight_axes in axes.items()
        }
        shared = (
            behind("shared_experts", self.shared_experts.shardings) if self._graph.has_shared_experts else {}
        )
        return of_experts | shared

    def weights(self, tensors: LayerTensors, *, path: str) -> dict[str, Weight]:
        """Return the weights of the chunks, and of the shared expert, under this module's names."""
        weights: dict[str, Weight] = {}
        if self._graph.has_shared_experts:
            of_shared = self.shared_experts.weights(tensors, path=f"{path}.shared_experts")
            weights |= behind("shared_experts", of_shared)
        for index, chunk in enumerate(self.experts):
            assert isinstance(chunk, ExpertChunk), "experts holds chunks only"
            experts = self._held_experts[index * self.chunk_size : (index + 1) * self.chunk_size]
            chunk_weights = chunk.weights(tensors, experts)
            weights |= {f"experts.{index}.{name}": weight for name, weight in chunk_weights.items()}
        return weights

    def _affinities(self, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the routing weight of each expert that this rank holds, [T,experts held] float32; 0 if not chosen."""
        held = torch.arange(self._held_experts.start, self._held_experts.stop, device=experts.device)
        chosen = experts[:, :, None] == held
        return torch.where(chosen, weights[:, :, None], 0.0).sum(dim=1)


def experts_per_rank(config: Any) -> int:
    """Return the number of experts that a rank holds, whole or in part."""
    num_experts: int = config.num_local_experts
    degree = ranks_of(config).expert_degree
    if num_experts % degree:
        raise UsageError(
            f"{num_experts} experts do not divide into {degree} groups",
            expected=f"an --ep-degree that divides {num_experts}, and the number of ranks",
            found=str(degree),
        )
    return num_experts // degree


def experts_per_chunk(config: Any, *, dtype: torch.dtype, chunk_size_bytes: int) -> int:
    """Return the chunk size: the largest divisor of a rank's number of experts whose weights fit in a chunk."""
    intermediate = part_size(expert_width_of(config), ranks_of(config).ranks_per_expert)
    # Gate, up and down.
    expert_size_bytes = 3 * config.hidden_size * intermediate * dtype.itemsize
    most = max(1, chunk_size_bytes // expert_size_bytes)
    num_experts = experts_per_rank(config)
    return max(size for size in range(1, min(most, num_experts) + 1) if num_experts % size == 0)


def _empty_parameter(*shape: int) -> nn.Parameter:
    """Build a parameter; loading fills it."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
