"""`--target nxdi:…`: how a layer on neuronx-distributed-inference is built, called, loaded and judged.

What needs the package is skipped where it cannot be imported. Of its layout: which heads go where, what is transposed,
and what a rank's share is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from minimax_tools.checkpoint.filling import Deferred, Gathered
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.families.qwen3_moe import QWEN3_MOE
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.builtin.rank_cut import HeadLayout
from neuron.devices.weights import Weight
from neuron.ports.nxdi import NxdiLayer, convert_by_table
from neuron.ports.nxdi_layout import NxdiLayout

PORTS = Path(__file__).parents[2] / "ports"
OWN_QWEN3_MOE = "neuronx_distributed_inference.models.qwen3_moe.modeling_qwen3_moe:NeuronQwen3MoeDecoderLayer"


class Layer(nn.Module):
    """Called as NxDI calls its layers; it returns what it was given, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.Identity(), nn.Identity()
        self.self_attn = nn.ModuleDict(
            {"qkv_proj": nn.ModuleDict({"q_proj": nn.Identity()}), "o_proj": nn.Identity()}
        )
        self.mlp = nn.ModuleDict({"router": nn.Identity()})
        self.given: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
        self.given = given
        return hidden_states, hidden_states


def wrapped(layer: nn.Module, *, is_cpu_mode: bool = True) -> NxdiLayer:
    layout = NxdiLayout(spec=SyntheticModel().spec(), tp_degree=1, rank=0)
    return NxdiLayer(
        layer,
        conversion=convert_by_table(layer, layout),
        layout=layout,
        neuron_config=SimpleNamespace(),
        is_cpu_mode=is_cpu_mode,
    )


@pytest.fixture(scope="session")
def qwen3_moe(make_model: Any) -> Path:
    """A toy of Qwen3-MoE, in BF16."""
    folder: Path = make_model(SyntheticModel.toy(QWEN3_MOE), torch.bfloat16)
    return folder


@pytest.fixture
def layer() -> NxdiLayer:
    return wrapped(Layer())


def given(layer: NxdiLayer) -> dict[str, Any]:
    module = layer.layer
    assert isinstance(module, Layer)
    return module.given


def test_prefill_gets_a_boolean_mask_that_is_causal_and_hides_padding(layer: NxdiLayer) -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    layer(torch.zeros(2, 3, 4), mask, torch.arange(3).expand(2, 3))
    found = given(layer)
    assert set(found) == {"attention_mask", "position_ids"}
    assert found["attention_mask"].dtype is torch.bool
    assert found["attention_mask"].int().tolist() == [
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]],
        [[[0, 0, 0], [0, 1, 0], [0, 1, 1]]],
    ]
    assert layer._neuron_config.is_prefill_stage is True


