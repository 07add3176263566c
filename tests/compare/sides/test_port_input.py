"""Chained runs with the checkpoint at hand: each layer, and the head, is judged on the port's own input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import write_manifest

from compare.cli import main as mm2_compare
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights, HeadWeights
from compare.sides.port_head import PortHeadGolden, PortInputGolden, on_port_output
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import IncomparableError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.reference.rounding import Float32Head
from minimax_tools.results.results import Comparison, Verdict
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]
Judge = Callable[..., Comparison]

PORTS = Path(__file__).parents[2] / "ports" / "one_wrong_layer.py"
LAYER = 2
# Of the captures that no checkpoint proves, those that once passed, and right ones.
TELLING = (
    *(("Nothing", shows) for shows in ("_without_experts", "_outputs")),
    *(("SwappedGateUp", shows) for shows in ("_without_experts", "_outputs")),
)


@pytest.fixture(scope="module")
def run_full(toy: Path, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Runs a whole model of the example port, and gives its exit code, record and capture; each once."""
    made: dict[str, tuple[int, dict[str, Any], Path]] = {}

    def run(name: str) -> tuple[int, dict[str, Any], Path]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name) / "run"
            arguments = ["full", "--model", toy, "--golden", golden, "--target", f"{PORTS}:{name}"]
            arguments += ["--backend", "cpu", "--output-dir", directory, "--json", "--quiet"]
            result = click.testing.CliRunner().invoke(mm2_test, list(map(str, arguments)))
            made[name] = result.exit_code, json.loads(result.stdout), directory
        return made[name]

    return run


def places(record: dict[str, Any]) -> list[tuple[int, str]]:
    """Layer and last site of each blame."""
    return [(blame["layer"], blame["sites"][-1]) for blame in record["blame"]]


def test_figures_are_golden_against_port_and_those_on_its_own_input_beside_them(
    runs: dict[str, Capture], golden: Path, compare: Any
) -> None:
    reference, port = Capture.open(golden), runs["swapped"]
    # The checkpoint is found where the golden had it.
    exit_code, record = compare(port.directory)
    assert (exit_code, places(record)) == (1, [(1, "moe_delta")])
    mask = reference.read_inputs().attention_mask.bool()
    sites = {(site["layer"], site["site"]): site for site in record["sites"]}
    for layer in (0, 1, 3):
        site = sites[layer, "output"]
        golden_side, port_side = (side.read(layer, Site.OUTPUT).double() for side in (reference, port))
        difference = (port_side - golden_side).abs()[mask]
        assert site["metrics"]["max_abs_diff"] == pytest.approx(float(difference.max()))
        # The first layer's input is the golden's.
        assert (site["own_input_metrics"] is None) is (layer == 0)
    behind = sites[3, "output"]
    assert behind["metrics"]["close_fraction"] < 0.5 < behind["own_input_metrics"]["close_fraction"]
    logits = sites[None, "logits"]
    assert logits["metrics"]["cosine_similarity"] < logits["own_input_metrics"]["cosine_similarity"]


def test_head_of_a_port_in_float32_is_right(toy: Path, golden: Path, tmp_path: Path, command: Any) -> None:
    arguments = ("--model", toy, "--golden", golden, "--target", f"{PORTS}:InFloat32", "--backend", "cpu")
    result = command(mm2_test, "full", *arguments, "--output-dir", tmp_path / "run", "--json", "--quiet")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"]) == (0, "pass")
    (logits,) = [site for site in record["sites"] if site["site"] == "logits"]
    # Its float32 is not rounded before the norm.
    assert logits["noise"]["whole"] < 1.05


@pytest.mark.parametrize(
    "shows",
    [
        "_without_experts",
        "_outputs",
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("_without_choice", marks=pytest.mark.slow),
    ],
)
def test_right_model_passes_whatever_it_shows(run_full: Callable[[str], Any], shows: str) -> None:
    exit_code, record, _ = run_full(f"Nothing_at_{LAYER}{shows}")
    assert (exit_code, record["verdict"], record["blame"]) == (0, "pass", [])


def test_pass_says_what_it_stands_on(run_full: Callable[[str], Any], golden: Path, command: Command) -> None:
    _, record, run = run_full(f"Nothing_at_{LAYER}_outputs")
    assert record["tokens"] == "81 at positions 0-47"
    shown = command(mm2_compare, "--golden", golden, "--run", run).stdout
    assert shown.partition("\n")[0] == f"PASS: outputs only, {record['compared']} of {record['of']} sites"
    assert "81 at positions 0-47" in shown


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        (f"AttentionScale_at_{LAYER}", [(LAYER, "attn_context")]),
        (f"OneToken_at_{LAYER}", [(LAYER, "moe_delta")]),
        ("SwappedGateUp_at_1_and_3", [(1, "moe_delta"), (3, "moe_delta")]),
        (f"SwappedGateUp_at_{LAYER}_outputs", [(LAYER, "output")]),
        *(
            pytest.param(name, [(LAYER, site)], marks=pytest.mark.slow)
            for name, site in (
                (f"NoCorrectionBias_at_{LAYER}", "router_experts"),
                (f"LaterRowsDiffer_at_{LAYER}", "moe_delta"),
                (f"AttentionScale_at_{LAYER}_outputs", "output"),
            )
        ),
    ],
)
def test_mistake_is_blamed_on_its_layer_and_nowhere_else(run_full: Any, name: str, blamed: Any) -> None:
    exit_code, record, _ = run_full(name)
    assert (exit_code, places(record)) == (1, blamed)


