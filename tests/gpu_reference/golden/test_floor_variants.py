"""`--floor-variants`: the same golden, bit for bit, whose floor knows what other right ways to compute it cost."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import sign
from goldens import capture, contents

from gpu_reference.cli import main
from gpu_reference.golden.golden import GoldenRequest
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.metrics.noise_floor import ROUTER_NOISE, error_name, variant_name
from minimax_tools.model.run import multi_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span

CPU = torch.device("cpu")
NAMES = ("nearest", "random_1")
TWO_LAYERS = multi_layer_run(Span(0, 2), sites_level="all")


@pytest.fixture(scope="module")
def request_two(ask: Any) -> GoldenRequest:
    request: GoldenRequest = replace(ask(run=TWO_LAYERS, noise_floor="full"), floor_variants=NAMES)
    return request


@pytest.fixture(scope="module")
def varied(request_two: GoldenRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("varied") / "capture"
    capture(request_two, directory)
    return directory


def test_captured_tensors_and_twins_are_those_of_a_golden_without(
    request_two: GoldenRequest, varied: Path, tmp_path: Path
) -> None:
    plain = contents(capture(replace(request_two, floor_variants=()), tmp_path / "plain").directory)
    mine = contents(varied)
    assert mine.keys() == plain.keys()
    differing = {name for name in mine if mine[name] != plain[name]}
    assert differing == {MANIFEST_NAME, "layer_0.floor.safetensors", "layer_1.floor.safetensors"}
    assert b"floor_variants" not in plain[MANIFEST_NAME]
    before, after = (
        load_file(folder / "layer_1.floor.safetensors") for folder in (tmp_path / "plain", varied)
    )
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_manifest_names_the_variants_and_the_floor_holds_each(varied: Path) -> None:
    golden = Capture.open(varied)
    assert golden.description.floor_variants == NAMES
    real = golden.read_attention_mask().bool()
    for layer in golden.layers:
        for name in NAMES:
            noise = golden.read_floor(layer, variant_name(name, ROUTER_NOISE))
            assert noise is not None
            for site in (Site.ATTN_DELTA, Site.MOE_DELTA, Site.ROUTER_WEIGHTS):
                own = golden.read_floor(layer, error_name(site))
                error = golden.read_floor(layer, variant_name(name, error_name(site)))
                assert own is not None
                assert error is not None
                assert 0.7 < float(error[real].norm() / own[real].norm()) < 1.6
                assert not error[~real].any()


@pytest.mark.parametrize(
    "streaming",
    [Streaming(device=CPU, prefetch=False), Streaming(device=CPU, prefetch=True)],
    ids=["alone", "prefetching"],
)
def test_streamed_capture_has_the_bytes_of_the_whole_one(
    request_two: GoldenRequest, varied: Path, tmp_path: Path, streaming: Streaming
) -> None:
    request = replace(request_two, streaming=streaming)
    assert contents(capture(request, tmp_path / "streamed").directory) == contents(varied)


class TestCommand:
    @pytest.mark.parametrize(
        ("options", "names"),
        [((), NAMES), (("--floor-variants", 3), (*NAMES, "random_2")), (("--floor-variants", 0), ())],
        ids=["default", "three", "none"],
    )
    def test_option_says_how_many(
        self, toy: Path, tmp_path: Path, command: Any, options: tuple[Any, ...], names: tuple[str, ...]
    ) -> None:
        asked = ("--model", toy, "--layer", 0, "--seq-len", 5, "--output-dir", tmp_path / "capture")
        made = command(main, "single-layer", *asked, "--quiet", "--noise-floor", "stats", *options)
        assert made.exit_code == 0, made.output
        assert Capture.open(tmp_path / "capture").description.floor_variants == names

    @pytest.mark.parametrize(
        "options", [("--noise-floor", "off"), ("--dtype", "float32"), ("--no-save",)], ids=str
    )
    def test_without_a_floor_there_is_nothing_to_widen(
        self, toy: Path, command: Any, options: tuple[str, ...]
    ) -> None:
        refused = command(main, "single-layer", "--model", toy, "--layer", 0, "--floor-variants", 2, *options)
        assert refused.exit_code == 2
        assert "--floor-variants widens the noise floor" in refused.stderr
        assert " ".join(options) in refused.stderr


class TestCertified:
    @pytest.fixture
    def copy(self, varied: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(varied, tmp_path / "copy"))

    def check(self, command: Any, directory: Path) -> dict[str, Any]:
        result = command(main, "certify", "--golden", directory, "--json", "--quiet")
        checks = json.loads(result.stdout)["certificate"]["checks"]
        return {"exit": result.exit_code, **{check["name"]: check for check in checks}}

    def change(self, directory: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        path = directory / "layer_1.floor.safetensors"
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        if how is None:
            del tensors[name]
        else:
            tensors[name] = how(tensors[name])
        path.unlink()
        save_file(tensors, path)
        sign(directory)

    def test_right_variants_pass(self, copy: Path, command: Any) -> None:
        found = self.check(command, copy)["floor_variants"]
        assert found["outcome"] == "passed"
        assert "widen the floor up to 1." in found["found"]

    @pytest.mark.parametrize("factor", [30.0, float("nan")])
    def test_variant_that_strays_too_far_fails(self, copy: Path, command: Any, factor: float) -> None:
        name = variant_name("nearest", error_name(Site.MOE_DELTA))
        self.change(copy, name, lambda error: error * factor)
        checks = self.check(command, copy)
        assert checks["exit"] == 1
        assert checks["floor_variants"]["outcome"] == "failed"
        assert "at moe_delta of layer 1 (nearest)" in checks["floor_variants"]["found"]

    def test_variant_that_is_missing_fails(self, copy: Path, command: Any) -> None:
        self.change(copy, variant_name("random_1", error_name(Site.OUTPUT)), None)
        checks = self.check(command, copy)
        assert checks["floor_variants"]["outcome"] == "failed"
        assert "holds no random_1/output.error" in checks["floor_variants"]["found"]
