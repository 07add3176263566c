from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import StopAfter, capture, contents, interrupt, refuse_to_run

from gpu_reference.cli import main
from gpu_reference.golden.golden import open_golden
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.text.input_request import InputRequest

ALONE = Streaming(device=torch.device("cpu"), prefetch=False)
slow = partial(pytest.param, marks=pytest.mark.slow)

# The golden that the command below makes, stopped by a signal when layer 2 begins.
KILLED = """
import os, signal, sys
from pathlib import Path
import gpu_reference.golden.golden as golden_module
from gpu_reference.cli import main

class Golden(golden_module.Golden):
    def forward(self, *states, **options):
        layer = self.model.get_submodule("model.layers.2")
        layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return super().forward(*states, **options)

golden_module.Golden = Golden
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def whole(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that nothing interrupted, its floor kept whole."""
    directory = tmp_path_factory.mktemp("whole") / "full_model"
    capture(ask(noise_floor="full"), directory)
    return directory


def test_capture_directory_has_the_layout_of_the_design(whole: Path) -> None:
    parts = ("model", *(f"layer_{layer}" for layer in range(4)))
    files = {f"{part}{kind}.safetensors" for part in parts for kind in ("", ".fp32", ".floor")}
    assert {path.name for path in whole.iterdir()} == {"manifest.json", "inputs.safetensors", *files}
    # An input is stored only where it is no output before it.
    entries = Capture.open(whole).manifest.entries
    assert [entry.layer for entry in entries if entry.site == "input"] == [0]


def test_manifest_holds_no_path_of_the_machine(whole: Path, toy: Path) -> None:
    text = (whole / "manifest.json").read_text()
    assert str(whole.parent) not in text
    assert str(toy) not in text


def test_fp8_and_bfloat16_copies_give_equal_captures_and_fingerprints(
    ask: Any, whole: Path, toy_bf16: Path, tmp_path: Path
) -> None:
    # The request names its model alike, so that the manifests may be equal too, but for the config that they record.
    copy = capture(ask(folder=toy_bf16, noise_floor="full"), tmp_path / "bf16")
    mine, theirs = contents(copy.directory), contents(whole)
    manifests = [json.loads(files.pop("manifest.json")) for files in (mine, theirs)]
    configs = [manifest["provenance"].pop("model_config") for manifest in manifests]
    assert mine == theirs
    assert manifests[0] == manifests[1]
    assert [bool(config.get("quantization_config")) for config in configs] == [False, True]
    assert copy.description.provenance.model == Capture.open(whole).description.provenance.model


def test_manifest_says_what_made_the_capture(ask: Any, whole: Path) -> None:
    description = Capture.open(whole).description
    made = description.provenance
    assert description.side == "gpu_reference"
    assert description.noise_floor == "full"
    assert description.inputs_digest == ask().inputs.digest()
    assert (made.backend, made.target) == ("cpu", "transformers")
    assert made.dtypes == {"weights": "bfloat16", "router_gate": "float32", "correction_bias": "float32"}
    assert made.options == {
        "attn_implementation": "sdpa",
        "experts_implementation": "grouped_mm",
        "float32_matmul": "ieee",
        "bfloat16_reduction": False,
        "proved": ["no_fp8_arithmetic", "rotary_width", "float32_router", "weights_match_checkpoint"],
    }
    assert {"python", "torch", "transformers", "accelerate", "safetensors"} <= made.versions.keys()
    assert sorted(made.model.layers) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("run", "layers"),
    [
        (single_layer_run(2, sites_level="all"), (2,)),
        (multi_layer_run(Span(1, 3), sites_level="all"), (1, 2)),
    ],
)
def test_part_of_the_model_is_captured_with_the_bits_of_the_whole(
    ask: Any, whole: Path, tmp_path: Path, run: Any, layers: tuple[int, ...]
) -> None:
    part, reference = capture(ask(run=run), tmp_path / "part"), Capture.open(whole)
    assert part.layers == layers
    assert part.model_sites() == ()
    for layer in layers:
        assert part.sites(layer) == ModelGraph().sites
        for site in ModelGraph().sites:
            assert torch.equal(part.read(layer, site), reference.read(layer, site)), site
    first_file = json.loads((part.directory / "manifest.json").read_text())["entries"][0]
    assert (first_file["layer"], first_file["site"]) == (layers[0], "input")


@pytest.mark.usefixtures("as_in_forks")
def test_killed_capture_resumes_to_the_same_bytes(
    toy: Path, tmp_path: Path, command: Any, forked_python: Any, golden_modules: tuple[str, ...]
) -> None:
    arguments = ("extract-all", "--model", toy, "--max-length", 24, "--floor-variants", 0, "--output-dir")
    killed = forked_python(KILLED, *arguments, tmp_path / "killed", modules=golden_modules)
    assert killed.returncode == -9, killed.stderr
    assert Capture.open(tmp_path / "killed").layers == (0, 1)
    resumed = command(main, *arguments, tmp_path / "killed")
    assert resumed.exit_code == 0
    assert f"Resuming {tmp_path / 'killed'} after layer 1." in resumed.stderr
    assert "Layer 1 of" not in resumed.stderr
    command(main, *arguments, tmp_path / "plain")
    assert contents(tmp_path / "killed") == contents(tmp_path / "plain")


