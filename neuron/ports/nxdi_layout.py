"""NxdiLayout: a layer's tensors under the names and in the shapes of modules of neuronx-distributed-inference.

| hub | NxDI | change |
|---|---|---|
| self_attn.{q,k,v}_proj | self_attn.qkv_proj.{q,k,v}_proj, or Wqkv | the rank's heads, padded and replicated |
| self_attn.o_proj | self_attn.o_proj.o_proj | columns likewise |
| self_attn.{q,k}_norm | the same, or {q,k}_layernorm | likewise, or of all ranks: as long as the place is |
| – | …rank_util.rank, …spmd_rank.rank | the rank, int32 |
| block_sparse_moe.gate | ….router.linear_router, and weight_T | renamed, and transposed |
| e_score_correction_bias | ….router.e_score_correction_bias | renamed |
| experts.E.w1, w3 [I,H] | ….expert_mlps.mlp_op.gate_up_proj [E,H,2·I] | transposed, gate then up |
| experts.E.w2 [H,I] | ….expert_mlps.mlp_op.down_proj [E,I,H] | transposed |

A rank holds its share of the experts' intermediate size.
D head_dim, E experts, I intermediate, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.regroup import down_places, gate_up_places
from minimax_tools.checkpoint.transpose import copy_matrix
from minimax_tools.errors import TargetError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EXPERT_DOWN,
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
from neuron.builtin.head_layout import Head, HeadLayout
from neuron.devices.weights import Deferred, Gathered, Weight, unchanged

_MOE = r"(?:block_sparse_moe|mlp|moe|feed_forward)\."


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdiLayout:
    """What one rank of a port on NxDI holds of a layer.

    Args:
        spec: The model.
        tp_degree: Ranks that divide the heads and the experts' intermediate size.
        rank: This one.
    """

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

    def weights(self, places: Mapping[str, torch.Tensor], tensors: LayerTensors) -> dict[str, Weight]:
        """The weights of the places whose names are known; what is left out, strict loading tells.

        Args:
            places: What the port's module holds, by its own names.
            tensors: The layer.
        """
        return {
            name: rule.make(self, tensors, match, tuple(place.shape))
            for name, place in places.items()
            for rule, match in _rules_of(name)
        }

    def unused(self, places: Mapping[str, torch.Tensor], tensors: LayerTensors) -> list[str]:
        """The tensors of the layer that no place takes, the experts' left out where any is taken."""
        taken = {
            text.format(**match.groupdict())
            for name in places
            for rule, match in _rules_of(name)
            for text in rule.takes
        }
        return [name for name in tensors if (EXPERTS if EXPERTS in name else name) not in taken]

    @property
    def heads(self) -> HeadLayout:
        """The heads of all ranks: NxDI divides them as mm2's own layer does."""
        spec = self.spec
        return HeadLayout(
            num_heads=spec.num_attention_heads,
            num_kv_heads=spec.num_key_value_heads,
            num_ranks=self.tp_degree,
        )

    @property
    def _intermediate_size(self) -> int:
        return self.spec.intermediate_size // self.tp_degree

    def _projection(self, tensors: LayerTensors, match: re.Match[str], shape: tuple[int, ...]) -> Weight:
        which = match["which"]
        return self._of_heads(tensors, {f"self_attn.{which}_proj.weight": self._own_heads(which)}, dim=0)

    def _fused_projection(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        parts = {f"self_attn.{which}_proj.weight": self._own_heads(which) for which in "qkv"}
        return self._of_heads(tensors, parts, dim=0)

    def _output_projection(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        return self._of_heads(tensors, {O_PROJ: self._own_heads("q")}, dim=1)

    def _norm(self, tensors: LayerTensors, match: re.Match[str], shape: tuple[int, ...]) -> Weight:
        which = match["which"]
        heads = self._all_heads(which)
        if shape != (len(heads) * self.spec.head_dim,):
            heads = self._own_heads(which)
        return self._of_heads(tensors, {Q_NORM if which == "q" else K_NORM: heads}, dim=0)

    def _rank_number(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        if shape == (self.tp_degree,):
            return torch.arange(self.tp_degree, dtype=torch.int32)
        return torch.tensor([self.rank], dtype=torch.int32)

    def _transposed_gate(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        return tensors[GATE].T

    def _gate_up(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        spec, own = self.spec, self._intermediate_size
        # A port may round the intermediate size up: zeros compute nothing.
        inner = max(own, shape[-1] // 2)

        def places(storage: torch.Tensor) -> dict[str, torch.Tensor]:
            halves = storage.unflatten(-1, (2, inner))
            halves[..., own:].zero_()
            named = gate_up_places(range(spec.num_local_experts), storage.mT, dtype=storage.dtype)
            return {name: place[:own] for name, place in named.items()}

        return self._of_experts(tensors, (spec.num_local_experts, spec.hidden_size, 2 * inner), places)

    def _down(self, tensors: LayerTensors, _: re.Match[str], shape: tuple[int, ...]) -> Weight:
        spec, own = self.spec, self._intermediate_size
        inner = max(own, shape[1]) if len(shape) == 3 else own

        def places(storage: torch.Tensor) -> dict[str, torch.Tensor]:
            storage[:, own:].zero_()
            named = down_places(range(spec.num_local_experts), storage.mT, dtype=storage.dtype)
            return {name: place[:, :own] for name, place in named.items()}

        return self._of_experts(tensors, (spec.num_local_experts, inner, spec.hidden_size), places)

    def _of_experts(
        self,
        tensors: LayerTensors,
        shape: tuple[int, ...],
        places: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    ) -> Weight:
        return Gathered(shape=shape, read=partial(self._read_share, tensors), places=places)

    def _read_share(self, tensors: LayerTensors, name: str, place: torch.Tensor) -> None:
        """Fill a place with the rank's share of an expert's matrix."""
        if tuple(place.shape) == tensors.given_shape(name):
            tensors.read_into(name, place)
            return
        dim = 1 if name.endswith(f"{EXPERT_DOWN}.weight") else 0
        start = self.rank * self._intermediate_size
        copy_matrix(tensors[name].narrow(dim, start, self._intermediate_size), place)

    def _all_heads(self, which: str) -> tuple[Head, ...]:
        return self.heads.all_query_heads() if which == "q" else self.heads.all_kv_heads()

    def _own_heads(self, which: str) -> tuple[Head, ...]:
        return self.heads.query_heads(self.rank) if which == "q" else self.heads.kv_heads(self.rank)

    def _of_heads(self, tensors: LayerTensors, parts: Mapping[str, tuple[Head, ...]], *, dim: int) -> Weight:
        """The heads of some tensors along a dim, one tensor after the other."""
        head_dim = self.spec.head_dim
        names = list(parts)
        shape = list(tensors.given_shape(names[0]))
        if len(parts) == 1 and list(parts[names[0]]) == list(range(shape[dim] // head_dim)):
            return unchanged(tensors, names[0])
        shape[dim] = head_dim * sum(len(heads) for heads in parts.values())

        def fill(storage: torch.Tensor) -> None:
            start = 0
            for name, heads in parts.items():
                whole = tensors[name]
                for head in heads:
                    place = storage.narrow(dim, start, head_dim)
                    if head is None:
                        place.zero_()
                    else:
                        place.copy_(whole.narrow(dim, head * head_dim, head_dim))
                    start += head_dim

        return Deferred(shape=tuple(shape), fill=fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How the places of a name are filled.

    Args:
        pattern: Of the name.
        takes: The hub's names that go there; `{which}` is what the pattern calls so.
        make: Makes the weight.
    """

    pattern: re.Pattern[str]
    takes: tuple[str, ...]
    make: Callable[[NxdiLayout, LayerTensors, re.Match[str], tuple[int, ...]], Weight]


def _rule(
    pattern: str,
    takes: tuple[str, ...],
    make: Callable[[NxdiLayout, LayerTensors, re.Match[str], tuple[int, ...]], Weight],
) -> _Rule:
    return _Rule(pattern=re.compile(pattern), takes=takes, make=make)


def _renamed(pattern: str, name: str) -> _Rule:
    return _rule(pattern, (name,), lambda layout, tensors, match, shape: unchanged(tensors, name))


_RULES = (
    _renamed(r"input_layernorm\.weight", INPUT_NORM),
    _renamed(r"post_attention_layernorm\.weight", POST_NORM),
    _rule(
        r"self_attn\.(?:qkv_proj\.)?(?P<which>[qkv])_proj\.weight",
        ("self_attn.{which}_proj.weight",),
        NxdiLayout._projection,
    ),
    _rule(r"self_attn\.(?:qkv_proj\.)?Wqkv\.weight", (Q_PROJ, K_PROJ, V_PROJ), NxdiLayout._fused_projection),
    _rule(r"self_attn\.o_proj\.(?:o_proj\.)?weight", (O_PROJ,), NxdiLayout._output_projection),
    _rule(
        r"self_attn\.(?P<which>[qk])_(?:layer)?norm\.weight",
        ("self_attn.{which}_norm.weight",),
        NxdiLayout._norm,
    ),
    _rule(r"(?:.+\.)?(?:rank_util|spmd_rank)\.rank", (), NxdiLayout._rank_number),
    _renamed(_MOE + r"router\.linear_router\.weight", GATE),
    _rule(_MOE + r"router\.weight_T", (GATE,), NxdiLayout._transposed_gate),
    _renamed(_MOE + r"(?:router\.)?e_score_correction_bias", CORRECTION_BIAS),
    _rule(_MOE + r"expert_mlps\.mlp_op\.gate_up_proj(?:\.weight)?", (EXPERTS,), NxdiLayout._gate_up),
    _rule(_MOE + r"expert_mlps\.mlp_op\.down_proj(?:\.weight)?", (EXPERTS,), NxdiLayout._down),
)


def _rules_of(name: str) -> list[tuple[_Rule, re.Match[str]]]:
    """The rule of a place, or none."""
    return [(rule, match) for rule in _RULES if (match := rule.pattern.fullmatch(name))]