def test_decoding_tells_apart_what_is_seen_of_the_past_and_of_its_own_rows(layer: NxdiLayer) -> None:
    past = (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    mask = torch.tensor([[1, 0, 1, 1, 1]])
    layer(torch.zeros(1, 2, 8), mask, torch.tensor([[2, 3]]), past_key_value=past)
    found = given(layer)
    assert found["attention_mask"].int().tolist() == [[[[1, 0, 1], [1, 0, 1]]]]
    assert found["active_mask"].int().tolist() == [[[[1, 0], [1, 1]]]]
    assert found["past_key_value"] is past
    assert layer._neuron_config.is_prefill_stage is False


def test_sites_are_found_where_layers_on_nxdi_show_them(layer: NxdiLayer) -> None:
    assert layer.sites == {
        "input_norm": "layer.input_layernorm",
        "q_proj": "layer.self_attn.qkv_proj.q_proj@shard(-1; 0,1,2,3,4,5,6,7)",
        "attn_context": "layer.self_attn.o_proj:input@shard(-1; 0,1,2,3,4,5,6,7)",
        "attn_delta": "layer.self_attn.o_proj",
        "attn_residual": "layer.post_attention_layernorm:input",
        "post_norm": "layer.post_attention_layernorm",
        "router_logits": "layer.mlp.router:output[0]",
        "router_experts": "layer.mlp.router:output[2]",
        "moe_delta": "layer.mlp",
    }


def test_sites_of_the_class_come_first() -> None:
    class Declaring(Layer):
        sites = {"moe_delta": "mlp:output[1]"}  # noqa: RUF012 - what a porter writes

    assert wrapped(Declaring()).sites == {"moe_delta": "layer.mlp:output[1]"}


def test_cpu_that_nxd_was_not_told_of_is_refused() -> None:
    layer = wrapped(Layer(), is_cpu_mode=False)
    with pytest.raises(TargetError, match="expected NXD_CPU_MODE=1, found NXD_CPU_MODE=0"):
        layer(torch.zeros(1, 2, 4), torch.ones(1, 2), torch.arange(2)[None])


def test_without_the_package_it_says_what_to_install(run_layer: Any, run_python: Any) -> None:
    done: subprocess.CompletedProcess[str] = run_python("import neuronx_distributed_inference.models.config")
    if done.returncode == 0:
        pytest.skip("neuronx_distributed_inference is installed")
    result = run_layer("nxdi:some.module:Layer")
    assert result.exit_code == 3
    assert "needs the package neuronx_distributed_inference" in result.stderr
    assert "pip.repos.neuron.amazonaws.com" in result.stderr


@pytest.fixture
def sweep(needs_nxdi: None, process: Any, toy: Path, golden: Path) -> Any:
    """Runs two layers of a port on the CPU, on NxDI itself: the process, and its JSON."""

    def run(target: str, *options: object) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        given = ("sweep", "--layers", "0:2", "--model", toy, "--golden", golden, "--backend", "cpu", "--json")
        done = process(*given, "--target", f"nxdi:{PORTS}/{target}", *options, NXD_CPU_MODE="1")
        assert done.stdout, done.stderr
        return done, json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("target", "options", "counts"),
    [
        ("nxdi_port.py:DecoderLayer", (), (30, 34)),
        ("nxdi_port.py:DecoderLayer", ("--decode", 3), None),
        # The class chooses its config; of the fused projection its three parts do not show.
        ("nxdi_port.py:FusedProjection", (), (24, 34)),
        # The application's conversion and NxDI's cast are run.
        ("causal_port.py:AsDeclared", (), (30, 34)),
    ],
)
def test_right_port_passes(
    sweep: Any, target: str, options: tuple[object, ...], counts: tuple[int, int] | None
) -> None:
    done, record = sweep(target, *options)
    assert (done.returncode, record["verdict"]) == (0, "pass"), done.stderr
    assert counts in (None, (record["compared"], record["of"]))


def test_port_without_a_place_for_the_bias_is_told_and_blamed(sweep: Any) -> None:
    done, record = sweep("nxdi_port.py:WithoutBias")
    assert done.returncode == 1
    assert "no place for block_sparse_moe.e_score_correction_bias" in done.stderr
    assert {site for blame in record["blame"] for site in blame["sites"]} == {"router_experts"}


def test_router_is_cast_unless_declared(sweep: Any) -> None:
    done, record = sweep("causal_port.py:DecoderLayer")
    assert done.returncode == 1
    assert record["observed_dtypes"] == {"correction_bias": "bfloat16", "router_gate": "bfloat16"}


@pytest.fixture(scope="module")
def qwen3_moe_golden(needs_nxdi: None, qwen3_moe: Path, make_golden: Any) -> Path:
    golden: Path = make_golden(qwen3_moe, "--seq-len", "48,33")
    return golden


