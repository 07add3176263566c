from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import Golden, GoldenRequest, open_golden
from gpu_reference.golden.golden_writer import skipping_layers
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import multi_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span

ALONE = Streaming(device=torch.device("cpu"), prefetch=False)


def refuse_to_run(*_: object) -> None:
    raise AssertionError("a layer ran that was to stand aside")


@pytest.fixture(scope="module")
def golden(ask: Any) -> Iterator[Golden]:
    with open_golden(ask()) as golden:
        yield golden


class StoppedError(Exception):
    pass


class StopAfter:
    """Ends a run when so many layers are written; notes which were passed by."""

    def __init__(self, num_layers: int) -> None:
        self.left = num_layers
        self.passed: list[int] = []

    def advance(self, layer: int, *, num_bytes: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise StoppedError

    def skip(self, layer: int) -> None:
        self.passed.append(layer)


def interrupt(request: GoldenRequest, directory: Path, *, after: int) -> None:
    with open_golden(request) as golden, pytest.raises(StoppedError):
        golden.capture(directory, extra={}, progress=StopAfter(after))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("num_layers", [0, 1, 3, 4])
def test_logits_behind_skipped_layers_are_those_of_the_whole_pass(golden: Golden, num_layers: int) -> None:
    outputs: dict[int, torch.Tensor] = {}
    layers = [golden.model.get_submodule(f"model.layers.{layer}") for layer in range(4)]
    handles = [
        layer.register_forward_hook(lambda _, __, output, number=number: outputs.update({number: output}))
        for number, layer in enumerate(layers)
    ]
    plain = golden.forward()
    for handle in handles:
        handle.remove()
    handles = [layer.register_forward_pre_hook(refuse_to_run) for layer in layers[:num_layers]]
    try:
        with skipping_layers(golden.model, num_layers, outputs.get(num_layers - 1)):
            assert torch.equal(golden.forward(), plain)
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(golden.forward(), plain)


@pytest.fixture(scope="module")
def plain(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A streamed capture that nothing interrupted."""
    directory = tmp_path_factory.mktemp("plain") / "full_model"
    with open_golden(ask(streaming=ALONE, noise_floor="stats")) as golden:
        golden.capture(directory, extra={})
    return directory


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_run_resumed_after_any_layer_passes_by_what_is_written(
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
    ask: Any, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    request = ask(streaming=ALONE, noise_floor="stats")
    interrupt(request, tmp_path / "killed", after=2)
    file = tmp_path / "killed/layer_1.safetensors"
    content = file.read_bytes()
    if damage == "flip":
        output = Capture.open(tmp_path / "killed").read(1, Site.OUTPUT).contiguous()
        at = content.index(output.view(torch.uint8).numpy().tobytes()) + 11
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    elif damage == "truncate":
        file.write_bytes(content[:-3])
    else:
        file.unlink()
    with caplog.at_level("INFO"), open_golden(request) as golden:
        golden.capture(tmp_path / "killed", extra={})
    assert "Starting anew" in caplog.text
    assert "a stored tensor does not match its digest" in caplog.text
    assert contents(tmp_path / "killed") == contents(plain)