@pytest.mark.parametrize(
    ("mistake", "shows"),
    [
        ("SwappedGateUp", "without_experts"),
        pytest.param("NoCorrectionBias", "without_experts", marks=pytest.mark.slow),
        pytest.param("SwappedGateUp", "without_choice", marks=pytest.mark.slow),
    ],
)
def test_mistake_shows_where_the_choice_does_not(run_full: Any, mistake: str, shows: str) -> None:
    exit_code, record, _ = run_full(f"{mistake}_at_{LAYER}_{shows}")
    assert (exit_code, places(record)) == (1, [(LAYER, "moe_delta")])
    assert "router_experts" in record["blame"][0]["sites"]


class TestWithoutCheckpoint:
    """Captures of chained runs alone prove nothing, and never pass."""

    @pytest.mark.parametrize(
        ("name", "shows"),
        [
            pytest.param(name, shows, marks=() if (name, shows) in TELLING else pytest.mark.slow)
            for name in ("Nothing", "SwappedGateUp", "NoCorrectionBias", "AttentionScale")
            for shows in ("", "_without_experts", "_outputs")
        ],
    )
    def test_no_chain_passes_and_nobody_is_blamed(
        self, run_full: Any, golden: Path, command: Command, tmp_path: Path, name: str, shows: str
    ) -> None:
        _, _, run = run_full(f"{name}_at_{LAYER}{shows}")
        for side in (golden, run):
            _forget_model(side, tmp_path / side.name)
        result = command(
            mm2_compare, "--golden", tmp_path / golden.name, "--run", tmp_path / run.name, "--json"
        )
        record = json.loads(result.stdout)
        assert "error" not in record, record["error"]
        assert result.exit_code in ((3,) if name == "Nothing" else (1, 3))
        assert record["blame"] == []
        if result.exit_code == 3:
            assert any("--model DIR" in note for note in record["notes"])


def test_computed_layer_has_all_sites_and_a_floor(copyist: Any, toy: Path) -> None:
    run = sweep_run(Span(0, 4), sites_level="layer")
    source = Capture.open(copyist.golden(run=run, noise_floor="stats"))
    with CheckpointWeights(model=str(toy)).open_layer(LAYER, source) as weights, torch.no_grad():
        found = PortInputGolden(source, source, layer=LAYER, weights=weights)
    assert found.sites(LAYER) == ModelGraph().sites
    assert found.sites(1) == source.sites(1) == (Site.INPUT, Site.OUTPUT)
    assert torch.equal(found.read(1, Site.OUTPUT), source.read(1, Site.OUTPUT))
    real = source.read_inputs().attention_mask.bool()
    assert torch.equal(found.read(LAYER, Site.INPUT)[real], source.read(LAYER, Site.INPUT)[real])
    assert not bool(found.read(LAYER, Site.INPUT)[~real].any())
    output, stored = (side.read(LAYER, Site.OUTPUT)[real].float() for side in (found, source))
    assert float((output - stored).norm() / stored.norm()) < 0.01
    dtypes = {site: found.read(LAYER, site).dtype for site in (Site.OUTPUT, Site.ROUTER_LOGITS)}
    assert dtypes == {Site.OUTPUT: torch.bfloat16, Site.ROUTER_LOGITS: torch.float32}
    assert not found.read(LAYER, Site.ROUTER_EXPERTS).is_floating_point()
    twin = found.read_twin(LAYER, Site.OUTPUT)
    assert twin is not None
    assert twin.dtype == torch.float32
    assert (found.description.noise_floor, found.description.floor_variants) == ("full", ("random_1",))
    for name in ("output.error", "random_1/output.error", "router_noise"):
        assert found.read_floor(LAYER, name) is not None
    floor, stored_floor = (side.read_floor(1, "output.error") for side in (found, source))
    assert floor is not None
    assert stored_floor is not None
    assert torch.equal(floor, stored_floor)


def _forget_model(capture: Path, copy: Path) -> None:
    """A copy of a capture on a machine that does not have the checkpoint."""
    copy.mkdir()
    for path in capture.iterdir():
        if path.suffix in (".safetensors", ".json") and path.name != MANIFEST_NAME:
            (copy / path.name).hardlink_to(path)
    manifest = Manifest.read(capture)
    provenance = replace(manifest.description.provenance, model_source="/not/here")
    description = replace(manifest.description, provenance=provenance)
    write_manifest(copy, replace(manifest, description=description, certificate=None))


