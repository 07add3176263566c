"""The golden's noise floor: its twins, their distances, and what other right ways to compute it cost."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import capture, contents, present, streams
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import sign

from gpu_reference.cli import main
from gpu_reference.golden.golden import GoldenRequest
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.metrics.noise_floor import (
    ROUTER_MARGIN,
    ROUTER_NOISE,
    error_name,
    massive_channels,
    massive_error_name,
    ordinary_error_name,
    token_rows,
    variant_name,
)
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span

NAMES = ("nearest", "random_1")
JUDGED = tuple(site for site in ModelGraph().sites if site not in (Site.INPUT, Site.ROUTER_EXPERTS))
MODEL_SITES = (ModelSite.FINAL_NORM, ModelSite.LOGITS)


@pytest.fixture(scope="module")
def full(golden: Path) -> Capture:
    return Capture.open(golden)


@pytest.fixture(scope="module")
def stats(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The golden with the distances alone of its floor."""
    return capture(ask(noise_floor="stats"), tmp_path_factory.mktemp("stats") / "full_model")


@pytest.fixture(scope="module")
def full_of_stats(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The golden of `stats`, its floor kept whole."""
    return capture(ask(noise_floor="full"), tmp_path_factory.mktemp("full") / "full_model")


def judged_rows(golden: Capture) -> Iterator[tuple[int, Site, torch.Tensor, torch.Tensor]]:
    """The rows of each judged site of a layer, and those of its twin."""
    for layer in golden.layers:
        for site in JUDGED:
            rows, twin = golden.read(layer, site), present(golden.read_twin(layer, site))
            yield layer, site, token_rows(rows, site).double(), token_rows(twin, site).double()


def test_full_floor_keeps_the_twin_of_every_computed_site(full: Capture) -> None:
    for layer in full.layers:
        assert full.read_twin(layer, Site.INPUT) is None
        for site in set(ModelGraph().sites) - {Site.INPUT}:
            twin = present(full.read_twin(layer, site))
            assert twin.dtype == (torch.int64 if site is Site.ROUTER_EXPERTS else torch.float32)
            assert twin.shape == full.read(layer, site).shape


def test_floor_is_as_large_as_bfloat16_makes_it(full: Capture) -> None:
    real = full.read_attention_mask().bool()
    for layer, site, rows, twin in judged_rows(full):
        error = float((rows - twin)[real].norm() / rows[real].norm())
        assert 1e-5 < error < 2e-2, (layer, site)


def test_stored_norms_are_those_of_reference_minus_twin(full: Capture) -> None:
    real = full.read_attention_mask().bool()
    for layer, site, rows, twin in judged_rows(full):
        error, ordinary = rows - twin, ~massive_channels(rows[real])
        for name, norms in (
            (error_name(site), error.norm(dim=-1)),
            (ordinary_error_name(site), error[..., ordinary].norm(dim=-1)),
        ):
            stored = present(full.read_floor(layer, name)).double()
            torch.testing.assert_close(stored[real], norms[real], rtol=1e-4, atol=1e-9)
            assert not stored[~real].any()


def test_model_sites_have_a_floor_too(full: Capture) -> None:
    real = full.read_attention_mask().bool()
    for site in MODEL_SITES:
        reference, twin = full.read(None, site).double(), present(full.read_twin(None, site))
        stored = present(full.read_floor(None, error_name(site))).double()
        error = (reference - twin)[real]
        torch.testing.assert_close(stored[real], error.norm(dim=-1), rtol=1e-4, atol=1e-9)
        assert 1e-4 < float(error.norm() / reference[real].norm()) < 1e-2
    assert full.read_twin(None, ModelSite.EMBEDDING) is None


def test_statistics_are_the_same_whether_the_twin_is_kept_or_not(
    stats: Capture, full_of_stats: Capture
) -> None:
    of_layers = [ROUTER_MARGIN, ROUTER_NOISE, *(error_name(site) for site in JUDGED)]
    kinds = (error_name, ordinary_error_name, massive_error_name)
    of_model = [kind(site) for kind in kinds for site in MODEL_SITES]
    for layer in (*range(4), None):
        for name in of_model if layer is None else of_layers:
            mine, theirs = (present(one.read_floor(layer, name)) for one in (stats, full_of_stats))
            assert torch.equal(mine, theirs), name


def test_floor_changes_no_captured_bit_and_none_is_kept_when_it_is_off(
    stats: Capture, full_of_stats: Capture, ask: Any, tmp_path: Path
) -> None:
    plain = capture(ask(noise_floor="off"), tmp_path / "capture")
    digests = [[entry.sha256 for entry in one.manifest.entries] for one in (plain, stats, full_of_stats)]
    assert digests[0] == digests[1] == digests[2]
    parts = ("inputs", "model", *(f"layer_{layer}" for layer in range(4)))
    assert contents(plain.directory).keys() == {"manifest.json", *(f"{part}.safetensors" for part in parts)}
    assert plain.read_floor(0, ROUTER_MARGIN) is None


def test_floor_of_few_sites_knows_the_routers_margin(ask: Any, tmp_path: Path) -> None:
    request = ask(noise_floor="full", run=single_layer_run(2, sites_level="layer"))
    made = capture(request, tmp_path / "capture")
    assert made.sites(2) == (Site.INPUT, Site.OUTPUT)
    assert made.read_floor(2, ROUTER_MARGIN) is not None
    assert made.read_twin(2, Site.OUTPUT) is not None
    assert made.read_twin(2, Site.ATTN_DELTA) is None


@pytest.fixture(scope="module")
def request_two(ask: Any) -> GoldenRequest:
    """The golden of two layers whose floor has variants."""
    two_layers = multi_layer_run(Span(0, 2), sites_level="all")
    request: GoldenRequest = replace(ask(run=two_layers, noise_floor="full"), floor_variants=NAMES)
    return request


@pytest.fixture(scope="module")
def varied(request_two: GoldenRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(request_two, tmp_path_factory.mktemp("varied") / "capture").directory


def test_variants_change_no_captured_tensor_and_no_twin(
    request_two: GoldenRequest, varied: Path, tmp_path: Path
) -> None:
    plain = contents(capture(replace(request_two, floor_variants=()), tmp_path / "plain").directory)
    mine = contents(varied)
    assert mine.keys() == plain.keys()
    differing = {name for name in mine if mine[name] != plain[name]}
    assert differing == {MANIFEST_NAME, "layer_0.floor.safetensors", "layer_1.floor.safetensors"}
    assert b"floor_variants" not in plain[MANIFEST_NAME]
    before = load_file(tmp_path / "plain/layer_1.floor.safetensors")
    after = load_file(varied / "layer_1.floor.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_manifest_names_the_variants_and_the_floor_holds_each(varied: Path) -> None:
    golden = Capture.open(varied)
    assert golden.description.floor_variants == NAMES
    real = golden.read_attention_mask().bool()
    for layer in golden.layers:
        for name in NAMES:
            assert golden.read_floor(layer, variant_name(name, ROUTER_NOISE)) is not None
            for site in (Site.ATTN_DELTA, Site.MOE_DELTA, Site.ROUTER_WEIGHTS):
                own = present(golden.read_floor(layer, error_name(site)))
                error = present(golden.read_floor(layer, variant_name(name, error_name(site))))
                assert 0.7 < float(error[real].norm() / own[real].norm()) < 1.6
                assert not error[~real].any()


@pytest.mark.parametrize("streaming", streams("cpu").values(), ids=streams("cpu"))
def test_streamed_variants_have_the_bytes_of_the_whole_ones(
    request_two: GoldenRequest, varied: Path, tmp_path: Path, streaming: Streaming
) -> None:
    streamed = capture(replace(request_two, streaming=streaming), tmp_path)
    assert contents(streamed.directory) == contents(varied)


@pytest.mark.parametrize(
    ("options", "names"),
    [((), NAMES), (("--floor-variants", 3), (*NAMES, "random_2")), (("--floor-variants", 0), ())],
    ids=["default", "three", "none"],
)
def test_option_says_how_many_variants(
    toy: Path, tmp_path: Path, command: Any, options: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    asked = ("--model", toy, "--layer", 0, "--seq-len", 5, "--output-dir", tmp_path / "capture")
    made = command(main, "single-layer", *asked, "--quiet", "--noise-floor", "stats", *options)
    assert made.exit_code == 0, made.output
    assert Capture.open(tmp_path / "capture").description.floor_variants == names


@pytest.mark.parametrize(
    "options", [("--noise-floor", "off"), ("--dtype", "float32"), ("--no-save",)], ids=str
)
def test_without_a_floor_there_is_nothing_to_widen(toy: Path, command: Any, options: tuple[str, ...]) -> None:
    refused = command(main, "single-layer", "--model", toy, "--layer", 0, "--floor-variants", 2, *options)
    assert refused.exit_code == 2
    assert "--floor-variants widens the noise floor" in refused.stderr
    assert " ".join(options) in refused.stderr


@pytest.fixture
def tampered(varied: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(varied, tmp_path / "copy"))


def certify(command: Any, directory: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the check of the variants."""
    result = command(main, "certify", "--golden", directory, "--json", "--quiet")
    checks = json.loads(result.stdout)["certificate"]["checks"]
    return result.exit_code, next(check for check in checks if check["name"] == "floor_variants")


def change(directory: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "layer_1.floor.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    how(tensors)
    path.unlink()
    save_file(tensors, path)
    sign(directory)


def test_right_variants_pass(tampered: Path, command: Any) -> None:
    _, check = certify(command, tampered)
    assert check["outcome"] == "passed"
    assert "widen the floor up to 1." in check["found"]


@pytest.mark.parametrize("factor", [30.0, float("nan")])
def test_variant_that_strays_too_far_fails(tampered: Path, command: Any, factor: float) -> None:
    name = variant_name("nearest", error_name(Site.MOE_DELTA))
    change(tampered, lambda tensors: tensors[name].mul_(factor))
    code, check = certify(command, tampered)
    assert (code, check["outcome"]) == (1, "failed")
    assert "at moe_delta of layer 1 (nearest)" in check["found"]


def test_variant_that_is_missing_fails(tampered: Path, command: Any) -> None:
    change(tampered, lambda tensors: tensors.pop(variant_name("random_1", error_name(Site.OUTPUT))))
    _, check = certify(command, tampered)
    assert check["outcome"] == "failed"
    assert "holds no random_1/output.error" in check["found"]
