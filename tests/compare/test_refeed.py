"""What stands behind a failing site, judged by what the port itself computed it from: real ports with two mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.results import Comparison
from minimax_tools.run import sweep_run
from minimax_tools.sites import Site
from minimax_tools.span import Span
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]
RunPort = Callable[..., Path]

PORTS = Path(__file__).parents[1] / "ports"
LAYER = 2
QK_NORM = [("q_norm",), ("k_norm",)]


@pytest.fixture(scope="module")
def run_port(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> RunPort:
    """Runs one layer of a port by name, once."""
    runs: dict[tuple[object, ...], Path] = {}

    def run(name: str, *options: object, file: str = "planted.py") -> Path:
        if (name, *options) not in runs:
            directory = tmp_path_factory.mktemp(name) / "run"
            arguments = [
                "single-layer",
                "--layer",
                LAYER,
                "--model",
                toy,
                "--golden",
                golden,
                "--quiet",
                *options,
            ]
            target = ["--target", f"{PORTS / file}:{name}", "--backend", "cpu", "--output-dir", directory]
            result = click.testing.CliRunner().invoke(mm2_test, [str(part) for part in (*arguments, *target)])
            assert result.exit_code == 1, result.output
            runs[(name, *options)] = directory
        return runs[(name, *options)]

    return run


def blamed(comparison: Comparison) -> list[tuple[str, ...]]:
    return [blame.sites for blame in comparison.blame]


@pytest.mark.parametrize(
    ("port", "sites"),
    [
        ("NormPerRankAndSwappedGateUp", [*QK_NORM, ("moe_delta",)]),
        ("NormPerRankAndNoCorrectionBias", [*QK_NORM, ("router_experts",)]),
        ("InterleavedAndTiled", [("q_rope",), ("k_rope",), ("attn_context",)]),
        ("LoudValuesAndNoOutputProjection", [("v_proj",), ("attn_delta",)]),
    ],
)
def test_culprit_behind_a_culprit_is_named_too(
    run_port: RunPort, judge: Judge, toy: Path, port: str, sites: list[tuple[str, ...]]
) -> None:
    comparison = judge(run_port(port), model=toy)
    assert blamed(comparison) == sites
    assert "given the port's own" in comparison.blame[-1].reason
    assert not any("given the port's own" in blame.reason for blame in comparison.blame[:1])


def test_what_is_right_behind_a_culprit_is_not_blamed_however_large_it_gets(
    run_port: RunPort, judge: Judge, toy: Path
) -> None:
    comparison = judge(run_port("LoudValues"), model=toy)
    failing = {site.site for site in comparison.of_layer(LAYER) if site.status.name == "FAIL"}
    assert {"attn_context", "attn_delta", "post_norm", "moe_delta"} <= failing
    assert blamed(comparison) == [("v_proj",)]


def test_reason_tells_what_the_port_itself_fed_it(run_port: RunPort, judge: Judge, toy: Path) -> None:
    (*_, behind) = judge(run_port("NormPerRankAndSwappedGateUp"), model=toy).blame
    assert behind.reason.startswith("error ")
    assert behind.reason.endswith(", given the port's own post_norm, router_experts, router_weights")


def test_place_of_the_error_is_told_of_what_the_port_itself_fed_it(
    run_port: RunPort, judge: Judge, toy: Path
) -> None:
    comparison = judge(run_port("SwappedKeyValueAndOneExpertMissing"), model=toy)
    assert blamed(comparison)[-1] == ("moe_delta",)
    (moe,) = (site for site in comparison.of_layer(LAYER) if site.site == Site.MOE_DELTA)
    assert any("expert 5" in sentence for sentence in moe.where)


def test_wrong_number_of_experts_behind_a_culprit_is_its_own_mistake(
    run_port: RunPort, judge: Judge, toy: Path
) -> None:
    comparison = judge(run_port("NormPerRankAndFewerExperts"), model=toy)
    assert blamed(comparison) == [*QK_NORM, ("router_experts",)]
    assert comparison.blame[-1].reason.startswith("shape: expected ")


def test_without_the_weights_the_first_culprits_alone_are_named(run_port: RunPort, judge: Judge) -> None:
    assert blamed(judge(run_port("NormPerRankAndSwappedGateUp"))) == QK_NORM


@pytest.mark.parametrize(("noise_floor", "is_named"), [("stats", True), ("off", False)])
def test_statistics_of_a_floor_are_enough_and_some_are_needed(
    run_port: RunPort, judge: Judge, toy: Path, copyist: Any, noise_floor: str, is_named: bool
) -> None:
    reference = copyist.golden(noise_floor=noise_floor)
    found = blamed(judge(run_port("NormPerRankAndSwappedGateUp"), reference=reference, model=toy))
    assert (("moe_delta",) in found) == is_named


def test_what_the_port_does_not_show_is_not_fed(run_port: RunPort, judge: Judge, toy: Path) -> None:
    directory = run_port("NormPerRankAndSwappedGateUp", "--sites", "component")
    # Its attention is seen by its output alone; the experts' inputs are all there.
    assert blamed(judge(directory, model=toy))[-1] == ("moe_delta",)
    directory = run_port("InterleavedAndTiled", "--sites", "component")
    assert len(blamed(judge(directory, model=toy))) == 1


def test_nan_is_handed_on_and_blamed_where_it_begins(copyist: Any, judge: Judge, toy: Path) -> None:
    def broken(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_fill(1, torch.tensor([3]), torch.nan)

    sites = (Site.POST_NORM, Site.ROUTER_LOGITS, Site.MOE_DELTA, Site.OUTPUT)
    run = sweep_run(Span(0, 4), sites_level="all")
    directory = copyist.device_run({(1, site): broken for site in sites}, run=run)
    assert blamed(judge(directory, model=toy)) == [("post_norm",)]


@pytest.mark.parametrize("options", [(), ("--decode", 3)])
def test_decoded_rows_attend_to_what_was_cached(
    run_port: RunPort, judge: Judge, toy: Path, options: tuple[object, ...]
) -> None:
    comparison = judge(run_port("ScaledKeys", *options, file="diagnosed.py"), model=toy)
    failing = {site.site for site in comparison.of_layer(LAYER) if site.status.name == "FAIL"}
    assert {"k_rope", "attn_context", "attn_delta"} <= failing
    assert blamed(comparison) == [("k_norm",)]


def test_diagnosis_names_both(run_port: RunPort, toy: Path, golden: Path, command: Command) -> None:
    paths = ("--model", toy, "--gpu-path", golden, "--neuron-path", run_port("NormPerRankAndSwappedGateUp"))
    tried = ("--mistake", "qk_norm_per_rank", "--mistake", "gate_up_swapped", "--mistake", "gelu_activation")
    result = command(mm2_diagnose, *paths, *tried, "--json", "--quiet")
    named = json.dumps(json.loads(result.stdout)["diagnosis"])
    assert "qk_norm_per_rank" in named
    assert "gate_up_swapped" in named
