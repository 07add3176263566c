"""Right layers of other families pass; planted mistakes are found, blamed and named, and none of another family is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.undo import Undo
from compare.comparer import compare_captures
from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.finding import Diagnosis
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.dumps.opening import open_source
from minimax_tools.errors import UsageError
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import K_NORM, K_PROJ, Q_NORM, V_PROJ, expert_weight
from minimax_tools.reference.evaluation import STAGES, Evaluation, LayerInputs
from minimax_tools.reference.expert_pass import LayerWeights
from minimax_tools.results.results import Comparison, Verdict

Tensors = dict[str, torch.Tensor]
MATRICES = ("w1", "w2", "w3")


def exchange(*names: str) -> Callable[[Tensors, ModelSpec], None]:
    first, second = names

    def edit(tensors: Tensors, _: ModelSpec) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def scale(name: str, factor: float) -> Callable[[Tensors, ModelSpec], None]:
    return lambda tensors, _: tensors.update({name: tensors[name] * factor})


def exchange_gate_and_up(tensors: Tensors, spec: ModelSpec) -> None:
    for expert in range(spec.num_local_experts):
        exchange(expert_weight(expert, "w1"), expert_weight(expert, "w3"))(tensors, spec)


def shift_experts(tensors: Tensors, spec: ModelSpec) -> None:
    before, num_experts = dict(tensors), spec.num_local_experts
    for expert in range(num_experts):
        for matrix in MATRICES:
            source = expert_weight((expert + 1) % num_experts, matrix)
            tensors[expert_weight(expert, matrix)] = before[source]


def scale_down(tensors: Tensors, spec: ModelSpec) -> None:
    for expert in range(spec.num_local_experts):
        scale(expert_weight(expert, "w2"), 0.5)(tensors, spec)


def in_norms(
    norm: Callable[[Any, torch.Tensor, ModelSpec], torch.Tensor],
) -> Callable[[Any, ModelSpec], None]:
    """Let q_norm and k_norm compute in another way, from their own states in float32."""

    def patch(layer: Any, spec: ModelSpec) -> None:
        for module in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            module.forward = MethodType(
                lambda self, states: norm(self, states.float(), spec).to(states.dtype), module
            )

    return patch


def over_all_heads(module: Any, states: torch.Tensor, _: ModelSpec) -> torch.Tensor:
    squares = states.square().mean((-2, -1), keepdim=True)
    return module.weight * states * torch.rsqrt(squares + module.variance_epsilon)


def of_each_head(module: Any, states: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    heads = states.unflatten(-1, (-1, spec.head_dim))
    squares = heads.square().mean(-1, keepdim=True)
    return module.weight * (heads * torch.rsqrt(squares + module.variance_epsilon)).flatten(-2)


def score_by_sigmoid(layer: Any, _: ModelSpec) -> None:
    def forward(self: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = functional.linear(states.reshape(-1, self.hidden_dim), self.weight)
        shares, experts = logits.float().sigmoid().topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares.to(logits.dtype), experts

    layer.mlp.gate.forward = MethodType(forward, layer.mlp.gate)


def halve_scores(layer: Any, _: ModelSpec) -> None:
    layer.self_attn.scaling /= 2


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
NORMED, QWEN, OLMOE = ("qwen3_moe", "olmoe"), ("qwen3_moe",), ("olmoe",)
EVERY = (*NORMED, "mixtral")
# Name, families, what is planted, and the first sites that are wrong.
PLANTED: list[tuple[str, tuple[str, ...], dict[str, Any], set[str]]] = [
    ("rope_theta", EVERY, {"config": THETA}, {"q_rope", "k_rope"}),
    ("router_top_k", NORMED, {"config": {"num_experts_per_tok": 3}}, {"router_experts"}),
    ("norm_eps", NORMED, {"config": {"rms_norm_eps": 3e-2}}, {"input_norm", "q_norm", "k_norm", "post_norm"}),
    ("router_weights_not_normalised", QWEN, {"config": {"norm_topk_prob": False}}, {"router_weights"}),
    ("router_weights_normalised", OLMOE, {"config": {"norm_topk_prob": True}}, {"router_weights"}),
    ("router_sigmoid", NORMED, {"patch": score_by_sigmoid}, {"router_weights"}),
    ("gate_up_swapped", EVERY, {"edit": exchange_gate_and_up}, {"moe_delta"}),
    ("expert_ids_shifted", EVERY, {"edit": shift_experts}, {"moe_delta"}),
    ("qk_norm_weights_exchanged", NORMED, {"edit": exchange(Q_NORM, K_NORM)}, {"q_norm", "k_norm"}),
    ("k_norm_scaled", NORMED, {"edit": scale(K_NORM, 2.0)}, {"k_norm"}),
    ("qk_norm_over_all_heads", QWEN, {"patch": in_norms(over_all_heads)}, {"q_norm", "k_norm"}),
    ("qk_norm_per_rank", OLMOE, {"patch": in_norms(of_each_head)}, {"q_norm", "k_norm"}),
    ("attention_scale", EVERY, {"patch": halve_scores}, {"attn_context"}),
]
OF_NORMS = {"qk_norm_weights_exchanged", "k_norm_scaled"}
# Mistakes that some inputs hide: nothing is clamped or masked there, or the best groups hold the best experts.
MAY_BE_HIDDEN = {"padding_mask_missing", "router_groups", "swiglu_clamped", "up_clamped", "expert_capacity"}


def judge(toy: Any, run: Any) -> Comparison:
    return compare_captures(
        open_source(toy.golden),
        open_source(run),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        layer_pattern="layer_*",
        weights=CheckpointWeights(model=str(toy.model)),
    )


def hub_matrices(toy: Any) -> tuple[str, str, str]:
    """Return the names of an expert's gate, up and down on the family's hub."""
    is_mixtral = toy.spec.family.model_type == "mixtral"
    return ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")


def explain(toy: Any, run: Any, **options: Any) -> Diagnosis:
    return diagnose(open_source(toy.golden), open_source(run), model=toy.model, **options)


@pytest.mark.parametrize("chained", [False, True], ids=["isolated", "chained"])
def test_right_layers_pass(family_toy: Any, right: Any, chained: bool) -> None:
    run = family_toy.run(right, chained=chained)
    comparison = judge(family_toy, run)
    assert (comparison.verdict, comparison.blame) == (Verdict.PASS, ())
    assert {site.site for site in comparison.sites} == set(map(str, family_toy.spec.graph.sites)) - {"input"}
    found = explain(family_toy, run)
    assert not found.findings
    assert not found.is_failed


@pytest.mark.parametrize(
    ("name", "families", "planted", "sites", "chained"),
    [
        *((*case, False) for case in PLANTED),
        *(
            (*case, True)
            for case in PLANTED
            if case[0] in ("rope_theta", "router_sigmoid", "gate_up_swapped")
        ),
    ],
)
def test_planted_mistake_is_blamed_and_named(
    family_toy: Any,
    fault: Any,
    name: str,
    families: tuple[str, ...],
    planted: Mapping[str, Any],
    sites: set[str],
    chained: bool,
) -> None:
    if family_toy.spec.family.model_type not in families:
        pytest.skip("the family computes so, or cannot")
    run = family_toy.run(fault(**planted), in_layer=1, chained=chained)
    comparison = judge(family_toy, run)
    assert comparison.verdict is Verdict.FAIL
    assert {blame.layer for blame in comparison.blame} == {1}
    assert {site for blame in comparison.blame for site in blame.sites} == sites
    findings = explain(family_toy, run).findings
    assert (findings[0].layer, findings[0].mistake) == (1, name)
    graph = family_toy.spec.graph
    assert all(CATALOGUE[finding.mistake].fits(graph) for finding in findings)


def test_no_mistake_that_is_tried_is_the_right_layer(family_toy: Any) -> None:
    golden, spec = Capture.open(family_toy.golden), family_toy.spec
    given = golden.read_inputs()
    with CheckpointReader(family_toy.model) as reader, torch.no_grad():
        inputs = LayerInputs.of(spec, LayerWeights(LayerTensors.open(reader, spec, 1, torch.bfloat16)), given)
        right = Evaluation(
            inputs,
            STAGES,
            tokens=inputs.judged_tokens,
            values={Site.INPUT: golden.read(1, Site.INPUT).float()},
        )
        alike = {
            mistake.name
            for mistake in CATALOGUE.values()
            for hypothesis in mistake.hypotheses(inputs)
            if all(
                torch.allclose(right.changed(hypothesis.change).rows(site), right.rows(site), rtol=1e-5)
                for site in hypothesis.sites
            )
        }
    assert alike <= MAY_BE_HIDDEN


def test_mistake_of_another_family_is_refused(family_toy: Any, right: Any) -> None:
    run = family_toy.run(right)
    with pytest.raises(UsageError, match="router_bias_missing is no mistake in this model.*correction bias"):
        explain(family_toy, run, mistakes=("router_bias_missing",))


def test_blame_tells_what_the_family_computes(family_toy: Any, fault: Any) -> None:
    def add_noise(layer: Any, _: ModelSpec) -> None:
        layer.mlp.register_forward_hook(lambda _, __, output: output + 0.1 * output.abs().flip(-1))

    found = explain(family_toy, family_toy.run(fault(patch=add_noise), in_layer=1))
    assert not found.findings
    gate, up, down = hub_matrices(family_toy)
    assert found.formula(Site.MOE_DELTA).endswith(
        f"router_weight · {down}(silu({gate}(post_norm)) · {up}(post_norm)), not clamped"
    )
    assert found.formula(Site.ROUTER_EXPERTS) == "the k largest of softmax(router_logits), in float32"


def test_mistake_is_told_with_the_hubs_names(family_toy: Any, fault: Any) -> None:
    (first, *_) = explain(family_toy, family_toy.run(fault(edit=exchange_gate_and_up), in_layer=1)).findings
    assert first.mistake == "gate_up_swapped"
    gate, up, _ = hub_matrices(family_toy)
    assert first.what == f"Gate and up are exchanged: {up} is activated, and {gate} is not."
    assert first.look_at == f"the order of {gate} and {up} in the fused weight"


@pytest.mark.parametrize(
    ("undone", "planted"),
    [
        ("gate_up_swapped", exchange_gate_and_up),
        ("expert_ids_shifted,offset=1", shift_experts),
        ("qk_norm_weights_exchanged", exchange(Q_NORM, K_NORM)),
        ("k_norm_scaled,factor=2.0", scale(K_NORM, 2.0)),
        ("moe_delta_scaled,factor=0.5", scale_down),
    ],
)
def test_lines_that_undo_a_mistake_take_the_hubs_names(
    family_toy: Any, undone: str, planted: Callable[[Tensors, ModelSpec], None]
) -> None:
    spec, undo = family_toy.spec, Undo.parse(undone)
    family = spec.family
    if undone.partition(",")[0] in OF_NORMS and spec.graph.qk_norm is QkNorm.NONE:
        pytest.skip("the family has no such norms")
    with CheckpointReader(family_toy.model) as reader:
        stored = dict(LayerTensors.open(reader, spec, 1, torch.bfloat16))
    by_edit = dict(stored)
    undo.edit(by_edit, spec)
    by_lines = {family.stored_names.stored(name): tensor for name, tensor in stored.items()}
    names = {"torch": torch, "tensors": by_lines, "config": SimpleNamespace(**spec.raw)}
    exec("\n".join(undo.lines(family)), names)
    assert {family.stored_names.own(name) for name in by_lines} == set(stored)
    assert all(by_lines[family.stored_names.stored(name)].equal(by_edit[name]) for name in stored)
    planted(by_edit, spec)
    assert all(by_edit[name].equal(stored[name]) for name in stored)


def test_values_of_a_projection_are_those_of_another(family_toy: Any, fault: Any) -> None:
    run = family_toy.run(fault(edit=exchange(K_PROJ, V_PROJ)))
    comparison = judge(family_toy, run)
    assert {blame.sites for blame in comparison.blame} == {("k_proj",), ("v_proj",)}
    assert {finding.mistake for finding in explain(family_toy, run).findings} == {"k_v_swapped"}
