"""Sites behind a failing site, judged on the port's own values: what is wrong there is named too, and no trace is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file, save_file

from compare.blame.recompute import RecomputingJudge
from compare.diagnosis.cli import main as mm2_diagnose
from compare.sides.golden_weights import CheckpointWeights
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.results.results import Comparison
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]
RunPort = Callable[..., Path]

PORTS = Path(__file__).parents[2] / "ports"
LAYER = 2
QK_NORM = [("q_norm",), ("k_norm",)]
# Further variants of a claim that a fast test makes.
SLOW = pytest.mark.slow


@pytest.fixture
def run_layer(run_port: Callable[..., Path]) -> RunPort:
    """Runs one layer of a port by name."""

    def run(name: str, *options: object, file: str = "planted.py") -> Path:
        return run_port("single-layer", f"{file}:{name}", "--layer", LAYER, *options)

    return run


def blamed(comparison: Comparison) -> list[tuple[str, ...]]:
    return [blame.sites for blame in comparison.blame]


@pytest.mark.parametrize(
    ("port", "sites"),
    [
        ("NormPerRankAndSwappedGateUp", [*QK_NORM, ("moe_delta",)]),
        pytest.param("NormPerRankAndNoCorrectionBias", [*QK_NORM, ("router_experts",)], marks=SLOW),
        ("InterleavedAndTiled", [("q_rope",), ("k_rope",), ("attn_context",)]),
        pytest.param("LoudValuesAndNoOutputProjection", [("v_proj",), ("attn_delta",)], marks=SLOW),
        # What is right behind a culprit is not blamed, however large it gets.
        ("LoudValues", [("v_proj",)]),
    ],
)
def test_culprit_behind_a_culprit_is_named_too(
    run_layer: RunPort, judge: Judge, toy: Path, port: str, sites: list[tuple[str, ...]]
) -> None:
    comparison = judge(run_layer(port), model=toy)
    assert blamed(comparison) == sites
    own = ["given the port's own" in blame.reason for blame in comparison.blame]
    assert (own[0], own[-1]) == (False, len(sites) > 1)
    if port == "LoudValues":
        failing = {site.site for site in comparison.of_layer(LAYER) if site.status.name == "FAIL"}
        assert {"attn_context", "attn_delta", "post_norm", "moe_delta"} <= failing
    if sites[-1] == ("moe_delta",):
        fed = "given the port's own post_norm, router_experts, router_weights"
        assert comparison.blame[-1].reason.endswith(f", {fed}")


def test_place_of_the_error_is_told_of_what_the_port_itself_fed_it(
    run_layer: RunPort, judge: Judge, toy: Path
) -> None:
    comparison = judge(run_layer("SwappedKeyValueAndOneExpertMissing"), model=toy)
    assert blamed(comparison)[-1] == ("moe_delta",)
    (moe,) = (site for site in comparison.of_layer(LAYER) if site.site == Site.MOE_DELTA)
    assert any("expert 5" in sentence for sentence in moe.where)


def test_wrong_number_of_experts_behind_a_culprit_is_its_own_mistake(
    run_layer: RunPort, judge: Judge, toy: Path
) -> None:
    comparison = judge(run_layer("NormPerRankAndFewerExperts"), model=toy)
    assert blamed(comparison) == [*QK_NORM, ("router_experts",)]
    assert comparison.blame[-1].reason.startswith("shape: expected ")


def test_without_the_weights_the_first_culprits_alone_are_named(run_layer: RunPort, judge: Judge) -> None:
    assert blamed(judge(run_layer("NormPerRankAndSwappedGateUp"))) == QK_NORM


@pytest.mark.parametrize("noise_floor", ["stats", "off"])
def test_golden_with_less_of_a_floor_names_both(
    run_layer: RunPort, judge: Judge, toy: Path, copyist: Any, noise_floor: str
) -> None:
    reference = copyist.golden(noise_floor=noise_floor)
    found = blamed(judge(run_layer("NormPerRankAndSwappedGateUp"), reference=reference, model=toy))
    assert found == [*QK_NORM, ("moe_delta",)]


@pytest.mark.parametrize("port", ["LoudValues", "NormPerRank", pytest.param("InterleavedRotary", marks=SLOW)])
def test_golden_without_a_floor_blames_nothing_right_behind_a_culprit(
    run_layer: RunPort, judge: Judge, toy: Path, copyist: Any, port: str
) -> None:
    reference = copyist.golden(noise_floor="off")
    found = blamed(judge(run_layer(port), reference=reference, model=toy))
    assert found in ([("v_proj",)], QK_NORM, [("q_rope",), ("k_rope",)])


@pytest.mark.parametrize(
    ("port", "last"),
    [
        # Its attention is seen by its output alone; the experts' inputs are all there.
        ("NormPerRankAndSwappedGateUp", ("moe_delta",)),
        pytest.param("InterleavedAndTiled", None, marks=SLOW),
    ],
)
def test_what_the_port_does_not_show_is_not_fed(
    run_layer: RunPort, judge: Judge, toy: Path, port: str, last: tuple[str, ...] | None
) -> None:
    found = blamed(judge(run_layer(port, "--sites", "component"), model=toy))
    assert len(found) == 1 if last is None else found[-1] == last


def test_nan_is_handed_on_and_blamed_where_it_begins(copyist: Any, judge: Judge, toy: Path) -> None:
    def broken(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_fill(1, torch.tensor([3]), torch.nan)

    sites = (Site.POST_NORM, Site.ROUTER_LOGITS, Site.MOE_DELTA, Site.OUTPUT)
    run = sweep_run(Span(0, 4), sites_level="all")
    directory = copyist.device_run({(1, site): broken for site in sites}, run=run)
    assert blamed(judge(directory, model=toy)) == [("post_norm",)]


@pytest.mark.parametrize("options", [pytest.param((), marks=SLOW), ("--decode", 3)])
def test_decoded_rows_attend_to_what_was_cached(
    run_layer: RunPort, judge: Judge, toy: Path, options: tuple[object, ...]
) -> None:
    comparison = judge(run_layer("ScaledKeys", *options, file="diagnosed.py"), model=toy)
    failing = {site.site for site in comparison.of_layer(LAYER) if site.status.name == "FAIL"}
    assert {"k_rope", "attn_context", "attn_delta"} <= failing
    assert blamed(comparison) == [("k_norm",)]


def test_attention_of_decoded_rows_is_blamed_behind_wrong_keys(
    run_layer: RunPort, judge: Judge, toy: Path
) -> None:
    run = run_layer("ScaledKeysAndDecodedScores", "--decode", 3, file="diagnosed.py")
    assert blamed(judge(run, model=toy)) == [("k_norm",), ("attn_context",)]


def test_diagnosis_names_both(run_layer: RunPort, toy: Path, golden: Path, command: Command) -> None:
    paths = ("--model", toy, "--golden", golden, "--run", run_layer("NormPerRankAndSwappedGateUp"))
    tried = ("--mistake", "qk_norm_per_rank", "--mistake", "gate_up_swapped", "--mistake", "gelu_activation")
    result = command(mm2_diagnose, *paths, *tried, "--json", "--quiet")
    named = json.dumps(json.loads(result.stdout)["diagnosis"])
    assert "qk_norm_per_rank" in named
    assert "gate_up_swapped" in named


Change = Callable[[torch.Tensor], torch.Tensor]
# What a stage computes, changed: what the port shows, and what it computes on with where that is something else.
Shown = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Alter = Mapping[Site, Callable[[torch.Tensor], Shown]]


def permuted(values: torch.Tensor) -> torch.Tensor:
    return values[..., torch.randperm(values.shape[-1], generator=torch.Generator().manual_seed(0))]


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values * factor


def at_one_token(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(values: torch.Tensor) -> torch.Tensor:
        changed = values.clone()
        changed[0, 5] *= value
        return changed

    return change


@pytest.fixture
def simulated(golden: Path, toy: Path, copyist: Any, judge: Judge) -> Callable[[Alter], Comparison]:
    """Judges a port that is right in BF16, stage by stage, but for what is altered."""

    def run(alter: Alter) -> Comparison:
        capture = Capture.open(golden)
        inputs = capture.read_inputs()
        values, shown = {Site.INPUT: capture.read(LAYER, Site.INPUT).float()}, {}
        with CheckpointWeights(model=str(toy)).open_layer(LAYER, capture) as weights:
            own = Float32Layer(weights.spec, weights.tensors)
            for site in list(ModelGraph().sites)[1:]:
                dtype = capture.read(LAYER, site).dtype
                right = own.compute(site, values, inputs).to(dtype)
                altered = alter[site](right) if site in alter else right
                shown[site], used = altered if isinstance(altered, tuple) else (altered, altered)
                values[site] = used.float() if used.is_floating_point() else used.long()
        changes = {(LAYER, site): _given(tensor) for site, tensor in shown.items()}
        return judge(copyist.device_run(changes), model=toy, pattern=f"layer_{LAYER}")

    return run


def _given(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: tensor


# What is altered, and the sites that are blamed.
ALTERED: list[tuple[Alter, list[str]]] = [
    ({}, []),
    # What is right behind them is not blamed, however large, small or odd they are.
    ({Site.ATTN_DELTA: times(1e22)}, ["attn_delta"]),
    ({Site.V_PROJ: times(0)}, ["v_proj"]),
    # A norm's result does not grow with what it is fed.
    ({Site.Q_PROJ: times(64), Site.Q_NORM: times(1.1)}, ["q_proj", "q_norm"]),
    # Nor does what is small hide what is wrong behind it.
    ({Site.POST_NORM: times(1e-2), Site.MOE_DELTA: permuted}, ["post_norm", "moe_delta"]),
    # NaN of its own, and behind another's.
    ({Site.V_PROJ: permuted, Site.MOE_DELTA: at_one_token(math.nan)}, ["v_proj", "moe_delta"]),
    # What a port shows may be a copy of what it computes with.
    (
        {Site.POST_NORM: permuted, Site.ROUTER_EXPERTS: lambda values: (values + 1000, values)},
        ["post_norm", "router_experts"],
    ),
]
ALTERED_TOO: list[tuple[Alter, list[str]]] = [
    ({Site.INPUT_NORM: times(1e25)}, ["input_norm"]),
    ({Site.POST_NORM: times(1e30)}, ["post_norm"]),
    ({Site.K_NORM: times(300)}, ["k_norm"]),
    ({Site.POST_NORM: times(1e-3)}, ["post_norm"]),
    ({Site.INPUT_NORM: permuted}, ["input_norm"]),
    ({Site.V_PROJ: at_one_token(300)}, ["v_proj"]),
    # One loud token hides nothing at others.
    ({Site.V_PROJ: at_one_token(300), Site.ATTN_CONTEXT: times(1.2)}, ["v_proj", "attn_context"]),
    ({Site.V_PROJ: at_one_token(math.nan), Site.MOE_DELTA: permuted}, ["v_proj", "moe_delta"]),
    ({Site.V_PROJ: at_one_token(math.nan)}, ["v_proj"]),
    ({Site.V_PROJ: permuted, Site.Q_ROPE: lambda values: (values / 8, values)}, ["v_proj", "q_rope"]),
    (
        {Site.V_PROJ: permuted, Site.ROUTER_WEIGHTS: lambda values: (values.flip(-1), values)},
        ["v_proj", "router_weights"],
    ),
    ({Site.POST_NORM: permuted, Site.ROUTER_EXPERTS: lambda values: values.int()}, ["post_norm"]),
]


@pytest.mark.parametrize(
    ("alter", "sites"), [*ALTERED, *(pytest.param(*case, marks=SLOW) for case in ALTERED_TOO)]
)
def test_stages_of_a_right_port_are_told_from_wrong_ones(
    simulated: Callable[[Alter], Comparison], alter: Alter, sites: list[str]
) -> None:
    assert blamed(simulated(alter)) == [(site,) for site in sites]


def test_far_more_massive_channels_than_ordinary_ones_are_judged_apart(
    toy: Path, tmp_path: Path, command: Command, judge: Judge
) -> None:
    model, reference = tmp_path / "massive", tmp_path / "golden"
    shutil.copytree(toy, model)
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if "embed_tokens" in name:
                embedding = tensors[name].float()
                embedding[:, embedding.square().mean(0).topk(2).indices] *= 200
                tensors[name] = embedding.to(tensors[name].dtype)
                save_file(tensors, shard, metadata={"format": "pt"})
    options = ("--model", model, "--seq-len", "24,17", "--output-dir", reference, "--quiet")
    assert command(mm2_gpu, "extract-all", *options).exit_code == 0
    common = ("--layer", 0, "--model", model, "--golden", reference, "--backend", "cpu", "--quiet")
    run = ("--target", f"{PORTS}/planted.py:LoudDelta", "--output-dir", tmp_path / "run")
    assert command(mm2_test, "single-layer", *common, *run).exit_code == 1
    found = blamed(judge(tmp_path / "run", reference=reference, model=model))
    assert found == [("attn_delta",)]


def test_weights_are_not_asked_for_where_nothing_can_be_judged_by_them(
    judge: Judge, copyist: Any, tmp_path: Path
) -> None:
    reference, sites = copyist.golden(noise_floor="off"), (Site.Q_ROPE, Site.ATTN_CONTEXT)
    directory = copyist.device_run({(LAYER, site): times(1.1) for site in sites})
    assert blamed(judge(directory, reference=reference, model=tmp_path / "nowhere")) == [("q_rope",)]


def upset(capture: Capture, site: Site, times: float) -> Change:
    """Adds noise that is so many times the floor; to the residual stream what attention adds to it."""
    if site is Site.ATTN_RESIDUAL:
        delta = upset(capture, Site.ATTN_DELTA, times)(capture.read(1, Site.ATTN_DELTA))
        return lambda _: capture.read(1, Site.INPUT) + delta
    twin = capture.read_twin(1, site)
    assert twin is not None

    def change(tensor: torch.Tensor) -> torch.Tensor:
        floor = (tensor.float() - twin).square().mean().sqrt()
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(site.order))
        if site in (Site.ATTN_CONTEXT, Site.ATTN_DELTA):
            # The median token's limit is the tightest.
            noise[:, torch.arange(noise.shape[1]) % 3 != 0] = 0.0
        return (tensor.float() + times * floor * noise).to(tensor.dtype)

    return change


CARRIED = {Site.ATTN_CONTEXT: 2.3, Site.ATTN_DELTA: 2.3, Site.ATTN_RESIDUAL: 2.75}


@pytest.mark.parametrize(
    ("errors", "sites"),
    [
        # Without weights, nothing tells whether the error of attn_delta, which passes, is all that the next one has.
        (CARRIED, [("attn_delta", "attn_residual")]),
        # A trace of a culprit behind sites that pass is not a second one.
        ({Site.Q_ROPE: 20.0, **CARRIED}, [("q_rope",)]),
        # Culprits of attention and experts are both named.
        ({Site.Q_ROPE: 20.0, Site.MOE_DELTA: 1.3}, [("q_rope",), ("moe_delta",)]),
        ({Site.Q_ROPE: 1.3, Site.MOE_DELTA: 20.0}, [("q_rope",), ("moe_delta",)]),
        # One among traces of another, which pass or fail, is named where it exceeds them.
        *(
            (
                {Site.K_ROPE: 20.0, Site.POST_NORM: 2.0, **dict.fromkeys(CARRIED, carried)},
                [("k_rope",), ("post_norm",)],
            )
            for carried in (1.5, 1.9)
        ),
    ],
)
def test_traces_of_a_culprit_are_told_from_another(
    copyist: Any, judge: Judge, golden: Path, errors: dict[Site, float], sites: list[tuple[str, ...]]
) -> None:
    """The toy's golden, repeated but for errors of a size that is given in units of its noise floor."""
    changes = {(1, site): upset(Capture.open(golden), site, times) for site, times in errors.items()}
    assert blamed(judge(copyist.device_run(changes), pattern="layer_1")) == sites


@pytest.mark.parametrize(("is_classic", "is_own"), [(True, True), (False, False)])
def test_nothing_is_recomputed_by_fixed_limits_or_of_another_tools_golden(
    is_classic: bool, is_own: bool
) -> None:
    class Golden:
        known_description = "known" if is_own else None

        def sites(self, layer: int) -> tuple[Site, ...]:
            raise AssertionError(f"the sites of layer {layer} are not asked for")

    sides: Any = SimpleNamespace(
        reference=Golden(), target=Golden(), weights="weights", is_classic=is_classic
    )
    judge: Any = None
    with RecomputingJudge(sides, layer=1, judge=judge) as recomputing:
        assert recomputing.judge_sites((Site.OUTPUT,), failing=frozenset()) == {}
