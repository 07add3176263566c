"""Captures that other tools wrote, on either side of `mm2-compare`: what they hold is judged as mm2's own is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite, Site
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

FORMATS = ("nxdi", "vllm-neuron", "msprobe", "sglang", "transformers")
# How many pairs a tool's own names give, of the 17 of each of four layers and the three outside them.
COMPARED = {"nxdi": 55, "vllm-neuron": 51, "msprobe": 63, "sglang": 55, "transformers": 59}
# NxDI and SGLang keep the logits of the last tokens alone, which are judged.
NUM_OUTSIDE = 3
# What is to blame where the tool shows it; without the experts' choice that is a suspect too.
BLAMED = {
    "nxdi": ["router_experts", "router_weights", "moe_delta"],
    "vllm-neuron": ["router_experts", "router_weights", "moe_delta"],
    "msprobe": ["moe_delta"],
    "sglang": ["router_experts", "router_weights", "moe_delta"],
    "transformers": ["moe_delta", "output"],
}


def formats(*, slow: tuple[str, ...]) -> list[Any]:
    """Return all formats; of the slow ones, other tests read all values bit for bit."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in FORMATS]


@pytest.fixture
def save(dumps: Any, runs: Any, tmp_path: Path) -> Callable[..., Path]:
    """Saves a site of a run as NxDI does a module's tensor, padded to a bucket; `how` changes it."""

    def save(
        module: str,
        layer: int | None,
        site: Site | ModelSite,
        point: str = "output",
        *,
        run: str = "right",
        name: str = "dump",
        side: str = "right",
        how: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> Path:
        source = runs[run]
        values = dumps.padded(how(source.read(layer, site)), source.read_attention_mask(), side=side)
        dumps.save_nxdi(tmp_path / name, module, point, values)
        return tmp_path / name

    return save


class TestWholeDump:
    @pytest.mark.parametrize("name", formats(slow=("vllm-neuron",)))
    def test_right_port_on_two_ranks_passes(self, write: Any, name: str, compare: Any) -> None:
        exit_code, record = compare(write(name, num_ranks=2))
        assert (exit_code, record["verdict"], record["blame"]) == (0, "pass", [])
        assert (record["compared"], record["of"]) == (COMPARED[name], 4 * 17 + NUM_OUTSIDE)
        # Where the experts' choice does not show, tokens whose choice is in doubt are not judged.
        assert {site["status"] for site in record["sites"]} <= {"pass", "not exposed", "not judged"}

    @pytest.mark.parametrize("name", formats(slow=("vllm-neuron", "sglang")))
    def test_swapped_gate_and_up_are_blamed(
        self, write: Any, name: str, compare: Any, tmp_path: Path
    ) -> None:
        options = ("--report-path", tmp_path / "report")
        exit_code, record = compare(write(name, "swapped"), None, *options)
        assert (exit_code, record["verdict"]) == (1, "fail")
        assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(1, BLAMED[name])]
        markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
        assert "layer 1, " in markdown
        assert "Not exposed by the port" in markdown
        assert (tmp_path / "report" / "junit.xml").exists()

    def test_dump_stands_for_the_golden_where_there_is_none(
        self, write: Any, dumps: Any, compare: Any, copyist: Any, tmp_path: Path
    ) -> None:
        dumps.write_transformers(tmp_path / "gpu", copyist.source)
        write("msprobe", "right", "device")
        exit_code, record = compare(tmp_path / "device", "lengths: [48, 33]", reference=tmp_path / "gpu")
        # Nobody can compute what a right layer makes of the port's own input: nothing is proved.
        assert (exit_code, record["verdict"], record["compared"]) == (3, "incomparable", 59)
        assert any("kept no noise floor" in note for note in record["notes"])
        assert any("nothing proves layer" in note for note in record["notes"])

    def test_unknown_names_are_told(self, write: Any, compare: Any, tmp_path: Path) -> None:
        write("vllm-neuron")
        for norm in (tmp_path / "dump").rglob("*.input_layernorm"):
            norm.rename(norm.with_name(norm.name.replace("input_layernorm", "first_norm")))
        _, record = compare(tmp_path / "dump", None, "--layer", "layer_0")
        assert "run: 4 modules map to no site: model.layers.{layer}.first_norm" in record["notes"]


