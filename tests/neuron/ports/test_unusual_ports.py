"""Ports that compute in ways of their own: in parts, in other layouts, with scales folded in, wrong in a few tokens.

Each of them is a class of `in_parts.py`, `tokens_first.py`, `folded.py` or `diagnosed.py` in tests/ports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test
from neuron.devices.ranks import Ranks
from neuron.ports.exposure import Exposure

PORTS = Path(__file__).parents[2] / "ports"
LAYER = 1


@pytest.fixture
def judge(judge_layer: Any) -> Any:
    """Judges layer 1 of a port, named as `FILE:CLASS` without the file's ending."""
    return lambda name, *options: judge_layer(f"{PORTS}/{name.replace(':', '.py:')}", *options)


@pytest.mark.parametrize("name", ["tokens_first.py:Right", "in_parts.py:Recomputed"])
def test_traced_port_passes(command: Any, judge_layer: Any, on_small: Any, tmp_path: Path, name: str) -> None:
    file = tmp_path / "traced.pt2"
    given = ("trace", "--layer", LAYER, *on_small, "--backend", "cpu", "--target", f"{PORTS}/{name}")
    traced = command(mm2_test, *given, "--output", file)
    assert traced.exit_code == 0, traced.output
    exit_code, record = judge_layer(f"traced:{file}")
    assert (exit_code, record["compared"], record["of"]) == (0, 17, 17)


RIGHT = [
    *(("in_parts", name) for name in ("ExpertsByTokens", "ExpertsByColumns", "RowByRow", "Recomputed")),
    *(("tokens_first", name) for name in ("Right", "Flat", "Merged", "UnsignedExperts")),
]
COMPILED = [("in_parts", "ExpertsByTokens"), ("tokens_first", "Right")]


@pytest.mark.parametrize(
    ("file", "name", "compiler"),
    [*((*port, "off") for port in RIGHT), *((*port, "eager") for port in COMPILED)],
)
def test_right_port_passes_at_every_site(
    judge: Any, file: str, name: str, compiler: str, small_golden: Path
) -> None:
    exit_code, record = judge(f"{file}:{name}", "--compile", compiler)
    found = (exit_code, record["verdict"], record["compared"], record["of"])
    assert found == (0, "pass", 17, 17)
    stored, expected = (
        load_file(Path(directory) / f"layer_{LAYER}.safetensors")
        for directory in (record["directory"], small_golden)
    )
    for site in ("q_rope", "k_rope"):
        assert stored[site].shape == expected[site].shape


class TestInParts:
    """Submodules that run several times in a forward: their parts are joined, or the site is not exposed."""

    OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope", "attn_context")

    def test_wrong_part_fails_where_it_is(self, judge: Any) -> None:
        exit_code, record = judge("in_parts:OneChunkWrong")
        assert (exit_code, [blame["sites"] for blame in record["blame"]]) == (1, [["moe_delta"]])

    @pytest.mark.parametrize(
        ("name", "hidden", "count"),
        [("WithoutPadding", OF_ATTENTION, 2), ("ExpertByExpert", ("moe_delta",), 8)],
    )
    def test_parts_that_cannot_be_joined_are_not_exposed_and_counted(
        self, judge: Any, name: str, hidden: tuple[str, ...], count: int
    ) -> None:
        exit_code, record = judge(f"in_parts:{name}")
        assert (exit_code, record["verdict"]) == (0, "pass")
        reasons = {
            site["site"]: site["reason"] for site in record["sites"] if site["status"] == "not exposed"
        }
        words = f"computed {count} times in a forward, in parts that cannot be joined to the batch"
        assert reasons == dict.fromkeys(hidden, words)


