from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from goldens import StopAfter, capture, contents, interrupt, refuse_to_run

from gpu_reference.golden.golden import open_golden
from gpu_reference.streaming.streaming import Streaming
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import multi_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span

ALONE = Streaming(device=torch.device("cpu"), prefetch=False)


@pytest.fixture(scope="module")
def plain(ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A streamed capture that nothing interrupted."""
    directory = tmp_path_factory.mktemp("plain") / "full_model"
    return capture(ask(streaming=ALONE, noise_floor="stats"), directory).directory


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
    with caplog.at_level("INFO"):
        capture(request, tmp_path / "killed")
    assert "Starting anew" in caplog.text
    assert "a stored tensor does not match its digest" in caplog.text
    assert contents(tmp_path / "killed") == contents(plain)
