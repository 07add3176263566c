from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimax_tools.capture.passes import PASSES_NAME, LogitsForm, ModelPasses, cache_file
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import encode
from minimax_tools.model.run import model_run, sweep_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span


@pytest.fixture
def capture(recipe: Any, tmp_path: Path) -> Capture:
    return recipe.write(tmp_path)  # type: ignore[no-any-return]


def test_input_of_a_chained_layer_is_the_output_before_it(capture: Capture) -> None:
    assert capture.sites(2) == (Site.INPUT, Site.OUTPUT)
    assert torch.equal(capture.read(2, Site.INPUT), capture.read(1, Site.OUTPUT))
    assert not torch.equal(capture.read(0, Site.INPUT), capture.read(0, Site.OUTPUT))


def test_input_of_an_isolated_layer_is_its_own_or_none(recipe: Any, tmp_path: Path) -> None:
    capture = recipe.write(tmp_path, run=sweep_run(Span(0, 3), sites_level="layer"))
    assert capture.sites(1) == (Site.OUTPUT,)
    with pytest.raises(CaptureError, match="holds no input of layer 1"):
        capture.read(1, Site.INPUT)


def test_as_many_heads_as_tokens_are_read_as_the_golden_has_them(recipe: Any, tmp_path: Path) -> None:
    num_rows, num_tokens = recipe.inputs.batch_shape
    right = torch.randn(num_rows, num_tokens, num_tokens, 5)
    run = sweep_run(Span(0, 1), sites_level="all")
    for name, heads in (("golden", right), ("run", (right + 0.01).transpose(1, 2).contiguous())):
        with recipe.open(tmp_path / name, run=run) as writer:
            writer.write(0, {Site.Q_ROPE: heads})
    golden, port = (Capture.open(tmp_path / name) for name in ("golden", "run"))
    assert torch.equal(port.beside(golden).read(0, Site.Q_ROPE), right + 0.01)
    assert torch.equal(golden.beside(golden).read(0, Site.Q_ROPE), right)


@pytest.mark.parametrize(("layer", "site"), [(0, Site.Q_PROJ), (3, Site.OUTPUT), (4, Site.INPUT)])
def test_site_that_was_not_captured_is_an_error(capture: Capture, layer: int, site: Site) -> None:
    with pytest.raises(CaptureError, match=f"holds no {site} of layer {layer}. Capture it with --sites all"):
        capture.read(layer, site)


def test_inputs_come_back_with_their_digest_and_source(capture: Capture, recipe: Any) -> None:
    read = capture.read_inputs()
    assert (read.digest(), read.source) == (recipe.inputs.digest(), recipe.inputs.source)
    assert torch.equal(capture.read_attention_mask(), recipe.inputs.attention_mask)
    assert capture.read_hidden_states() is None


def test_capture_without_a_floor_has_none(capture: Capture) -> None:
    assert not capture.has_floor
    assert capture.read_twin(0, Site.OUTPUT) is None
    assert capture.read_floor(0, "router_margin") is None
    assert capture.read_twin(None, ModelSite.LOGITS) is None
    assert capture.read_floor(None, "logits.error") is None


def test_floor_that_is_promised_and_missing_is_an_error(recipe: Any, tmp_path: Path) -> None:
    with recipe.open(tmp_path, noise_floor="full") as writer:
        writer.write(0, recipe.layer(0), twin={}, floor={})
    capture = Capture.open(tmp_path)
    with pytest.raises(CaptureError, match=r"layer_0\.fp32\.safetensors holds no tensor 'output' of layer 0"):
        capture.read_twin(0, Site.OUTPUT)
    (tmp_path / "layer_0.fp32.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"layer_0\.fp32\.safetensors cannot be read"):
        capture.read_twin(0, Site.OUTPUT)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (Path.unlink, r"cannot be read: found .*run the port again"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:30]),
            r"cannot be read: found .*run the port again",
        ),
        (lambda path: path.write_bytes(b"no tensors, just text"), r"cannot be read: found .*the port again"),
        (lambda path: safetensors.torch.save_file({"a": torch.ones(1)}, path), r"holds no tensor 'output'"),
    ],
    ids=["removed", "cut", "text", "other tensors"],
)
def test_file_without_its_tensor_is_an_error(
    capture: Capture, damage: Callable[[Path], object], fault: str
) -> None:
    damage(capture.directory / "layer_1.safetensors")
    with pytest.raises(CaptureError, match=rf"layer_1\.safetensors {fault}"):
        capture.read(1, Site.OUTPUT)


