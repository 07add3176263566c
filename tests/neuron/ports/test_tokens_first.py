"""Ports that show queries and keys as [B,S,heads,D] or [B·S,heads,D] are judged, compiled and mended like others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test
from neuron.devices.ranks import Ranks
from neuron.ports.exposure import Exposure

PORTS = Path(__file__).parents[2] / "ports" / "tokens_first.py"
LAYER = 1


@pytest.fixture
def judge(judge_layer: Any) -> Any:
    """Judges layer 1 of a port of `tokens_first.py`."""
    return lambda name, *options: judge_layer(f"{PORTS}:{name}", *options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Right", ()), ("Flat", ()), ("Merged", ()), ("UnsignedExperts", ()), ("Right", ("--compile", "eager"))],
)
def test_right_port_passes_at_every_site(
    judge: Any, name: str, options: tuple[str, ...], small_golden: Path
) -> None:
    exit_code, record = judge(name, *options)
    assert (exit_code, record["compared"], record["of"]) == (0, 17, 17)
    stored, expected = (
        load_file(Path(directory) / f"layer_{LAYER}.safetensors")
        for directory in (record["directory"], small_golden)
    )
    for site in ("q_rope", "k_rope"):
        assert stored[site].shape == expected[site].shape


def test_another_shape_fails_with_the_shape_that_was_found(judge: Any) -> None:
    exit_code, record = judge("OtherShape")
    failed = {site["site"]: site["reason"] for site in record["sites"] if site["status"] == "fail"}
    assert exit_code == 1
    assert set(failed) == {"q_rope", "k_rope"}
    assert failed["q_rope"].startswith("shape: expected (2, 8, 24, 64), found (2, 8, 64, 24)")


@pytest.mark.parametrize("name", ["DefaultTheta", "FlatDefaultTheta", "MergedDefaultTheta"])
def test_right_values_take_the_ports_own_layout(judge: Any, name: str) -> None:
    exit_code, record = judge(name, "--undo", "rope_theta,theta=10000.0")
    proof = record["proof"]
    assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
    assert [one["site"] for one in proof["sites"] if one["is_replaced"]] == ["q_rope", "k_rope"]


def test_wrong_name_is_not_proved(judge: Any) -> None:
    exit_code, record = judge("DefaultTheta", "--undo", "rope_theta,theta=20000.0")
    assert (exit_code, record["proof"]["outcome"]) == (1, "not proved")


def test_traced_port_passes(
    command: Any, run: Any, small_fp8: Path, small_golden: Path, tmp_path: Path
) -> None:
    file = tmp_path / "traced.pt2"
    paths = ("--model", small_fp8, "--layer", LAYER)
    options = ("--golden", small_golden, "--backend", "cpu", "--output", file)
    traced = command(mm2_test, "trace", *paths, *options, "--target", f"{PORTS}:Right")
    assert traced.exit_code == 0, traced.output
    judged = run(
        "single-layer", *paths, "--golden", small_golden, "--target", f"traced:{file}", "--json", "--quiet"
    )
    record = json.loads(judged.stdout)
    assert (judged.exit_code, record["compared"], record["of"]) == (0, 17, 17)


@pytest.fixture
def judge_whole(run: Any, small_fp8: Path, small_golden: Path) -> Any:
    """Runs a whole port of `tokens_first.py`; the exit code, and the status of queries and keys in all layers."""

    def run_port(name: str, *options: object) -> tuple[int, set[str]]:
        paths: tuple[object, ...] = ("--model", small_fp8, "--golden", small_golden)
        paths += ("--target", f"{PORTS}:{name}", "--backend", "cpu")
        result = run("model", *paths, *options, "--json", "--quiet")
        record = json.loads(result.stdout)
        return result.exit_code, {
            site["status"] for site in record["sites"] if site["site"] in ("q_rope", "k_rope")
        }

    return run_port


@pytest.mark.parametrize("name", ["Model", "ReturnedModel", "ReturnedFlat", "ReturnedMerged"])
def test_whole_port_passes_with_its_decoded_tokens(judge_whole: Any, name: str) -> None:
    assert judge_whole(name, "--decode", 3) == (0, {"pass"})


def test_returned_site_of_another_shape_fails(judge_whole: Any) -> None:
    assert judge_whole("ReturnedTooFew", "--decode", 1) == (1, {"fail"})


@pytest.mark.parametrize("dim", [2, -2])
def test_a_ranks_heads_are_cut_where_tokens_come_first(dim: int) -> None:
    site, whole = Site.Q_ROPE, torch.arange(2 * 4 * 3 * 5.0).view(2, 4, 3, 5)
    exposure = Exposure(taps={}, declared=frozenset({site}), layouts={site: Sharded(dim=dim)})
    piece = exposure.cut(site, whole, ranks=Ranks(rank=1, degree=2), what="a port")
    assert torch.equal(piece, whole[:, 2:])
    parts = [half.transpose(1, 2) for half in whole.chunk(2, dim=1)]
    assembled = exposure.assemble(site, parts, (2, 3), head_dim=5, what="a port")
    assert assembled is not None
    assert torch.equal(assembled, whole)
