"""Tests that need a CUDA device."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import STREAMED, capture, present, streams

from gpu_reference.cli import main
from gpu_reference.golden.golden import open_golden
from gpu_reference.model.placement import Placement
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.text.input_request import InputRequest

pytestmark = pytest.mark.gpu

ON_GPU = Placement(device_map={"": "cuda:0"})
STREAMS = streams("cuda:0")


def tensor_files(capture: Capture) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in capture.directory.glob("*.safetensors")}


@pytest.fixture(scope="module")
def on_gpu(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """The golden of a model that lies on one GPU whole."""
    return capture(ask(placement=ON_GPU, noise_floor="full"), tmp_path_factory.mktemp("gpu") / "full_model")


def test_gpu_is_described_by_name_memory_modules_and_use(toy: Path, tmp_path: Path, command: Any) -> None:
    arguments = ["single-layer", "--layer", 1, "--model", toy, "--seq-len", 8, "--output-dir", tmp_path]
    result = command(main, *arguments, "--device-map", "cuda:0")
    name = re.escape(torch.cuda.get_device_name(0))
    assert re.search(rf"cuda:0 {name}, [\d.]+ GB: the whole model; [\d.]+ GB in use", result.stderr)
    assert "No GPU here" not in result.stderr


def test_fp8_checkpoint_is_dequantised_on_the_gpu_too(
    ask: Any, toy_bf16: Path, on_gpu: Capture, tmp_path: Path
) -> None:
    copy = capture(ask(folder=toy_bf16, placement=ON_GPU, noise_floor="full"), tmp_path)
    assert tensor_files(copy) == tensor_files(on_gpu)


def test_gpu_and_cpu_agree_to_the_rounding_of_bfloat16(ask: Any, on_gpu: Capture, tmp_path: Path) -> None:
    on_cpu = capture(ask(), tmp_path)
    real = on_cpu.read_attention_mask().bool()
    for site in (Site.INPUT_NORM, Site.Q_PROJ, Site.V_PROJ, Site.ATTN_CONTEXT, Site.ATTN_RESIDUAL):
        mine, theirs = on_gpu.read(0, site)[real].double(), on_cpu.read(0, site)[real].double()
        assert float((mine - theirs).norm() / theirs.norm()) < 0.01, site


def test_twin_on_the_gpu_is_float32_not_tf32(ask: Any, on_gpu: Capture, tmp_path: Path) -> None:
    on_cpu = capture(ask(noise_floor="full"), tmp_path)
    real = on_cpu.read_attention_mask().bool()
    mine, theirs = (present(one.read_twin(0, Site.ATTN_DELTA)) for one in (on_gpu, on_cpu))
    assert float((mine[real] - theirs[real]).norm() / theirs[real].norm()) < 1e-5


def split(layers: Sequence[int | str], *, norm: int, head: int | str, **options: Any) -> Placement:
    """Place each layer on its device, the embedding on the first GPU."""
    device_map: dict[str, int | str] = {"model.embed_tokens": 0}
    device_map |= {f"model.layers.{layer}": where for layer, where in enumerate(layers)}
    device_map |= {"model.norm": norm, "model.rotary_emb": 0, "lm_head": head}
    return Placement(device_map=device_map, **options)


@pytest.mark.parametrize("elsewhere", ["cpu", "disk"])
def test_offloaded_layers_are_computed_on_the_gpu_with_the_same_bits(
    ask: Any, on_gpu: Capture, tmp_path: Path, elsewhere: str
) -> None:
    placement = split(
        [0, elsewhere, 0, elsewhere], norm=0, head=elsewhere, offload_folder=tmp_path / "offload"
    )
    made = capture(ask(placement=placement, noise_floor="full"), tmp_path / "capture")
    assert tensor_files(made) == tensor_files(on_gpu)
    assert made.description.provenance.backend == "cuda"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs")
def test_model_split_over_two_gpus_captures_the_same_bits(ask: Any, on_gpu: Capture, tmp_path: Path) -> None:
    placement = split([0, 0, 1, 1], norm=1, head=1)
    made = capture(ask(placement=placement, noise_floor="full"), tmp_path)
    assert tensor_files(made) == tensor_files(on_gpu)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash_attn is not installed")
def test_recording_leaves_flash_attention_bit_equal(ask: Any, tmp_path: Path) -> None:
    request = ask(placement=ON_GPU, attn_implementation="flash_attention_2")
    with open_golden(request) as golden:
        plain = golden.forward()
        golden.capture(tmp_path, extra={})
        assert torch.equal(golden.forward(), plain)
    assert Capture.open(tmp_path).sites(0) == ModelGraph().sites


@pytest.mark.parametrize("streaming", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("options", STREAMED.values(), ids=STREAMED)
def test_stream_over_the_gpu_has_the_bytes_of_the_model_on_it(
    ask: Any, tmp_path: Path, options: dict[str, Any], streaming: Streaming
) -> None:
    whole = capture(ask(placement=ON_GPU, **options), tmp_path / "whole")
    streamed = capture(ask(placement=ON_GPU, streaming=streaming, **options), tmp_path / "streamed")
    assert tensor_files(streamed) == tensor_files(whole)
    manifests = [(made.directory / "manifest.json").read_bytes() for made in (streamed, whole)]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("lengths", [(24, 15), (3,)], ids=["many", "few"])
def test_packed_experts_on_the_gpu_have_the_bytes_of_eager_ones(
    ask: Any, tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    inputs = InputRequest(seq_lens=lengths)
    options = {"inputs": inputs, "experts_implementation": "eager", "noise_floor": "full"}
    packed = Streaming(device=torch.device("cuda:0"), packed=True)
    whole = capture(ask(placement=ON_GPU, **options), tmp_path / "whole")
    assert tensor_files(capture(ask(streaming=packed, **options), tmp_path / "packed")) == tensor_files(whole)


def test_stream_holds_one_layer_or_two_on_the_gpu(ask: Any, tmp_path: Path) -> None:
    peaks = {}
    for name, streaming in STREAMS.items():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        request = ask(streaming=streaming, inputs=InputRequest(seq_lens=(8,)))
        capture(request, tmp_path / name)
        peaks[name] = torch.cuda.max_memory_allocated() - before
        torch.cuda.synchronize()
        # cuBLAS keeps its workspace; no layer stays.
        assert torch.cuda.memory_allocated() - before < 5 * request.footprint.layer_bytes
    layer = ask().footprint.layer_bytes
    assert peaks["prefetching"] - peaks["alone"] == pytest.approx(layer, rel=0.2)