# The head behind the layers is judged on the port's own last output.
LAST = 3


@pytest.fixture(scope="module")
def weights(toy: Path, golden: Path) -> HeadWeights:
    with CheckpointWeights(model=str(toy)).open_head(Capture.open(golden)) as opened:
        return opened


@pytest.fixture
def run_with_head(copyist: Any, weights: HeadWeights) -> Callable[..., Path]:
    """A chained run whose last output is a little off the golden's, with a head of these weights behind it."""

    def run(
        *, norm: torch.Tensor = weights.norm, lm_head: torch.Tensor = weights.lm_head, name: str = "device"
    ) -> Path:
        output = copyist.source.read(LAST, Site.OUTPUT).float()
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        output = (output * (1 + 1e-3 * noise)).bfloat16()
        head = Float32Head(norm, lm_head, spec=weights.spec)
        normed = (head.scale(output).bfloat16().float() * norm.float()).bfloat16()
        changes = {
            (LAST, Site.OUTPUT): lambda _: output,
            (None, ModelSite.FINAL_NORM): lambda _: normed,
            (None, ModelSite.LOGITS): lambda _: head.score(normed).bfloat16(),
        }
        device: Path = copyist.device_run(changes, run=full_run(LAST + 1, sites_level="all"), name=name)
        return device

    return run


def blamed(comparison: Comparison) -> list[tuple[int | None, tuple[str, ...]]]:
    return [(blame.layer, blame.sites) for blame in comparison.blame]


def test_right_head_passes(run_with_head: Callable[..., Path], judge: Judge, toy: Path) -> None:
    comparison = judge(run_with_head(), model=toy)
    assert (comparison.verdict, comparison.blame) == (Verdict.PASS, ())


def test_wrong_heads_are_blamed(run_with_head: Any, judge: Judge, toy: Path, weights: HeadWeights) -> None:
    for name, head, site in (
        ("rows", {"lm_head": weights.lm_head.roll(1, dims=0)}, "logits"),
        # A scale that the output of the layers hides.
        ("scale", {"lm_head": (weights.lm_head.float() * 1.02).bfloat16()}, "logits"),
        # The logits behind a wrong norm are right.
        ("norm", {"norm": 1 + weights.norm}, "final_norm"),
    ):
        assert blamed(judge(run_with_head(name=name, **head), model=toy)) == [(None, (site,))], name


def test_head_of_another_model_is_refused(run_with_head: Any, judge: Judge, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthesize(other, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=4_000_000, seed=1)
    with pytest.raises(IncomparableError, match="is not of the checkpoint"):
        judge(run_with_head(), model=other)


def test_computed_head_has_twin_and_floor(golden: Path, weights: HeadWeights) -> None:
    source = Capture.open(golden)
    found = PortHeadGolden(source, source, layer=LAST, weights=weights)
    real = source.read_inputs().attention_mask.bool()
    for site in (ModelSite.FINAL_NORM, ModelSite.LOGITS):
        computed, stored = (side.read(None, site)[real].float() for side in (found, source))
        assert float((computed - stored).norm() / stored.norm()) < 0.01
        twin = found.read_twin(None, site)
        assert twin is not None
        assert (twin.dtype, found.read(None, site).dtype) == (torch.float32, torch.bfloat16)
        for name in (f"{site}.error", f"random_1/{site}.error"):
            assert found.read_floor(None, name) is not None
    embedding = ModelSite.EMBEDDING
    assert torch.equal(found.read(None, embedding), source.read(None, embedding))
    assert found.read_floor(None, "embedding.error") is None
    assert found.model_sites() == source.model_sites()
    output = found.read(LAST, Site.OUTPUT)
    assert torch.equal(output[real], source.read(LAST, Site.OUTPUT)[real])
    assert not bool(output[~real].any())
    assert torch.equal(found.read(1, Site.OUTPUT), source.read(1, Site.OUTPUT))
    assert (found.description.noise_floor, found.description.floor_variants) == ("full", ("random_1",))


@pytest.mark.parametrize(
    ("change", "is_computed"),
    [
        (None, False),
        (lambda tensor: tensor * 2, True),
        (lambda tensor: tensor * torch.nan, False),
        (lambda tensor: tensor[..., :8], False),
    ],
)
def test_head_is_computed_from_an_output_that_differs_and_is_finite(
    golden: Path, toy: Path, copyist: Any, change: Any, is_computed: bool
) -> None:
    changes = {} if change is None else {(LAST, Site.OUTPUT): change}
    source, target = (
        Capture.open(path)
        for path in (golden, copyist.device_run(changes, run=full_run(LAST + 1, sites_level="layer")))
    )
    sides = Sides(
        reference=source,
        target=target,
        batch=Batch.of(source, target),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
        weights=CheckpointWeights(model=str(toy)),
    )
    assert (on_port_output(sides, LAST) is not None) is is_computed
    assert on_port_output(replace(sides, weights=None), LAST) is None