class TestNxdisOwnLayer:
    """NxDI's own layer of Qwen3-MoE: its names, its norms of each head, its conversion."""

    @pytest.fixture
    def judge(self, process: Any, qwen3_moe: Path, qwen3_moe_golden: Path) -> Any:
        """Runs a command of `mm2-test`, a sweep on two layers; gives its JSON."""

        def run(command: str, target: str, *options: object) -> dict[str, Any]:
            given = ("--model", qwen3_moe, "--target", f"nxdi:{target}", "--json", "--quiet")
            if command == "sweep":
                options = ("--layers", "0:2", "--golden", qwen3_moe_golden, "--backend", "cpu", *options)
            done = process(command, *given, *options, NXD_CPU_MODE="1")
            assert done.stdout, done.stderr
            record: dict[str, Any] = json.loads(done.stdout)
            return record

        return run

    @pytest.mark.parametrize("options", [(), ("--tp-degree", 2)])
    def test_right_layer_passes(self, judge: Any, options: tuple[object, ...]) -> None:
        record = judge("sweep", OWN_QWEN3_MOE, *options)
        assert (record["verdict"], record["compared"], record["of"]) == ("pass", 30, 34)

    def test_its_conversion_is_right(self, judge: Any) -> None:
        assert judge("weights", OWN_QWEN3_MOE)["verdict"] == "pass"

    def test_swapped_conversion_is_named(self, judge: Any) -> None:
        record = judge("weights", f"{PORTS}/nxdi_qwen3_moe.py:SwappedGateUp")
        wrong = [finding["text"] for finding in record["findings"] if finding["severity"] == "wrong"]
        assert wrong == ["gate_proj and up_proj are swapped"]

    @pytest.mark.parametrize(
        ("name", "site"),
        [("SwappedGateUp", "moe_delta"), ("SharesLost", "router_weights"), ("QueriesUnnormed", "q_norm")],
    )
    def test_mistake_is_to_blame(self, judge: Any, name: str, site: str) -> None:
        record = judge("sweep", f"{PORTS}/nxdi_qwen3_moe.py:{name}")
        assert record["verdict"] == "fail"
        assert {found for blame in record["blame"] for found in blame["sites"]} == {site}


# The toy: 32 experts, hidden 256, intermediate 128, 8 query and 2 kv heads of 64.
E, H, INNER, N, K, D = 32, 256, 128, 8, 2, 64
ATTENTION, MOE, EXPERTS = "self_attn.", "block_sparse_moe.", "mlp.expert_mlps.mlp_op."


