"""NxDI's layout of a layer: which heads go where, what is transposed, and what a rank's share is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.filling import Deferred, Gathered
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE
from neuron.builtin.rank_cut import HeadLayout
from neuron.devices.weights import Weight
from neuron.ports.nxdi_layout import NxdiLayout

# The toy: 32 experts, hidden 256, intermediate 128, 8 query and 2 kv heads of 64.
E, H, INNER, N, K, D = 32, 256, 128, 8, 2, 64
ATTENTION, MOE, EXPERTS = "self_attn.", "block_sparse_moe.", "mlp.expert_mlps.mlp_op."


@pytest.fixture
def layer(toy: Path) -> Iterator[LayerTensors]:
    with CheckpointReader(toy) as reader:
        yield LayerTensors.open(reader, ModelSpec.from_folder(toy), 1, torch.bfloat16)


@pytest.fixture
def spec(toy: Path) -> ModelSpec:
    return ModelSpec.from_folder(toy)


def fill(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the contents of a weight's storage once it is loaded."""
    if isinstance(weight, torch.Tensor):
        return weight
    assert isinstance(weight, Deferred | Gathered)
    storage = torch.full(weight.shape, float("nan"), dtype=dtype)
    weight.fill(storage)
    return storage


def weights(
    spec: ModelSpec, tensors: LayerTensors, *, degree: int = 1, rank: int = 0, **places: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The filled weights of places, by their names with `__` for dots."""
    layout = NxdiLayout(spec=spec, tp_degree=degree, rank=rank)
    named = {
        name.replace("__", "."): torch.empty(shape, dtype=torch.bfloat16) for name, shape in places.items()
    }
    return {name: fill(weight) for name, weight in layout.weights(named, tensors).items()}


class TestOneRank:
    def test_projections_and_norms_are_renamed(self, spec: ModelSpec, layer: LayerTensors) -> None:
        stored = {"qkv_proj.q_proj": "q_proj", "o_proj.o_proj": "o_proj"}
        stored |= {"k_norm": "k_norm", "q_layernorm": "q_norm"}
        places = {
            f"{ATTENTION}{place}.weight": tuple(layer[f"{ATTENTION}{name}.weight"].shape)
            for place, name in stored.items()
        }
        found = weights(spec, layer, **places, input_layernorm__weight=(H,))
        assert torch.equal(found.pop("input_layernorm.weight"), layer["input_layernorm.weight"])
        assert found.keys() == places.keys()
        for place, name in stored.items():
            assert torch.equal(found[f"{ATTENTION}{place}.weight"], layer[f"{ATTENTION}{name}.weight"])

    def test_fused_projection_has_rows_of_q_then_k_then_v(self, spec: ModelSpec, layer: LayerTensors) -> None:
        [found] = weights(spec, layer, self_attn__Wqkv__weight=((N + 2 * K) * D, H)).values()
        assert torch.equal(found, torch.cat([layer[f"{ATTENTION}{name}_proj.weight"] for name in "qkv"]))

    def test_router_and_bias_stay_float32(self, spec: ModelSpec, layer: LayerTensors) -> None:
        layout = NxdiLayout(spec=spec, tp_degree=1, rank=0)
        places = {
            f"{MOE}router.linear_router.weight": torch.empty(E, H),
            f"{MOE}router.weight_T": torch.empty(H, E),
            f"{MOE}router.e_score_correction_bias": torch.empty(E),
        }
        gate, transposed, bias = (
            fill(weight, torch.float32) for weight in layout.weights(places, layer).values()
        )
        assert torch.equal(gate, layer[GATE])
        assert torch.equal(transposed, layer[GATE].T)
        assert torch.equal(bias, layer[CORRECTION_BIAS])

    def test_intermediate_size_that_a_port_rounds_up_is_filled_with_zeros(
        self, spec: ModelSpec, layer: LayerTensors
    ) -> None:
        inner = INNER + 32
        places = {f"{EXPERTS}gate_up_proj.weight": (E, H, 2 * inner)}
        places[f"{EXPERTS}down_proj.weight"] = (E, inner, H)
        gate_up, down = weights(spec, layer, **places).values()
        assert torch.equal(gate_up[3, :, :INNER], layer[f"{MOE}experts.3.w1.weight"].T)
        assert torch.equal(gate_up[3, :, inner : inner + INNER], layer[f"{MOE}experts.3.w3.weight"].T)
        assert not gate_up[:, :, INNER:inner].any()
        assert not gate_up[:, :, inner + INNER :].any()
        assert torch.equal(down[3, :INNER], layer[f"{MOE}experts.3.w2.weight"].T)
        assert not down[:, INNER:].any()

    def test_places_of_unknown_names_are_left_to_strict_loading(
        self, spec: ModelSpec, layer: LayerTensors
    ) -> None:
        assert weights(spec, layer, self_attn__sinks=(N,), mlp__shared_experts__weight=(H,)) == {}

    def test_what_no_place_takes_is_told(self, spec: ModelSpec, layer: LayerTensors) -> None:
        layout = NxdiLayout(spec=spec, tp_degree=1, rank=0)
        names = [name for name in layer if ".experts." not in name and name != CORRECTION_BIAS]
        renamed = {name.replace(".gate.", ".router.linear_router."): torch.empty(1) for name in names}
        experts = {
            f"{MOE}expert_mlps.mlp_op.{name}_proj.weight": torch.empty(1) for name in ("gate_up", "down")
        }
        assert layout.unused({**renamed, **experts}, layer) == [CORRECTION_BIAS]
        assert len(layout.unused(renamed, layer)) == 1 + 3 * E


class TestRanks:
    def test_shares_of_all_ranks_are_the_whole_experts(self, spec: ModelSpec, layer: LayerTensors) -> None:
        places = {f"{EXPERTS}gate_up_proj.weight": (E, H, 2 * INNER // 4)}
        places[f"{EXPERTS}down_proj.weight"] = (E, INNER // 4, H)
        shares = [weights(spec, layer, degree=4, rank=rank, **places).values() for rank in range(4)]
        gates = torch.cat([gate_up[..., : INNER // 4] for gate_up, _ in shares], dim=-1)
        ups = torch.cat([gate_up[..., INNER // 4 :] for gate_up, _ in shares], dim=-1)
        downs = torch.cat([down for _, down in shares], dim=1)
        for expert in (0, 31):
            assert torch.equal(gates[expert], layer[f"{MOE}experts.{expert}.w1.weight"].T)
            assert torch.equal(ups[expert], layer[f"{MOE}experts.{expert}.w3.weight"].T)
            assert torch.equal(downs[expert], layer[f"{MOE}experts.{expert}.w2.weight"].T)

    def test_a_rank_holds_its_heads_and_a_norm_as_long_as_its_place(
        self, spec: ModelSpec, layer: LayerTensors
    ) -> None:
        # 8 and 2 heads over 4 ranks: 2 queries each, and each kv head twice.
        found = weights(
            spec,
            layer,
            degree=4,
            rank=3,
            self_attn__qkv_proj__q_proj__weight=(2 * D, H),
            self_attn__qkv_proj__k_proj__weight=(D, H),
            self_attn__o_proj__o_proj__weight=(H, 2 * D),
            self_attn__q_norm__weight=(2 * D,),
            self_attn__k_norm__weight=(4 * D,),
            self_attn__rank_util__rank=(1,),
        )
        q, k, o, q_norm, k_norm, rank = found.values()
        assert torch.equal(q, layer[ATTENTION + "q_proj.weight"][6 * D :])
        assert torch.equal(k, layer[ATTENTION + "k_proj.weight"][D:])
        assert torch.equal(o, layer[ATTENTION + "o_proj.weight"][:, 6 * D :])
        assert torch.equal(q_norm, layer[ATTENTION + "q_norm.weight"][6 * D :])
        first, second = layer[ATTENTION + "k_norm.weight"].split(D)
        assert torch.equal(k_norm, torch.cat((first, first, second, second)))
        assert (rank.tolist(), rank.dtype) == ([3], torch.int32)

    def test_padding_heads_are_zeros(self, spec: ModelSpec, layer: LayerTensors) -> None:
        # 8 query heads over 6 ranks are padded to 12: the last two ranks hold padding alone.
        found = NxdiLayout(spec=_with(spec, intermediate_size=126), tp_degree=6, rank=5).weights(
            {"self_attn.qkv_proj.q_proj.weight": torch.empty(2 * D, H)}, layer
        )
        [weight] = found.values()
        places = HeadLayout(num_heads=N, num_kv_heads=K, num_ranks=6).query_heads(5)
        assert None in places
        stored = layer[ATTENTION + "q_proj.weight"].split(D)
        expected = [torch.zeros_like(stored[0]) if head is None else stored[head] for head in places]
        assert torch.equal(fill(weight), torch.cat(expected))

    def test_degree_that_does_not_divide_the_experts_is_refused(self, spec: ModelSpec) -> None:
        with pytest.raises(TargetError, match="divided among 3 ranks.*intermediate size 128"):
            NxdiLayout(spec=spec, tp_degree=3, rank=0)


def _with(spec: ModelSpec, **changes: int) -> ModelSpec:
    return ModelSpec.from_config({**spec.raw, **changes})