class TestFolded:
    """Scales that are folded into weights: right if all that reads a scaled site undoes it, else placed there."""

    @pytest.mark.parametrize(
        ("name", "scaled", "undone"),
        [
            ("SmoothedExperts", "post_norm", "router_logits and moe_delta"),
            ("SmoothedAttention", "input_norm", "q_proj, k_proj and v_proj"),
            ("FoldedValues", "v_proj, attn_context", "attn_delta"),
            ("QueryScale", "q_norm, q_rope", "attn_context"),
        ],
    )
    def test_scale_that_is_undone_everywhere_is_a_note(
        self, judge: Any, name: str, scaled: str, undone: str
    ) -> None:
        exit_code, record = judge(f"folded:{name}")
        assert (exit_code, record["verdict"], record["compared"]) == (0, "pass", 17)
        (note,) = (note for note in record["notes"] if "factor" in note)
        assert (
            note == f"layer {LAYER}, {scaled}: each channel is off by a factor, which is undone in {undone}"
        )

    def test_queries_may_be_scaled_against_keys(self, judge: Any) -> None:
        exit_code, record = judge("folded:QueriesAgainstKeys")
        assert (exit_code, record["verdict"]) == (0, "pass")

    @pytest.mark.parametrize(
        ("name", "site", "words"),
        [
            ("GateLeft", "router_logits", "the scale of post_norm is undone in moe_delta, and not here"),
            ("ExpertsLeft", "moe_delta", "the scale of post_norm is undone in router_logits, and not here"),
            ("ValuesLeft", "v_proj", "the scale of input_norm is undone in q_proj and k_proj, and not here"),
            # Nothing undoes these: the site itself is wrong.
            ("NormAlone", "post_norm", "attn_residual is right"),
            ("ValuesScaled", "v_proj", "input_norm is right"),
            ("QueriesAlone", "q_norm", "q_proj is right"),
        ],
    )
    def test_scale_that_is_not_undone_everywhere_is_placed(
        self, judge: Any, name: str, site: str, words: str
    ) -> None:
        exit_code, record = judge(f"folded:{name}")
        assert (exit_code, [blame["sites"] for blame in record["blame"]]) == (1, [[site]])
        assert words in record["blame"][0]["reason"]

    def test_factors_are_told_where_the_site_itself_is_wrong(self, judge: Any) -> None:
        _, record = judge("folded:NormAlone")
        (group,) = record["blame_groups"]
        (sentence,) = group["where"]
        assert sentence.startswith("each channel is a multiple of the golden's, 0.25")


@pytest.fixture(scope="module")
def two_layers(make_golden: Any, make_model: Any) -> tuple[object, ...]:
    """Options that name a model of two layers and its golden."""
    quantities = SyntheticModel(
        num_hidden_layers=2,
        hidden_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=32,
    )
    model = make_model(quantities, torch.bfloat16)
    return ("--model", model, "--golden", make_golden(model, "--seq-len", "10,7"))