class TestWrongMap:
    def test_place_that_is_not_there_is_named_with_those_that_are(self, write: Any, compare: Any) -> None:
        text = 'sites: {moe_delta: "layers.{layer}.block_sparse_mlp"}'
        exit_code, record = compare(write("nxdi"), text)
        assert exit_code == 3
        assert "sites.moe_delta is layers.{layer}.block_sparse_mlp:output" in record["error"]
        assert "layers.{layer}.mlp" in record["error"]

    def test_wrong_place_fails_where_it_points(self, write: Any, compare: Any) -> None:
        text = 'sites: {moe_delta: "layers.{layer}.self_attn.o_proj"}'
        exit_code, record = compare(write("nxdi"), text, "--layer", "layer_0")
        assert exit_code == 1
        assert "moe_delta" in record["blame"][0]["sites"]

    def test_other_prompts_and_tokens_are_incomparable(
        self, write: Any, compare: Any, tmp_path: Path
    ) -> None:
        exit_code, record = compare(write("nxdi", name="other"), "lengths: [48, 32]")
        assert exit_code == 3
        assert "expected prompts of 48, 33 tokens, found 48, 32" in record["error"]
        folder = write("sglang")
        (path,) = folder.glob("*name=input_ids*")
        held = torch.load(path, weights_only=False)
        held["value"][50] += 1
        torch.save(held, path)
        exit_code, record = compare(folder)
        assert exit_code == 3
        assert "input_ids differ, first at row 1, token 2" in record["error"]
        held["value"][50] -= 1
        torch.save(held, path)
        exit_code, record = compare(folder, None, "--layer", "layer_0")
        assert exit_code == 0
        assert "one side does not record its model: that they agree was not checked" in record["notes"]


class TestUnknownNames:
    @pytest.fixture
    def strange(self, save: Any) -> Path:
        """Modules that mm2 has never heard of."""
        for layer in range(4):
            save(f"decoder.blocks.{layer}", layer, Site.INPUT, "input")
            save(f"decoder.blocks.{layer}.attn.wq", layer, Site.Q_PROJ)
            folder: Path = save(f"decoder.blocks.{layer}", layer, Site.OUTPUT)
        return folder

    def test_what_was_found_is_named_and_the_template_is_a_map_with_a_line_for_every_site(
        self, strange: Path, compare: Any, command: Command
    ) -> None:
        exit_code, record = compare(strange)
        assert exit_code == 3
        assert "no site of a layer was found" in record["error"]
        assert "found decoder.blocks.{layer}, decoder.blocks.{layer}.attn.wq" in record["error"]
        assert "--map-template > map.yaml" in record["error"]
        template = command(mm2_test, "show", strange, "--map-template").stdout
        assert all(f"  # {site}: " in template for site in (*Site, *ModelSite))
        assert '#   "decoder.blocks.{layer}.attn.wq:output"  2x64x512 bfloat16' in template
        exit_code, record = compare(strange, template)
        assert (exit_code, "no site of a layer was found" in record["error"]) == (3, True)
        filled = template.replace('# input: ""', 'input: "decoder.blocks.{layer}:input"')
        filled = filled.replace('# q_proj: ""', 'q_proj: "decoder.blocks.{layer}.attn.wq"')
        filled = filled.replace('# output: ""', 'output: "decoder.blocks.{layer}"')
        exit_code, record = compare(strange, filled)
        assert exit_code == 0
        assert [one["status"] for one in record["sites"] if one["site"] == "q_proj"] == 4 * ["pass"]

    def test_template_of_mm2s_own_capture_is_refused(self, runs: Any, command: Command) -> None:
        result = command(mm2_test, "show", runs["right"].directory, "--map-template")
        assert result.exit_code == 2
        assert "was not written by another tool" in result.stderr