@pytest.fixture
def tensors(toy: Path) -> Iterator[LayerTensors]:
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
    def test_projections_and_norms_are_renamed(self, spec: ModelSpec, tensors: LayerTensors) -> None:
        stored = {"qkv_proj.q_proj": "q_proj", "o_proj.o_proj": "o_proj"}
        stored |= {"k_norm": "k_norm", "q_layernorm": "q_norm"}
        places = {
            f"{ATTENTION}{place}.weight": tuple(tensors[f"{ATTENTION}{name}.weight"].shape)
            for place, name in stored.items()
        }
        found = weights(spec, tensors, **places, input_layernorm__weight=(H,))
        assert torch.equal(found.pop("input_layernorm.weight"), tensors["input_layernorm.weight"])
        assert found.keys() == places.keys()
        for place, name in stored.items():
            assert torch.equal(found[f"{ATTENTION}{place}.weight"], tensors[f"{ATTENTION}{name}.weight"])

    def test_fused_projection_has_rows_of_q_then_k_then_v(
        self, spec: ModelSpec, tensors: LayerTensors
    ) -> None:
        [found] = weights(spec, tensors, self_attn__Wqkv__weight=((N + 2 * K) * D, H)).values()
        assert torch.equal(found, torch.cat([tensors[f"{ATTENTION}{name}_proj.weight"] for name in "qkv"]))

    def test_router_and_bias_stay_float32(self, spec: ModelSpec, tensors: LayerTensors) -> None:
        layout = NxdiLayout(spec=spec, tp_degree=1, rank=0)
        places = {
            f"{MOE}router.linear_router.weight": torch.empty(E, H),
            f"{MOE}router.weight_T": torch.empty(H, E),
            f"{MOE}router.e_score_correction_bias": torch.empty(E),
        }
        gate, transposed, bias = (
            fill(weight, torch.float32) for weight in layout.weights(places, tensors).values()
        )
        assert torch.equal(gate, tensors[GATE])
        assert torch.equal(transposed, tensors[GATE].T)
        assert torch.equal(bias, tensors[CORRECTION_BIAS])

    def test_intermediate_size_that_a_port_rounds_up_is_filled_with_zeros(
        self, spec: ModelSpec, tensors: LayerTensors
    ) -> None:
        inner = INNER + 32
        places = {f"{EXPERTS}gate_up_proj.weight": (E, H, 2 * inner)}
        places[f"{EXPERTS}down_proj.weight"] = (E, inner, H)
        gate_up, down = weights(spec, tensors, **places).values()
        assert torch.equal(gate_up[3, :, :INNER], tensors[f"{MOE}experts.3.w1.weight"].T)
        assert torch.equal(gate_up[3, :, inner : inner + INNER], tensors[f"{MOE}experts.3.w3.weight"].T)
        assert not gate_up[:, :, INNER:inner].any()
        assert not gate_up[:, :, inner + INNER :].any()
        assert torch.equal(down[3, :INNER], tensors[f"{MOE}experts.3.w2.weight"].T)
        assert not down[:, INNER:].any()

    def test_places_of_unknown_names_are_left_to_strict_loading(
        self, spec: ModelSpec, tensors: LayerTensors
    ) -> None:
        assert weights(spec, tensors, self_attn__sinks=(N,), mlp__shared_experts__weight=(H,)) == {}

    def test_what_no_place_takes_is_told(self, spec: ModelSpec, tensors: LayerTensors) -> None:
        layout = NxdiLayout(spec=spec, tp_degree=1, rank=0)
        names = [name for name in tensors if ".experts." not in name and name != CORRECTION_BIAS]
        renamed = {name.replace(".gate.", ".router.linear_router."): torch.empty(1) for name in names}
        experts = {
            f"{MOE}expert_mlps.mlp_op.{name}_proj.weight": torch.empty(1) for name in ("gate_up", "down")
        }
        assert layout.unused({**renamed, **experts}, tensors) == [CORRECTION_BIAS]
        assert len(layout.unused(renamed, tensors)) == 1 + 3 * E


class TestQwen3Moe:
    """A norm of each head, a BF16 router without a bias, and names of its own."""

    @pytest.fixture
    def spec(self, qwen3_moe: Path) -> ModelSpec:
        return ModelSpec.from_folder(qwen3_moe)

    @pytest.fixture
    def tensors(self, qwen3_moe: Path, spec: ModelSpec) -> Iterator[LayerTensors]:
        with CheckpointReader(qwen3_moe) as reader:
            yield LayerTensors.open(reader, spec, 1, torch.bfloat16)

    def test_each_rank_has_the_norm_of_one_head(self, spec: ModelSpec, tensors: LayerTensors) -> None:
        found = weights(spec, tensors, degree=4, rank=3, self_attn__q_layernorm__weight=(D,))
        assert torch.equal(found["self_attn.q_layernorm.weight"], tensors[ATTENTION + "q_norm.weight"])

    def test_router_and_experts_are_found_by_the_checkpoints_names(
        self, spec: ModelSpec, tensors: LayerTensors, qwen3_moe: Path
    ) -> None:
        places = {
            "mlp__router__linear_router__weight": (E, H),
            f"{EXPERTS}gate_up_proj.weight": (E, H, 2 * INNER),
        }
        gate, gate_up = weights(spec, tensors, **places).values()
        stored: dict[str, torch.Tensor] = {}
        for shard in qwen3_moe.glob("*.safetensors"):
            stored |= load_file(shard)
        assert torch.equal(gate, stored["model.layers.1.mlp.gate.weight"])
        halves = [stored[f"model.layers.1.mlp.experts.3.{name}_proj.weight"].T for name in ("gate", "up")]
        assert torch.equal(gate_up[3], torch.cat(halves, dim=1))

    def test_what_no_place_takes_has_the_checkpoints_name(
        self, spec: ModelSpec, tensors: LayerTensors, caplog: pytest.LogCaptureFixture
    ) -> None:
        layout = NxdiLayout(spec=spec, tp_degree=1, rank=0)
        layout.warn_of_unused({f"{EXPERTS}gate_up_proj.weight": torch.empty(1)}, tensors)
        assert "no place for" in caplog.text
        assert "mlp.gate.weight" in caplog.text