@pytest.fixture(scope="module")
def unfinished(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that an error has ended after layer 0."""
    directory = tmp_path_factory.mktemp("unfinished") / "full_model"
    interrupt(ask(), directory, after=1)
    return directory


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--attn-implementation", "eager"], "options.attn_implementation"),
        (["--padding-side", "left"], "inputs_digest"),
        (["--noise-floor", "stats"], "floor_variants, noise_floor"),
        slow(["--experts-implementation", "eager"], "options.experts_implementation"),
        slow(["--seed", "1"], "input_source, inputs_digest"),
        slow(["--sites", "layer"], "run.sites"),
    ],
)
def test_other_options_start_anew_and_say_why(
    unfinished: Path, toy: Path, tmp_path: Path, command: Any, options: list[str], reason: str
) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    arguments = ["--seq-len", "24,15", "--output-dir", tmp_path, "--noise-floor", "off"]
    result = command(main, "extract-all", "--model", toy, *arguments, *options)
    assert result.exit_code == 0
    reasons = result.stderr.partition("the capture there has other ")[2].partition(".\n")[0].split(", ")
    # The unfinished one names its model otherwise than the command does.
    assert set(reason.split(", ")) <= set(reasons) <= {*reason.split(", "), "model_source"}
    assert Capture.open(tmp_path).manifest.is_complete


def test_capture_interrupted_after_its_layers_needs_no_second_forward(ask: Any, tmp_path: Path) -> None:
    request = ask(run=single_layer_run(1, sites_level="layer"))
    with open_golden(request) as golden:
        # JSON knows no set: the run ends between its layers and its end.
        with pytest.raises(TypeError, match="set is not JSON"):
            golden.capture(tmp_path, extra={"generation.json": {1}})
        assert Capture.open(tmp_path).layers == (1,)
        golden.model.get_submodule("model.layers.0").register_forward_pre_hook(refuse_to_run)
        golden.capture(tmp_path, extra={})
    assert Capture.open(tmp_path).manifest.is_complete


@pytest.mark.parametrize("side", ["left", slow("right")])
def test_padding_does_not_change_a_row(ask: Any, tmp_path: Path, side: str) -> None:
    rows = ("5,6,7,8,9,10,11,12", "40,41,42")
    padded = InputRequest(input_ids=rows, padding_side=side, pad_to=(16,))
    run = multi_layer_run(Span(0, 2), sites_level="layer")
    # In float32, where no rounding can turn a router's choice.
    both = capture(ask(inputs=padded, dtype=torch.float32, run=run), tmp_path / "both")
    real = both.read_attention_mask().bool()
    assert real.shape == (2, 16)
    for row, ids in enumerate(rows):
        request = ask(inputs=InputRequest(input_ids=(ids,)), dtype=torch.float32, run=run)
        alone = capture(request, tmp_path / f"alone_{row}")
        for layer in run.span:
            mine, theirs = both.read(layer, Site.OUTPUT)[row][real[row]], alone.read(layer, Site.OUTPUT)[0]
            assert mine.shape == theirs.shape
            assert float((mine - theirs).norm() / theirs.norm()) < 1e-5


@pytest.fixture(scope="module")
def plain(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A streamed capture that nothing interrupted."""
    directory = tmp_path_factory.mktemp("plain") / "full_model"
    return capture(ask(streaming=ALONE, noise_floor="stats"), directory).directory


@pytest.fixture(scope="module")
def half(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, ended after layer 1."""
    directory = tmp_path_factory.mktemp("half") / "full_model"
    interrupt(ask(streaming=ALONE, noise_floor="stats"), directory, after=2)
    return directory


@pytest.mark.parametrize("after", [1, 3, 4])
def test_streamed_run_resumed_after_any_layer_passes_by_what_is_written(
    ask: Any, plain: Path, tmp_path: Path, after: int
) -> None:
    request = ask(streaming=ALONE, noise_floor="stats")
    interrupt(request, tmp_path / "killed", after=after)
    progress = StopAfter(100)
    with open_golden(request) as golden:
        for layer in range(after):
            golden.model.get_submodule(f"model.layers.{layer}").register_forward_pre_hook(refuse_to_run)
        golden.capture(tmp_path / "killed", extra={}, progress=progress)
    assert progress.passed == list(range(after))
    assert contents(tmp_path / "killed") == contents(plain)


def test_run_in_mid_model_resumes_without_the_layers_before_its_span(ask: Any, tmp_path: Path) -> None:
    request = ask(run=multi_layer_run(Span(1, 4), sites_level="layer"), streaming=ALONE)
    interrupt(request, tmp_path, after=1)
    with open_golden(request) as golden:
        for layer in (0, 1):
            golden.model.get_submodule(f"model.layers.{layer}").register_forward_pre_hook(refuse_to_run)
        golden.capture(tmp_path, extra={})
    assert Capture.open(tmp_path).layers == (1, 2, 3)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_last_layer_is_not_resumed_from(
    ask: Any, plain: Path, half: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    killed = Path(shutil.copytree(half, tmp_path / "killed"))
    file = killed / "layer_1.safetensors"
    content = file.read_bytes()
    if damage == "flip":
        output = Capture.open(killed).read(1, Site.OUTPUT).contiguous()
        at = content.index(output.view(torch.uint8).numpy().tobytes()) + 11
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "truncate":
        file.write_bytes(content[:-3])
    else:
        file.unlink()
    with caplog.at_level("INFO"):
        capture(ask(streaming=ALONE, noise_floor="stats"), killed)
    assert "Starting anew" in caplog.text
    assert "a stored tensor does not match its digest" in caplog.text
    assert contents(killed) == contents(plain)