class TestPieces:
    def test_missing_piece_is_refused(self, write: Any, reads_as: Any, tmp_path: Path) -> None:
        write("msprobe", num_ranks=2)
        name = "Module.model.layers.1.self_attn.q_proj.SomeClass.forward.0.output.0.pt"
        (tmp_path / "dump" / "step0" / "rank1" / "dump_tensor_data" / name).unlink()
        with pytest.raises(CaptureError, match=r"lacks a piece of q_proj of layer 1.* found none of rank 1"):
            reads_as(tmp_path / "dump")

    def test_pieces_that_disagree_are_refused(self, write: Any, reads_as: Any, tmp_path: Path) -> None:
        write("vllm-neuron", num_ranks=2)
        path = tmp_path / "dump" / "dp0" / "prefill_s128_0" / "model.layers.2.block_sparse_moe" / "rank1.pt"
        torch.save(2 * torch.load(path), path)
        with pytest.raises(
            CaptureError, match=r"moe_delta of layer 2.* is not the same on all ranks.*@partial"
        ):
            reads_as(tmp_path / "dump")

    def test_sum_that_is_to_be_reduced_is_added_up(self, write: Any, reads_as: Any, tmp_path: Path) -> None:
        write("vllm-neuron", num_ranks=2)
        for folder in (tmp_path / "dump" / "dp0" / "prefill_s128_0").glob("*.block_sparse_moe"):
            whole = torch.load(folder / "rank0.pt")
            for rank, factor in enumerate((2, -1)):
                torch.save(whole * factor, folder / f"rank{rank}.pt")
        text = 'sites: {output: "layers.{layer}", moe_delta: "layers.{layer}.block_sparse_moe@partial"}'
        assert reads_as(tmp_path / "dump", text=text).num_sites == COMPARED["vllm-neuron"]

    def test_rank_0_alone_shows_what_all_ranks_have_once_it_is_told_how_many_there_are(
        self, write: Any, reads_as: Any, compare: Any, tmp_path: Path
    ) -> None:
        rank0 = write("nxdi", "right", "both", num_ranks=2) / "rank0"
        with pytest.raises(CaptureError, match="expected a map that says of how many ranks: ranks: 2"):
            reads_as(rank0)
        reading = reads_as(rank0, text="ranks: 2")
        assert reading.num_sites == COMPARED["nxdi"] - 4 * 6
        assert reading.told("of 2 ranks only 1 are held: q_proj, k_proj")
        # A user who says that there is one rank has the shape judged.
        assert compare(rank0, "ranks: 1", "--layer", "layer_0")[0] == 1
        assert reads_as(write("nxdi", "right", "one")).told("this tool keeps rank 0's tensors alone")

    def test_weights_of_the_chosen_experts_are_computed_from_affinities(
        self, dumps: Any, runs: Any, compare: Any, tmp_path: Path
    ) -> None:
        source, mask = runs["right"], runs["right"].read_attention_mask()

        def write(name: str, *, power: float) -> Path:
            dumps.write_nxdi(tmp_path / name, source, has_metadata=False)
            for layer in source.layers:
                chosen = source.read(layer, Site.ROUTER_EXPERTS)
                affinities = source.read(layer, Site.ROUTER_LOGITS).float().sigmoid().pow(power)
                for element, values in ((1, affinities), (2, chosen)):
                    module = f"layers.{layer}.mlp.router"
                    flat = dumps.padded(values, mask).flatten(0, 1)
                    dumps.save_nxdi(
                        tmp_path / name, module, f"output_{element}", flat.clamp(min=0), has_metadata=False
                    )
            return tmp_path / name

        exit_code, record = compare(write("right", power=1.0), None, "--layer", "layer_1")
        assert exit_code == 0
        assert [one["status"] for one in record["sites"] if one["site"] == "router_weights"] == ["pass"]
        assert any("computed from the affinities" in note for note in record["notes"])
        exit_code, record = compare(write("wrong", power=2.0), None, "--layer", "layer_1")
        assert exit_code == 1
        assert {site for blame in record["blame"] for site in blame["sites"]} >= {"router_weights"}

    def test_norm_by_heads_is_read_as_the_norm_of_all(
        self, write: Any, dumps: Any, runs: Any, reads_as: Any, tmp_path: Path
    ) -> None:
        source, mask = runs["right"], runs["right"].read_attention_mask()
        folder = write("nxdi", has_metadata=False)
        for layer in source.layers:
            for name, site in (("q", Site.Q_NORM), ("k", Site.K_NORM)):
                [path] = folder.glob(f"*layers.{layer}.self_attn.{name}_norm_output.pt")
                path.unlink()
                heads = dumps.padded(source.read(layer, site), mask).unflatten(-1, (-1, 64))
                module = f"layers.{layer}.self_attn.{name}_layernorm"
                dumps.save_nxdi(folder, module, "output", heads, has_metadata=False)
        assert reads_as(tmp_path / "dump").num_sites == COMPARED["nxdi"]

    def test_fused_projection_is_cut_on_each_rank(self, write: Any, reads_as: Any, tmp_path: Path) -> None:
        write("vllm-neuron", num_ranks=2)
        folder = tmp_path / "dump" / "dp0" / "prefill_s128_0"
        for layer in range(4):
            attention = f"model.layers.{layer}.self_attn"
            (folder / f"{attention}.qkv_proj").mkdir()
            for rank in ("rank0.pt", "rank1.pt"):
                parts = [folder / f"{attention}.{site}" / rank for site in ("q_proj", "k_proj", "v_proj")]
                fused = torch.cat([torch.load(part) for part in parts], dim=-1)
                torch.save(fused, folder / f"{attention}.qkv_proj" / rank)
                for part in parts:
                    part.unlink()
            for site in ("q_proj", "k_proj", "v_proj"):
                (folder / f"{attention}.{site}").rmdir()
        text = """
            sites:
              q_proj: "self_attn.qkv_proj:output[0][0:256]"
              k_proj: "model.layers.{layer}.self_attn.qkv_proj[256:320]@shard(-1)"
              v_proj: "layers.{layer}.self_attn.qkv_proj[320:384]"
              output: "layers.{layer}"
        """
        fixed = text.replace('"self_attn.qkv', '"layers.{layer}.self_attn.qkv')
        assert reads_as(tmp_path / "dump", text=fixed).num_sites == COMPARED["vllm-neuron"]
        words = "v_proj of layer 0.*expected at least 448 along the last dim of every rank's tensor"
        with pytest.raises(CaptureError, match=words):
            reads_as(tmp_path / "dump", text=fixed.replace("320:384", "320:448"))