class TestRanks:
    def test_shares_of_all_ranks_are_the_whole_experts(self, spec: ModelSpec, tensors: LayerTensors) -> None:
        places = {f"{EXPERTS}gate_up_proj.weight": (E, H, 2 * INNER // 4)}
        places[f"{EXPERTS}down_proj.weight"] = (E, INNER // 4, H)
        shares = [weights(spec, tensors, degree=4, rank=rank, **places).values() for rank in range(4)]
        gates = torch.cat([gate_up[..., : INNER // 4] for gate_up, _ in shares], dim=-1)
        ups = torch.cat([gate_up[..., INNER // 4 :] for gate_up, _ in shares], dim=-1)
        downs = torch.cat([down for _, down in shares], dim=1)
        for expert in (0, 31):
            assert torch.equal(gates[expert], tensors[f"{MOE}experts.{expert}.w1.weight"].T)
            assert torch.equal(ups[expert], tensors[f"{MOE}experts.{expert}.w3.weight"].T)
            assert torch.equal(downs[expert], tensors[f"{MOE}experts.{expert}.w2.weight"].T)

    def test_a_rank_holds_its_heads_and_a_norm_as_long_as_its_place(
        self, spec: ModelSpec, tensors: LayerTensors
    ) -> None:
        # 8 and 2 heads over 4 ranks: 2 queries each, and each kv head twice.
        found = weights(
            spec,
            tensors,
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
        assert torch.equal(q, tensors[ATTENTION + "q_proj.weight"][6 * D :])
        assert torch.equal(k, tensors[ATTENTION + "k_proj.weight"][D:])
        assert torch.equal(o, tensors[ATTENTION + "o_proj.weight"][:, 6 * D :])
        assert torch.equal(q_norm, tensors[ATTENTION + "q_norm.weight"][6 * D :])
        first, second = tensors[ATTENTION + "k_norm.weight"].split(D)
        assert torch.equal(k_norm, torch.cat((first, first, second, second)))
        assert (rank.tolist(), rank.dtype) == ([3], torch.int32)

    def test_padding_heads_are_zeros(self, spec: ModelSpec, tensors: LayerTensors) -> None:
        # 8 query heads over 6 ranks are padded to 12: the last two ranks hold padding alone.
        found = NxdiLayout(spec=_with(spec, intermediate_size=126), tp_degree=6, rank=5).weights(
            {"self_attn.qkv_proj.q_proj.weight": torch.empty(2 * D, H)}, tensors
        )
        [weight] = found.values()
        places = HeadLayout(num_heads=N, num_kv_heads=K, num_ranks=6).query_heads(5)
        assert None in places
        stored = tensors[ATTENTION + "q_proj.weight"].split(D)
        expected = [torch.zeros_like(stored[0]) if head is None else stored[head] for head in places]
        assert torch.equal(fill(weight), torch.cat(expected))

    def test_degree_that_does_not_divide_the_experts_is_refused(self, spec: ModelSpec) -> None:
        with pytest.raises(TargetError, match="divided among 3 ranks.*intermediate size 128"):
            NxdiLayout(spec=spec, tp_degree=3, rank=0)


def _with(spec: ModelSpec, **changes: int) -> ModelSpec:
    return ModelSpec.from_config({**spec.raw, **changes})
