"""A streamed golden is the golden of a model loaded whole, byte for byte."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import FEW, STREAMED, capture, contents, interrupt, streams

from gpu_reference.cli import main
from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.span import Span
from minimax_tools.model.weight_names import layer_prefix
from minimax_tools.text.input_request import InputRequest

STREAMS = streams("cpu")


def bytes_of(request: GoldenRequest, directory: Path) -> dict[str, bytes]:
    return contents(capture(request, directory).directory)


def count_bytes(request: GoldenRequest, directory: Path) -> int:
    """Bytes of tensors that the capture reads."""
    with open_golden(request) as golden:
        reader: CheckpointReader = golden.reader
        golden.capture(directory, extra={})
        return reader.num_bytes_read


OPTIONS: dict[str, dict[str, Any]] = {
    **STREAMED,
    "single": {"run": single_layer_run(2, sites_level="component"), "noise_floor": "full"},
    "multi": {"run": multi_layer_run(Span(1, 3), sites_level="layer")},
    "default": {"inputs": InputRequest(max_length=24), "noise_floor": "full"},
}
# Each of them once, as one of both ways reads.
FAST = {
    *(("floor", "alone"), ("eager", "prefetching"), ("float32", "prefetching")),
    *(("single", "alone"), ("multi", "prefetching"), ("few", "prefetching")),
    ("default", "alone"),
}


@pytest.mark.parametrize(
    ("options", "streaming"),
    [
        pytest.param(
            options, streaming, id=f"{name}-{way}", marks=() if (name, way) in FAST else pytest.mark.slow
        )
        for name, options in OPTIONS.items()
        for way, streaming in STREAMS.items()
    ],
)
def test_streamed_capture_has_the_bytes_of_the_whole_one(
    ask: Any, tmp_path: Path, options: dict[str, Any], streaming: Streaming
) -> None:
    request = ask(**options)
    whole = bytes_of(request, tmp_path / "whole")
    assert bytes_of(replace(request, streaming=streaming), tmp_path / "streamed") == whole


@pytest.mark.parametrize("inputs", [None, FEW], ids=["many", "few"])
def test_packed_experts_give_the_bytes_of_eager_ones(ask: Any, tmp_path: Path, inputs: Any) -> None:
    request = ask(experts_implementation="eager", noise_floor="full", inputs=inputs)
    whole = bytes_of(request, tmp_path / "whole")
    packed = Streaming(device=torch.device("cpu"), packed=True)
    assert bytes_of(replace(request, streaming=packed), tmp_path / "packed") == whole


def test_stream_reads_every_layer_once_and_the_embeddings_rows_of_its_tokens(
    ask: Any, tmp_path: Path
) -> None:
    request = ask(noise_floor="full", streaming=STREAMS["prefetching"])
    with CheckpointReader(request.model.folder) as reader:
        embedding = reader.index["model.embed_tokens.weight"]
        stored = sum(entry.size_bytes for entry in reader.index.entries.values()) - embedding.size_bytes
        stored += len(request.inputs.input_ids.unique()) * embedding.narrow_rows(0, 1).size_bytes
        first = sum(
            reader.index[name].size_bytes
            for name in reader.index.layer_names(0)
            if ".experts." not in name or ".experts.0." in name or ".experts.31." in name
        )
        told_apart_by = sum(
            entry.size_bytes
            for name, entry in reader.index.entries.items()
            if name.endswith(("norm.weight", ".gate.weight", "correction_bias"))
        )
    # The first layer is proved: attention, router and two of its experts are read again for that. And norms and
    # router of every layer tell the model from others.
    num_bytes = count_bytes(request, tmp_path / "streamed")
    assert stored <= num_bytes <= stored + first + told_apart_by


def test_few_tokens_read_only_the_experts_they_are_routed_to(ask: Any, tmp_path: Path) -> None:
    request = ask(inputs=FEW, streaming=STREAMS["alone"])
    num_bytes = count_bytes(request, tmp_path / "few")
    with CheckpointReader(request.model.folder) as reader:
        sizes = {
            name: entry.size_bytes for name, entry in reader.index.entries.items() if "embed" not in name
        }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts
    # Six positions of four experts each are 24 of 32 at most.
    assert others < num_bytes <= others + experts * 24 / 32


def test_resumed_stream_reads_no_finished_layer_again(ask: Any, tmp_path: Path) -> None:
    request = ask(noise_floor="full", streaming=STREAMS["alone"])
    whole = bytes_of(request, tmp_path / "whole")
    interrupt(request, tmp_path / "killed", after=2)
    with open_golden(request) as golden:
        golden.capture(tmp_path / "killed", extra={})
        num_bytes = golden.reader.num_bytes_read
        later = sum(
            golden.reader.index[name].size_bytes
            for name in golden.reader.index.names
            if not name.startswith((layer_prefix(0), layer_prefix(1)))
        )
    assert contents(tmp_path / "killed") == whole
    proof = later // 4
    assert num_bytes <= later + proof


def test_generation_of_a_stream_is_that_of_the_whole_model(toy: Path, tmp_path: Path, command: Any) -> None:
    arguments = ["full", "--model", toy, "--seq-len", "9", "--max-new-tokens", "3", "--quiet"]
    for mode in ("on", "off"):
        result = command(main, *arguments, "--stream", mode, "--output-dir", tmp_path / mode)
        assert result.exit_code == 0, result.output
    assert contents(tmp_path / "on") == contents(tmp_path / "off")


def test_damaged_shard_of_a_coming_layer_ends_the_run_by_name(ask: Any, toy: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in toy.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    request = ask(folder=damaged, streaming=STREAMS["prefetching"])
    with open_golden(request) as golden:
        entry = golden.reader.index[f"{layer_prefix(3)}block_sparse_moe.experts.7.w1.weight"]
        os.truncate(entry.file, entry.offset + 5)
        with pytest.raises(CheckpointError, match="cannot be read"):
            golden.capture(tmp_path / "capture", extra={})


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--stream", "on", "--offload-folder", "off"], 2, "--stream on runs every layer on one device"),
        (["--packed-experts"], 2, "Add --experts-implementation eager"),
        (["--packed-experts", "--experts-implementation", "eager"], 2, "need an FP8 checkpoint"),
        (["--stream", "on", "--memory-budget", "200MB"], 3, "would break the memory budget"),
        (["--stream", "off", "--memory-budget", "200MB"], 3, "loading the model whole would break"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    toy_bf16: Path, tmp_path: Path, command: Any, arguments: list[str], code: int, message: str
) -> None:
    common = ["extract-all", "--model", toy_bf16, "--seq-len", "8", "--output-dir", tmp_path / "capture"]
    result = command(main, *common, *arguments)
    assert result.exit_code == code
    assert message in result.stderr


@pytest.mark.parametrize(("limit", "is_streamed"), [("10MB", True), ("4GB", False)])
def test_auto_streams_what_does_not_fit_and_says_why(
    toy: Path, tmp_path: Path, command: Any, limit: str, is_streamed: bool
) -> None:
    common = ["--model", toy, "--seq-len", "8", "--noise-floor", "off", "--captures", tmp_path]
    result = command(main, "extract-all", *common, "--max-memory", limit)
    assert result.exit_code == 0
    assert ("Streaming a layer at a time: the whole model takes" in result.stderr) == is_streamed
    assert ("Loading 4 layers" in result.stderr) != is_streamed


def test_bfloat16_checkpoint_streams_to_the_same_bytes(ask: Any, toy_bf16: Path, tmp_path: Path) -> None:
    request = ask(folder=toy_bf16, noise_floor="full")
    whole = bytes_of(request, tmp_path / "whole")
    assert bytes_of(replace(request, streaming=STREAMS["alone"]), tmp_path / "streamed") == whole