class TestDiagnosis:
    @pytest.fixture
    def diagnose(
        self, toy: Path, golden: Path, command: Command, tmp_path: Path
    ) -> Callable[..., tuple[int, dict[str, Any]]]:
        def run(*options: str) -> tuple[int, dict[str, Any]]:
            paths = ("--model", toy, "--golden", golden, "--run", tmp_path / "dump")
            result = command(mm2_diagnose, *paths, "--json", "--quiet", *options)
            return result.exit_code, json.loads(result.stdout)

        return run

    def test_layer_that_others_fed_is_diagnosed_on_its_own_input(self, write: Any, diagnose: Any) -> None:
        write("msprobe", "swapped")
        some = ("--mistake", "gate_up_swapped", "--mistake", "router_bias_missing")
        exit_code, record = diagnose(*some)
        assert exit_code == 1
        assert [(one["layer"], one["mistake"]) for one in record["diagnosis"]] == [(1, "gate_up_swapped")]
        assert record["diagnosis"][0]["leaves"] < 1.3
        assert any("on the port's own input" in note for note in record["layers"][0]["notes"])
        assert "layers 1-3 ran on each other's outputs" in record["notes"][0]
        # The right layer behind it is not blamed.
        exit_code, record = diagnose(*some[:2], "--layer", "layer_2")
        assert (exit_code, record["diagnosis"]) == (0, [])
        assert record["layers"][0]["unexplained"] < 1.5

    def test_wrong_head_is_named_from_last_tokens(
        self, toy: Path, write: Any, runs: Any, diagnose: Any
    ) -> None:
        folder, source = write("nxdi"), runs["right"]
        with CheckpointReader(toy) as reader:
            embedding = reader.read_weight("model.embed_tokens.weight", torch.bfloat16).float()
        mask = source.read_attention_mask()
        normed = source.read(None, ModelSite.FINAL_NORM)[torch.arange(2), mask.sum(dim=1) - 1].float()
        path = folder / "captured_tensors_cte_step_1_module_lm_head_output.pt"
        torch.save((normed @ embedding.T)[:, None].to(torch.load(path).dtype), path)
        exit_code, record = diagnose()
        found = [(one["layer"], one["mistake"]) for one in record["diagnosis"]]
        assert (exit_code, found) == (1, [(None, "head_is_embedding")])
        assert record["unexplained_blame"] == []