class TestLayouts:
    """Queries and keys as [B,S,heads,D], [B·S,heads,D] or [B·S,heads·D] are judged, compiled and mended like others."""

    def test_another_shape_fails_with_the_shape_that_was_found(self, judge: Any) -> None:
        exit_code, record = judge("tokens_first:OtherShape")
        failed = {site["site"]: site["reason"] for site in record["sites"] if site["status"] == "fail"}
        assert exit_code == 1
        assert set(failed) == {"q_rope", "k_rope"}
        assert failed["q_rope"].startswith("shape: expected (2, 8, 24, 64), found (2, 8, 64, 24)")

    @pytest.mark.parametrize("name", ["DefaultTheta", "FlatDefaultTheta", "MergedDefaultTheta"])
    def test_right_values_take_the_ports_own_layout(self, judge: Any, name: str) -> None:
        exit_code, record = judge(f"tokens_first:{name}", "--undo", "rope_theta,theta=10000.0")
        proof = record["proof"]
        assert (exit_code, proof["outcome"], proof["way"]) == (0, "proved", "stage")
        assert [one["site"] for one in proof["sites"] if one["is_replaced"]] == ["q_rope", "k_rope"]

    def test_wrong_name_is_not_proved(self, judge: Any) -> None:
        exit_code, record = judge("tokens_first:DefaultTheta", "--undo", "rope_theta,theta=20000.0")
        assert (exit_code, record["proof"]["outcome"]) == (1, "not proved")

    @pytest.fixture
    def judge_whole(self, run: Any, two_layers: tuple[object, ...]) -> Any:
        """Runs a whole port of `tokens_first.py`; the exit code, and the status of queries and keys in all layers."""

        def run_port(name: str) -> tuple[int, set[str]]:
            target = ("--target", f"{PORTS}/tokens_first.py:{name}", "--backend", "cpu", "--decode", 2)
            result = run("model", *two_layers, *target, "--json", "--quiet")
            record = json.loads(result.stdout)
            return result.exit_code, {
                site["status"] for site in record["sites"] if site["site"] in ("q_rope", "k_rope")
            }

        return run_port

    @pytest.mark.parametrize("name", ["Model", "ReturnedModel", "ReturnedFlat", "ReturnedMerged"])
    def test_whole_port_passes_with_its_decoded_tokens(self, judge_whole: Any, name: str) -> None:
        assert judge_whole(name) == (0, {"pass"})

    def test_returned_site_of_another_shape_fails(self, judge_whole: Any) -> None:
        assert judge_whole("ReturnedTooFew") == (1, {"fail"})

    @pytest.mark.parametrize("dim", [2, -2])
    def test_a_ranks_heads_are_cut_where_tokens_come_first(self, dim: int) -> None:
        site, whole = Site.Q_ROPE, torch.arange(2 * 4 * 3 * 5.0).view(2, 4, 3, 5)
        exposure = Exposure(taps={}, declared=frozenset({site}), layouts={site: Sharded(dim=dim)})
        piece = exposure.cut(site, whole, ranks=Ranks(rank=1, degree=2), what="a port")
        assert torch.equal(piece, whole[:, 2:])
        parts = [half.transpose(1, 2) for half in whole.chunk(2, dim=1)]
        assembled = exposure.assemble(site, parts, (2, 3), head_dim=5, what="a port")
        assert assembled is not None
        assert torch.equal(assembled, whole)


class TestWrongPlaces:
    """Ports that are wrong in a few tokens, which are listed, or everywhere by different amounts, which is no place."""

    @pytest.fixture
    def sweep(self, run: Any, small_fp8: Path, make_golden: Any) -> Any:
        """Runs all layers of a port on rows that are long enough for a pattern; the JSON."""
        sides = ("--model", small_fp8, "--golden", make_golden(small_fp8, "--seq-len", "48,33"))

        def run_port(name: str) -> dict[str, Any]:
            target = ("--target", f"{PORTS}/diagnosed.py:{name}", "--backend", "cpu")
            record: dict[str, Any] = json.loads(run("sweep", *sides, *target, "--json", "--quiet").stdout)
            return record

        return run_port

    def test_tokens_that_see_the_next_are_listed_and_attention_is_blamed(self, sweep: Any) -> None:
        record = sweep("SeesNext")
        (group,) = record["blame_groups"]
        assert group["sites"] == ["attn_context"]
        told = [site["wrong_tokens"] for site in record["sites"] if site["site"] == "attn_context"]
        assert all(token % 8 == 7 for places in told for _, token in places)
        assert any("plus a multiple of 8" in words or "every 8th" in words for words in group["where"])
        assert not any("channels" in words for words in group["where"])

    def test_error_of_all_experts_has_no_place(self, sweep: Any) -> None:
        record = sweep("UpByExpert")
        (group,) = record["blame_groups"]
        assert group["sites"] == ["moe_delta"]
        (sentence,) = group["where"]
        assert sentence.startswith("no token is near the floor: the best has ρ ")
        assert group["regions"] == []