def test_capture_can_be_carried_elsewhere(capture: Capture, tmp_path: Path) -> None:
    moved = capture.directory.rename(tmp_path.with_name("elsewhere"))
    assert torch.equal(Capture.open(moved).read(0, Site.OUTPUT)[0, 0], torch.tensor([0, 1, 2, 3]).bfloat16())
    assert str(tmp_path) not in (moved / "manifest.json").read_text()


def test_folder_above_captures_names_them(recipe: Any, tmp_path: Path) -> None:
    golden = tmp_path / "gpu_reference" / "full_model"
    recipe.write(golden)
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
    def write(self, recipe: Any, tmp_path: Path) -> Callable[..., Capture]:
        def write(passes: ModelPasses, *, num_decoded: int = 0) -> Capture:
            run = model_run(2, sites_level="layer", num_decoded=num_decoded)
            with recipe.open(tmp_path, run=run) as writer:
                writer.write(0, recipe.layer(0), cache=(self.KEYS, self.VALUES))
                writer.write(1, recipe.layer(1))
                writer.write_json(PASSES_NAME, encode(passes))
            return Capture.open(tmp_path)

        return write

    def test_cache_is_read_of_layers_that_have_one(self, write: Any) -> None:
        capture = write(ModelPasses(num_passes=1, cached_layers=(0,)))
        keys, values = capture.read_cache(0)
        assert torch.equal(keys, self.KEYS)
        assert torch.equal(values, self.VALUES)
        assert capture.read_cache(1) is None
        found = inspect_capture(capture)
        # 3 inputs, 3 values of layers, keys and values.
        assert (found.num_tensors, found.faults) == (8, ())
        pair = {"keys": self.KEYS, "values": self.VALUES + 1}
        safetensors.torch.save_file(pair, capture.directory / cache_file(0))
        (fault,) = inspect_capture(Capture.open(capture.directory)).faults
        assert "the cached values of layer 0" in fault

    def test_passes_are_proved(self, write: Any) -> None:
        passes = ModelPasses(num_passes=3)
        capture = write(passes)
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
        ("num_decoded", "held"), [(0, [[0, 0, 1], [0, 1, 0]]), (1, [[0, 1, 1], [1, 1, 0]])]
    )
    def test_last_logits_are_of_the_prefills_last_token_and_the_decoded_ones(
        self, num_decoded: int, held: list[list[int]], write: Any
    ) -> None:
        last = ModelPasses(num_passes=1 + num_decoded, logits=LogitsForm.LAST)
        capture = write(last, num_decoded=num_decoded)
        assert capture.held_tokens(ModelSite.LOGITS).long().tolist() == held
        assert capture.held_tokens(ModelSite.FINAL_NORM) is None


def test_inspection_reads_everything_and_names_each_fault_once(recipe: Any, tmp_path: Path) -> None:
    capture = recipe.write_golden(tmp_path)
    found = inspect_capture(capture)
    assert (found.num_tensors, found.faults) == (13, ())
    assert inspect_capture(capture, with_inputs=False).num_tensors == 10
    safetensors.torch.save_file({"output": torch.zeros(2, 3, 4)}, tmp_path / "layer_1.fp32.safetensors")
    (tmp_path / "layer_0.floor.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"")
    faults = inspect_capture(Capture.open(tmp_path)).faults
    files = ("model.safetensors", "layer_0.floor.safetensors", "layer_1.fp32.safetensors")
    assert sorted(next(file for file in files if file in fault) for fault in faults) == sorted(files)


def test_twins_are_looked_at_whatever_their_digests(recipe: Any, tmp_path: Path) -> None:
    with recipe.open(tmp_path, noise_floor="full") as writer:
        writer.write(0, recipe.layer(0), twin={Site.OUTPUT: recipe.layer(0)[Site.OUTPUT]})
    (fault,) = inspect_capture(Capture.open(tmp_path)).faults
    assert "is no float32 twin" in fault