class TestPartOfAModel:
    def test_layer_behind_one_that_was_not_kept_is_judged(self, save: Any, compare: Any) -> None:
        for run, blamed in (("right", []), ("swapped", [1])):
            for layer in (1, 3):
                save(f"layers.{layer}", layer, Site.INPUT, "input", run=run, name=run)
                norm = f"layers.{layer}.post_attention_layernorm"
                save(norm, layer, Site.ATTN_RESIDUAL, "input", run=run, name=run)
                folder = save(f"layers.{layer}.mlp", layer, Site.MOE_DELTA, run=run, name=run)
            exit_code, record = compare(folder)
            assert exit_code == len(blamed)
            assert [blame["layer"] for blame in record["blame"]] == blamed
        assert "moe_delta" in record["blame"][0]["sites"]

    def test_other_prompts_behind_it_are_refused(self, save: Any, compare: Any) -> None:
        for site, point in ((Site.INPUT, "input"), (Site.OUTPUT, "output")):
            folder = save("layers.3", 3, site, point, how=lambda values: values.roll(1, dims=1))
        exit_code, record = compare(folder)
        assert exit_code == 3
        assert "layer 3 got other hidden states" in record["error"]

    def test_without_inputs_no_port_is_called_wrong_or_right(
        self, toy: Path, golden: Path, save: Any, compare: Any, command: Command
    ) -> None:
        for layer in (2, 3):
            folder = save(f"layers.{layer}.self_attn.o_proj", layer, Site.ATTN_DELTA, run="swapped")
        exit_code, record = compare(folder)
        assert (exit_code, record["verdict"], record["blame"]) == (3, "incomparable", [])
        assert any("2 sites differ behind an input that was not captured" in n for n in record["notes"])
        paths = ("--model", toy, "--golden", golden, "--run", folder)
        result = command(mm2_diagnose, *paths, "--layer", "layer_2", "--quiet")
        assert result.exit_code == 3
        assert "the input of layer 2 is not held on both sides" in result.stderr
        assert "mm2-test single-layer --layer 2" in result.stderr

        def with_nan(values: torch.Tensor) -> torch.Tensor:
            values[0, 5, 7] = torch.nan
            return values

        save("layers.2.self_attn.o_proj", 2, Site.ATTN_DELTA, run="swapped", how=with_nan)
        assert compare(folder)[0] == 1

    def test_without_inputs_contradicting_experts_are_wrong(self, toy: Path, save: Any, compare: Any) -> None:
        text = 'sites: {router_experts: "layers.{layer}.mlp.chosen"}'
        save("layers.2.mlp.router.linear_router", 2, Site.ROUTER_LOGITS, run="swapped")
        folder = save("layers.2.mlp.chosen", 2, Site.ROUTER_EXPERTS, run="swapped")
        # Behind a wrong layer both differ, and agree with each other.
        exit_code, record = compare(folder, text, "--model", toy)
        assert (exit_code, record["verdict"], record["blame"]) == (3, "incomparable", [])

        def worst(logits: torch.Tensor) -> torch.Tensor:
            return logits.argsort(dim=-1)[..., :4].int()

        save("layers.2.mlp.chosen", 2, Site.ROUTER_LOGITS, run="swapped", how=worst)
        exit_code, record = compare(folder, text, "--model", toy)
        assert (exit_code, record["verdict"]) == (1, "fail")
        assert record["blame"][0]["sites"][-1] == "router_experts"


class TestRows:
    def test_left_padding_is_cut_as_declared(self, save: Any, reads_as: Any) -> None:
        for layer in range(4):
            save(f"layers.{layer}", layer, Site.OUTPUT, side="left")
        folder = save("embed_tokens", None, ModelSite.EMBEDDING, side="left")
        assert reads_as(folder, text="padding: left").num_sites == 5
        with pytest.raises(AssertionError, match="INPUT"):
            reads_as(folder)

    def test_decoded_rows_follow_the_prefill(
        self, dumps: Any, runs: Any, reads_as: Any, tmp_path: Path
    ) -> None:
        source = runs["right"]
        mask = source.read_attention_mask()
        ends = mask.sum(dim=1) - 1
        before = mask.clone()
        before[torch.arange(2), ends] = 0
        for layer in range(4):
            tensor = source.read(layer, Site.OUTPUT)
            module = f"layers.{layer}"
            dumps.save_nxdi(tmp_path / "dump", module, "output", dumps.padded(tensor, before))
            decoded = tensor[torch.arange(2), ends][:, None]
            dumps.save_nxdi(tmp_path / "dump", module, "output", decoded, step=2)
        assert reads_as(tmp_path / "dump", text="steps: [[1, 2]]").num_sites == 4
        with pytest.raises(IncomparableError):
            reads_as(tmp_path / "dump", text="lengths: [47, 32]")
        with pytest.raises(CaptureError, match="holds no pass 3: expected one of 1, 2"):
            reads_as(tmp_path / "dump", text="steps: [3]")

    def test_single_zero_means_nothing(self, write: Any, dumps: Any, reads_as: Any, tmp_path: Path) -> None:
        write("nxdi")
        dumps.save_nxdi(tmp_path / "dump", "layers.2.mlp", "output", torch.zeros(1, dtype=torch.bfloat16))
        reading = reads_as(tmp_path / "dump")
        assert Site.MOE_DELTA in reading.source.not_exposed(2)
        assert reading.told("a single zero stands for what the tool did not find")


