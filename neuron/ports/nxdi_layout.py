"""A layer's tensors under the names and in the shapes of neuronx-distributed-inference.

| hub | NxDI | change |
|---|---|---|
| self_attn.{q,k,v}_proj | self_attn.qkv_proj.{q,k,v}_proj, or Wqkv | the rank's heads, padded and replicated |
| self_attn.o_proj | self_attn.o_proj.o_proj | the columns of the rank's query heads |
| self_attn.{q,k}_norm | the same, or {q,k}_layernorm | the rank's heads, or all ranks' with copies and padding |
| – | …rank_util.rank, …spmd_rank.rank | the rank's number or all ranks', int32 |
| block_sparse_moe.gate | ….router.linear_router, and weight_T | renamed, and transposed |
| e_score_correction_bias | ….router.e_score_correction_bias | renamed |
| experts.E.w1, w3 [I,H] | ….expert_mlps.mlp_op.gate_up_proj [E,H,2·I] | transposed, gate then up |
| experts.E.w2 [H,I] | ….expert_mlps.mlp_op.down_proj [E,I,H] | transposed |

Each rank holds its part of the experts' intermediate size. E experts, I intermediate, H hidden.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from minimax_tools.checkpoint.filling import Gathered, unchanged
from minimax_tools.checkpoint.layer_loader import down_places, gate_up_places
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import TargetError, list_faults
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EXPERTS,
    GATE,
    INPUT_NORM,
    K_NORM,
    K_PROJ,
    O_PROJ,
    POST_NORM,
    Q_NORM,
    Q_PROJ,
    V_PROJ,
)
from neuron.builtin.rank_cut import HeadLayout, RankCut
from neuron.devices.weights import Weight

logger = logging.getLogger(__name__)

_MOE = r"(?:block_sparse_moe|mlp|moe|feed_forward)\."


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdiLayout:
    """A rank's part of a layer on NxDI; `tp_degree` ranks divide the heads and the experts' intermediate size."""

    spec: ModelSpec
    tp_degree: int
    rank: int

    def __post_init__(self) -> None:
        if self.spec.intermediate_size % self.tp_degree:
            raise TargetError(
                f"experts cannot be divided among {self.tp_degree} ranks",
                expected="a degree that divides the intermediate size",
                found=f"intermediate size {self.spec.intermediate_size}",
                next_step="Choose another tensor-parallel degree.",
            )

    def weights(self, parameters: Mapping[str, torch.Tensor], tensors: LayerTensors) -> dict[str, Weight]:
        """Return the weights of the module's parameters with known names; loading reports the others as missing."""
        weights = {}
        for name, parameter in parameters.items():
            if rule_match := _find_rule(name):
                rule, match = rule_match
                weights[name] = rule.make(self, tensors, match, tuple(parameter.shape))
        return weights

    def warn_of_unused(self, parameters: Mapping[str, torch.Tensor], tensors: LayerTensors) -> None:
        """Warn of tensors that no parameter takes, if the names of all parameters are known."""
        unused = self.unused(parameters, tensors)
        if unused and all(map(_find_rule, parameters)):
            stored = [self.spec.family.stored_names.stored(name) for name in unused]
            logger.warning("The port has no place for %s: it computes without.", list_faults(stored))

    def unused(self, parameters: Mapping[str, torch.Tensor], tensors: LayerTensors) -> list[str]:
        """List the tensors that no parameter takes; experts' only if no rule takes experts."""
        taken = set()
        for name in parameters:
            if rule_match := _find_rule(name):
                rule, match = rule_match
                taken |= {tensor.format(**match.groupdict()) for tensor in rule.tensors}
        return [name for name in tensors if (EXPERTS if EXPERTS in name else name) not in taken]

    @property
    def heads(self) -> HeadLayout:
        """Heads of all ranks: NxDI divides them as mm2's device layer does."""
        spec = self.spec
        return HeadLayout(
            num_heads=spec.num_attention_heads,
            num_kv_heads=spec.num_key_value_heads,
            num_ranks=self.tp_degree,
        )

    # The functions of `_RULES`, at the end. They get the shape of the module's parameter, and the match of its name.

    def _projection(self, tensors: LayerTensors, match: re.Match[str], shape: tuple[int, ...]) -> Weight:
        which = match["which"]
        return self._cut_heads(which).weight(tensors, f"self_attn.{which}_proj.weight")

    def _fused_projection(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        cuts = {f"self_attn.{which}_proj.weight": self._cut_heads(which) for which in "qkv"}
        sizes = [cut.size for cut in cuts.values()]

        def places(storage: torch.Tensor) -> dict[str, torch.Tensor]:
            return dict(zip(cuts, storage.split(sizes), strict=True))

        def read(name: str, place: torch.Tensor) -> None:
            cuts[name].read(tensors, name, place)

        return Gathered(shape=(sum(sizes), *tensors.given_shape(Q_PROJ)[1:]), read=read, places=places)

    def _output_projection(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        return self._cut_heads("q", dim=1).weight(tensors, O_PROJ)

    def _norm(self, tensors: LayerTensors, match: re.Match[str], shape: tuple[int, ...]) -> Weight:
        # The parameter's length tells whether the port norms over all ranks' heads or over its own. All ranks' heads,
        # in rank order, have copies and padding: they may be more than the hub's. Loading reports any other length.
        which = match["which"]
        name = Q_NORM if which == "q" else K_NORM
        if self.spec.graph.qk_norm is QkNorm.PER_HEAD:
            return unchanged(tensors, name)
        cut = self._cut_heads(which, of_all_ranks=True)
        if shape != (cut.size,):
            cut = self._cut_heads(which)
        return cut.weight(tensors, name)

    def _rank_number(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        # NxD reads a rank's number from a weight, so that one program serves all ranks. A parameter as long as the
        # number of ranks takes all numbers, before they are divided.
        if shape == (self.tp_degree,):
            return torch.arange(self.tp_degree, dtype=torch.int32)
        return torch.tensor([self.rank], dtype=torch.int32)

    def _transposed_gate(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        return tensors[GATE].T

    def _gate_up(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        spec, cut = self.spec, self._cut_experts(dim=0)
        # A port may round the intermediate size up: the rest is zeros, which compute nothing.
        inner = max(cut.size, shape[-1] // 2)

        def places(storage: torch.Tensor) -> dict[str, torch.Tensor]:
            # [E,H,2,inner]: gate, then up. `mT` is [E,2·inner,H], of which `gate_up_places` gives views as on the hub.
            storage.unflatten(-1, (2, inner))[..., cut.size :].zero_()
            named = gate_up_places(range(spec.num_local_experts), storage.mT, dtype=storage.dtype)
            return {name: place[: cut.size] for name, place in named.items()}

        padded_shape = (spec.num_local_experts, spec.hidden_size, 2 * inner)
        return Gathered(shape=padded_shape, read=partial(cut.read, tensors), places=places)

    def _down(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        spec, cut = self.spec, self._cut_experts(dim=1)
        # A parameter with another number of dims does not fit, which loading reports.
        inner = max(cut.size, shape[1]) if len(shape) == 3 else cut.size

        def places(storage: torch.Tensor) -> dict[str, torch.Tensor]:
            storage[:, cut.size :].zero_()
            named = down_places(range(spec.num_local_experts), storage.mT, dtype=storage.dtype)
            return {name: place[:, : cut.size] for name, place in named.items()}

        padded_shape = (spec.num_local_experts, inner, spec.hidden_size)
        return Gathered(shape=padded_shape, read=partial(cut.read, tensors), places=places)

    def _cut_experts(self, *, dim: int) -> RankCut:
        """Return the rank's part of an expert's matrix, whose intermediate dim is `dim`."""
        return RankCut.of_part(self.spec.intermediate_size, part=self.rank, num_parts=self.tp_degree, dim=dim)

    def _cut_heads(self, which: str, *, dim: int = 0, of_all_ranks: bool = False) -> RankCut:
        """Return the rank's query heads for "q", else its kv heads, along `dim` of a tensor; or all ranks' heads."""
        layout = self.heads
        if of_all_ranks:
            heads = layout.all_query_heads() if which == "q" else layout.all_kv_heads()
        else:
            heads = layout.query_heads(self.rank) if which == "q" else layout.kv_heads(self.rank)
        return RankCut.of_heads(heads, head_dim=self.spec.head_dim, dim=dim)


class _Rule(NamedTuple):
    """A way to make the weights of parameters whose names match a pattern, from the hub's tensors of these names."""

    pattern: str
    # `{which}` stands for what that group of the pattern matched, `EXPERTS` for the tensors of all experts.
    tensors: tuple[str, ...]
    # From the layout, the layer's tensors, the match of the pattern and the parameter's shape to its weight.
    make: Callable[[NxdiLayout, LayerTensors, re.Match[str], tuple[int, ...]], Weight]


def _renamed(pattern: str, name: str) -> _Rule:
    return _Rule(pattern, (name,), lambda layout, tensors, match, shape: unchanged(tensors, name))


_RULES = (
    _renamed(r"input_layernorm\.weight", INPUT_NORM),
    _renamed(r"post_attention_layernorm\.weight", POST_NORM),
    _Rule(
        r"self_attn\.(?:qkv_proj\.)?(?P<which>[qkv])_proj\.weight",
        ("self_attn.{which}_proj.weight",),
        NxdiLayout._projection,
    ),
    _Rule(r"self_attn\.(?:qkv_proj\.)?Wqkv\.weight", (Q_PROJ, K_PROJ, V_PROJ), NxdiLayout._fused_projection),
    _Rule(r"self_attn\.o_proj\.(?:o_proj\.)?weight", (O_PROJ,), NxdiLayout._output_projection),
    _Rule(
        r"self_attn\.(?P<which>[qk])_(?:layer)?norm\.weight",
        ("self_attn.{which}_norm.weight",),
        NxdiLayout._norm,
    ),
    _Rule(r"(?:.+\.)?(?:rank_util|spmd_rank)\.rank", (), NxdiLayout._rank_number),
    _renamed(_MOE + r"router\.linear_router\.weight", GATE),
    _Rule(_MOE + r"router\.weight_T", (GATE,), NxdiLayout._transposed_gate),
    _renamed(_MOE + r"(?:router\.)?e_score_correction_bias", CORRECTION_BIAS),
    _Rule(_MOE + r"expert_mlps\.mlp_op\.gate_up_proj(?:\.weight)?", (EXPERTS,), NxdiLayout._gate_up),
    _Rule(_MOE + r"expert_mlps\.mlp_op\.down_proj(?:\.weight)?", (EXPERTS,), NxdiLayout._down),
)


def _find_rule(name: str) -> tuple[_Rule, re.Match[str]] | None:
    for rule in _RULES:
        if match := re.fullmatch(rule.pattern, name):
            return rule, match
    return None
