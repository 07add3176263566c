from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimax_tools.capture.passes import PASSES_NAME, LogitsForm, ModelPasses, cache_file
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.writer import open_capture
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import encode
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import model_run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span


@pytest.fixture
def capture(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Capture:
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        for layer in range(3):
            writer.write(layer, layer_of(layer))
        writer.finish()
    return Capture.open(tmp_path)


def test_input_of_a_chained_layer_is_the_output_before_it(capture: Capture) -> None:
    assert capture.sites(2) == (Site.INPUT, Site.OUTPUT)
    assert torch.equal(capture.read(2, Site.INPUT), capture.read(1, Site.OUTPUT))
    assert not torch.equal(capture.read(0, Site.INPUT), capture.read(0, Site.OUTPUT))


def test_input_of_an_isolated_layer_is_its_own_or_none(
    describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    run = sweep_run(Span(0, 3), sites_level="layer")
    with open_capture(tmp_path / "sweep", describe(run=run), inputs=inputs) as writer:
        for layer in range(3):
            writer.write(layer, layer_of(layer))
    capture = Capture.open(tmp_path / "sweep")
    assert capture.sites(1) == (Site.OUTPUT,)
    with pytest.raises(CaptureError, match="holds no input of layer 1"):
        capture.read(1, Site.INPUT)


def test_as_many_heads_as_tokens_are_read_as_the_golden_has_them(
    describe: Any, inputs: Inputs, tmp_path: Path
) -> None:
    num_rows, num_tokens = inputs.batch_shape
    right = torch.randn(num_rows, num_tokens, num_tokens, 5)
    for name, heads in (("golden", right), ("run", (right + 0.01).transpose(1, 2).contiguous())):
        with open_capture(
            tmp_path / name, describe(run=sweep_run(Span(0, 1), sites_level="all")), inputs=inputs
        ) as writer:
            writer.write(0, {Site.Q_ROPE: heads})
    golden, run = (Capture.open(tmp_path / name) for name in ("golden", "run"))
    assert torch.equal(run.beside(golden).read(0, Site.Q_ROPE), right + 0.01)
    assert torch.equal(golden.beside(golden).read(0, Site.Q_ROPE), right)


@pytest.mark.parametrize(("layer", "site"), [(0, Site.Q_PROJ), (3, Site.OUTPUT), (4, Site.INPUT)])
def test_site_that_was_not_captured_is_an_error(capture: Capture, layer: int, site: Site) -> None:
    with pytest.raises(CaptureError, match=f"holds no {site} of layer {layer}. Capture it with --sites all"):
        capture.read(layer, site)


def test_inputs_come_back_with_their_digest_and_source(capture: Capture, inputs: Inputs) -> None:
    read = capture.read_inputs()
    assert read.digest() == inputs.digest()
    assert read.source == inputs.source
    assert torch.equal(capture.read_attention_mask(), inputs.attention_mask)
    assert capture.read_hidden_states() is None


def test_capture_without_a_floor_has_none(capture: Capture) -> None:
    assert not capture.has_floor
    assert capture.read_twin(0, Site.OUTPUT) is None
    assert capture.read_floor(0, "router_margin") is None
    assert capture.read_twin(None, ModelSite.LOGITS) is None
    assert capture.read_floor(None, "logits.error") is None


def test_floor_that_is_promised_and_missing_is_an_error(
    describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    with open_capture(tmp_path / "full", describe(noise_floor="full"), inputs=inputs) as writer:
        writer.write(0, layer_of(0), twin={}, floor={})
    capture = Capture.open(tmp_path / "full")
    with pytest.raises(CaptureError, match=r"layer_0\.fp32\.safetensors holds no tensor 'output' of layer 0"):
        capture.read_twin(0, Site.OUTPUT)
    (tmp_path / "full/layer_0.fp32.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"layer_0\.fp32\.safetensors cannot be read"):
        capture.read_twin(0, Site.OUTPUT)


def test_tensor_that_its_file_lacks_is_an_error(capture: Capture) -> None:
    safetensors.torch.save_file({"other": torch.zeros(1)}, capture.directory / "layer_1.safetensors")
    with pytest.raises(CaptureError, match=r"layer_1\.safetensors holds no tensor 'output'"):
        capture.read(1, Site.OUTPUT)


@pytest.mark.parametrize("damage", ["removed", "cut", "text"])
def test_file_that_cannot_be_read_is_an_error(capture: Capture, damage: str) -> None:
    path = capture.directory / "layer_1.safetensors"
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:30] if damage == "cut" else b"no tensors here, just text")
    with pytest.raises(
        CaptureError, match=r"layer_1\.safetensors cannot be read: found .*run the port again"
    ):
        capture.read(1, Site.OUTPUT)


def test_capture_can_be_carried_elsewhere(capture: Capture, tmp_path: Path) -> None:
    moved = capture.directory.rename(tmp_path.with_name("elsewhere"))
    assert torch.equal(Capture.open(moved).read(0, Site.OUTPUT)[0, 0], torch.tensor([0, 1, 2, 3]).bfloat16())
    assert str(tmp_path) not in json.dumps(encode(Capture.open(moved).manifest))


def test_folder_above_captures_names_them(describe: Any, inputs: Inputs, tmp_path: Path) -> None:
    golden = tmp_path / "gpu_reference" / "full_model"
    with open_capture(golden, describe(), inputs=inputs) as writer:
        writer.finish()
    for folder in (golden.parent, tmp_path):
        with pytest.raises(CaptureError) as caught:
            Capture.open(folder)
        assert f"found captures below it: {golden}. Name one of them." in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError, match="Make one: mm2-gpu extract-all"):
        Capture.open(tmp_path / "empty")


class TestWholePort:
    """The run of a whole port: its cache, its passes, and the tokens that its logits are of."""

    KEYS, VALUES = torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 3, 4)

    @pytest.fixture
    def write(self, describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Callable[..., Capture]:
        def write(*, num_decoded: int = 0, passes: ModelPasses | None) -> Capture:
            run = model_run(2, sites_level="layer", num_decoded=num_decoded)
            with open_capture(tmp_path, describe(run=run), inputs=inputs) as writer:
                writer.write(0, layer_of(0), cache=(self.KEYS, self.VALUES))
                writer.write(1, layer_of(1))
                if passes is not None:
                    writer.write_json(PASSES_NAME, encode(passes))
            return Capture.open(tmp_path)

        return write

    def test_cache_is_read_of_layers_that_have_one(self, write: Any) -> None:
        capture = write(passes=ModelPasses(num_passes=1, cached_layers=(0,)))
        keys, values = capture.read_cache(0)
        assert torch.equal(keys, self.KEYS)
        assert torch.equal(values, self.VALUES)
        assert capture.read_cache(1) is None

    def test_passes_are_proved(self, write: Any) -> None:
        passes = ModelPasses(num_passes=3)
        capture = write(passes=passes)
        assert capture.read_passes() == passes
        assert capture.may_omit_inputs
        path = capture.directory / PASSES_NAME
        path.write_text(path.read_text().replace("3", "4"))
        with pytest.raises(
            CaptureError, match=r"changed after it was written: passes\.json: expected sha256"
        ):
            Capture.open(capture.directory).read_passes()
        path.unlink()
        with pytest.raises(CaptureError, match=r"passes\.json: expected sha256 .*, found none"):
            Capture.open(capture.directory).read_passes()

    @pytest.mark.parametrize(
        ("num_decoded", "held"),
        [(0, [[0, 0, 1], [0, 1, 0]]), (1, [[0, 1, 1], [1, 1, 0]])],
    )
    def test_last_logits_are_of_the_prefills_last_token_and_the_decoded_ones(
        self, num_decoded: int, held: list[list[int]], write: Any
    ) -> None:
        last = ModelPasses(num_passes=1 + num_decoded, logits=LogitsForm.LAST)
        capture = write(num_decoded=num_decoded, passes=last)
        found = capture.held_tokens(ModelSite.LOGITS)
        assert found.long().tolist() == held
        assert capture.held_tokens(ModelSite.FINAL_NORM) is None


@pytest.fixture
def directory(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Path:
    """Two layers and logits, with twins and floors: 3 inputs, 4 values, 3 twins and 3 floors."""
    with open_capture(tmp_path, describe(noise_floor="full"), inputs=inputs) as writer:
        for layer in (0, 1):
            twin = {Site.OUTPUT: layer_of(layer)[Site.OUTPUT].float()}
            writer.write(layer, layer_of(layer), twin=twin, floor={"output.error": torch.ones(2, 3)})
        logits = torch.ones(2, 3, 5)
        writer.write(
            None,
            {ModelSite.LOGITS: logits},
            twin={ModelSite.LOGITS: logits},
            floor={"logits.error": torch.zeros(2, 3)},
        )
        writer.finish()
    return tmp_path


def test_everything_is_read(directory: Path) -> None:
    found = inspect_capture(Capture.open(directory))
    assert (found.num_tensors, found.faults) == (13, ())
    assert inspect_capture(Capture.open(directory), with_inputs=False).num_tensors == 10


def test_each_fault_is_named_once(directory: Path) -> None:
    safetensors.torch.save_file({"output": torch.zeros(2, 3, 4)}, directory / "layer_1.fp32.safetensors")
    (directory / "layer_0.floor.safetensors").unlink()
    (directory / "model.safetensors").write_bytes(b"")
    found = inspect_capture(Capture.open(directory))
    files = ("model.safetensors", "layer_0.floor.safetensors", "layer_1.fp32.safetensors")
    assert sorted(next(file for file in files if file in fault) for fault in found.faults) == sorted(files)


@pytest.fixture
def whole_port(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Path:
    """The run of a whole port: 3 inputs, 2 values of a layer, its cached keys and values, and the passes."""
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write(0, layer_of(0), cache=(torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 3, 4)))
        writer.write_json(PASSES_NAME, encode(ModelPasses(num_passes=1, cached_layers=(0,))))
        writer.finish()
    return tmp_path


def test_the_cache_of_a_whole_port_is_read(whole_port: Path) -> None:
    found = inspect_capture(Capture.open(whole_port))
    assert (found.num_tensors, found.faults) == (7, ())
    pair = {"keys": torch.ones(2, 1, 3, 4), "values": torch.ones(2, 1, 3, 4)}
    safetensors.torch.save_file(pair, whole_port / cache_file(0))
    (fault,) = inspect_capture(Capture.open(whole_port)).faults
    assert "the cached values of layer 0" in fault


def test_twins_are_looked_at_whatever_their_digests(
    describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    with open_capture(tmp_path, describe(noise_floor="full"), inputs=inputs) as writer:
        writer.write(0, layer_of(0), twin={Site.OUTPUT: layer_of(0)[Site.OUTPUT].bfloat16()})
    (fault,) = inspect_capture(Capture.open(tmp_path)).faults
    assert "is no float32 twin" in fault