# A prompt in two chunks, both prompts in one pass, and the last rows decoded one by one.
PASSES = [[(0, 0, 20)], [(0, 20, 46), (1, 0, 20)], [(1, 20, 33)], [(0, 46, 47)], [(0, 47, 48)]]


class TestPasses:
    @pytest.mark.parametrize("name", ["vllm-neuron", "sglang"])
    def test_chunks_and_decoded_rows_are_joined(self, write: Any, name: str, reads_as: Any) -> None:
        reading = reads_as(write(name, "swapped", passes=PASSES), "swapped")
        assert reading.num_sites == COMPARED[name]
        # Neither what attention is called with, nor a pass behind the first, counts as one that is left.
        assert not reading.told("passes")

    @pytest.mark.parametrize(
        ("passes", "steps"),
        [
            ([[(0, 0, 48)], [(1, 0, 33)]], "[['0'], ['1']]"),
            ([[(1, 0, 33)], [(0, 0, 30)], [(0, 30, 48)]], "[['1', '2'], ['0']]"),
            (
                [[(0, 0, 43), (1, 0, 28)], *([(0, 43 + n, 44 + n), (1, 28 + n, 29 + n)] for n in range(5))],
                None,
            ),
        ],
    )
    def test_steps_that_an_error_names_are_those_that_work(
        self, write: Any, passes: Any, steps: str | None, reads_as: Any, tmp_path: Path
    ) -> None:
        write("sglang", passes=passes, has_request_ids=False)
        for name in ("positions", "seq_lens", "req_pool_indices"):
            for file in (tmp_path / "dump").glob(f"*name={name}___*"):
                file.unlink()
        with pytest.raises(CaptureError) as caught:
            reads_as(tmp_path / "dump")
        line = "steps: " + str(caught.value).partition("steps: ")[2].rstrip(".")
        assert line == f"steps: {steps or [[str(step) for step in range(6)]]}"
        assert reads_as(tmp_path / "dump", text=line).num_sites == COMPARED["sglang"]


class TestShow:
    def test_dump_is_listed_with_its_sites(self, write: Any, command: Command, tmp_path: Path) -> None:
        write("msprobe", num_ranks=2)
        record = json.loads(command(mm2_test, "show", tmp_path / "dump", "--json").stdout)
        assert (record["format"], record["ranks"]) == ("msprobe", 2)
        (line,) = (
            line
            for line in record["tensors"]
            if line["name"] == "model.layers.{layer}.self_attn.o_proj:input[0]"
        )
        assert line["sites"] == ["attn_context"]
        assert (line["layers"], line["ranks"], line["dtypes"]) == ([0, 1, 2, 3], [0, 1], ["bfloat16"])
        text = command(mm2_test, "show", tmp_path / "dump").stdout
        assert "model.layers.{layer}.mlp.gate:output[2]" in text
        assert "router_experts" in text


class TestLastTokens:
    """Logits that a tool keeps of the tokens to sample from alone."""

    @staticmethod
    def rewrite(folder: Path, pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        paths = list(folder.rglob(pattern))
        assert paths
        for path in paths:
            held = torch.load(path, weights_only=False)
            if isinstance(held, dict):
                held["value"] = change(held["value"])
            else:
                held = change(held)
            torch.save(held, path)

    @pytest.mark.parametrize(("name", "pattern"), [("nxdi", "*lm_head*"), ("sglang", "*next_token_logits*")])
    def test_right_ones_are_read_and_wrong_ones_are_blamed(
        self, write: Any, name: str, pattern: str, reads_as: Any, compare: Any, tmp_path: Path
    ) -> None:
        assert reads_as(write(name)).told("logits: held of 2 tokens to sample from alone, which are judged")
        self.rewrite(tmp_path / "dump", pattern, lambda logits: logits.roll(1, -1))
        exit_code, record = compare(tmp_path / "dump")
        assert (exit_code, record["verdict"]) == (1, "fail")
        assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(None, ["logits"])]

    def test_each_chunk_and_decoded_row_has_its_own(self, write: Any, reads_as: Any, tmp_path: Path) -> None:
        reading = reads_as(write("sglang", passes=PASSES))
        assert reading.told("logits: held of 6 tokens to sample from alone, which are judged")
        self.rewrite(tmp_path / "dump", "step=4__*next_token_logits*", torch.neg)
        with pytest.raises(AssertionError, match="logits"):
            reads_as(tmp_path / "dump")
