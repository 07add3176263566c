"""Tensors that are read of a capture are those that were written, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimax_tools.capture.certificate import Certificate
from minimax_tools.capture.digests import digest_tensor
from minimax_tools.capture.manifest import MANIFEST_NAME, Description, Manifest
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import open_capture, store_certificate
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.machine.file_digest import digest_file
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def golden(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Path:
    """A golden of one layer, its twin and floor, and what was generated."""
    description: Description = replace(describe(noise_floor="full"), side="gpu_reference")
    with open_capture(tmp_path, description, inputs=inputs) as writer:
        tensors = layer_of(0)
        twin = {Site.OUTPUT: tensors[Site.OUTPUT].float() + 0.5}
        writer.write_layer(0, tensors, twin=twin, floor={"output.error": torch.ones(2, 3)})
        writer.write_json("generation.json", {"rows": [], "sampling": {}})
        writer.finish()
    return tmp_path


def change(directory: Path, file: str, name: str, how: Change) -> None:
    tensors = {key: one.clone() for key, one in safetensors.torch.load_file(directory / file).items()}
    tensors[name] = how(tensors[name])
    (directory / file).unlink()
    safetensors.torch.save_file(tensors, directory / file)


def make_old(directory: Path) -> None:
    manifest = replace(Manifest.read(directory), digests=None)
    (directory / MANIFEST_NAME).write_text(manifest.as_text())


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0, 0] = torch.nan
    return tensor


def test_what_was_written_is_read(golden: Path, layer_of: Any) -> None:
    capture = Capture.open(golden)
    assert torch.equal(capture.read(0, Site.OUTPUT), layer_of(0)[Site.OUTPUT])
    twin = capture.read_twin(0, Site.OUTPUT)
    assert twin is not None
    assert torch.equal(twin, layer_of(0)[Site.OUTPUT].float() + 0.5)
    assert capture.read_floor(0, "output.error") is not None
    assert capture.read_inputs().batch_size == 2
    assert capture.read_generation() is not None
    assert capture.digest_note == ""


READS: dict[str, tuple[str, str, Callable[[Capture], Any], str]] = {
    "site": (
        "layer_0.safetensors",
        "output",
        lambda capture: capture.read(0, Site.OUTPUT),
        "output of layer 0 in layer_0.safetensors",
    ),
    "twin": (
        "layer_0.fp32.safetensors",
        "output",
        lambda capture: capture.read_twin(0, Site.OUTPUT),
        "float32 twin of output of layer 0 in layer_0.fp32.safetensors",
    ),
    "floor": (
        "layer_0.floor.safetensors",
        "output.error",
        lambda capture: capture.read_floor(0, "output.error"),
        "output.error of layer 0 in layer_0.floor.safetensors",
    ),
    "ids": ("inputs.safetensors", "input_ids", lambda capture: capture.read_inputs(), "input_ids in inputs"),
    "mask": (
        "inputs.safetensors",
        "attention_mask",
        lambda capture: capture.read_attention_mask(),
        "attention_mask in inputs",
    ),
}


@pytest.mark.parametrize("part", READS)
@pytest.mark.parametrize("how", [lambda one: one + 1, lambda one: one.flatten()], ids=["values", "shape"])
def test_another_tensor_is_refused_by_name(golden: Path, part: str, how: Change) -> None:
    file, name, read, place = READS[part]
    change(golden, file, name, how)
    with pytest.raises(CaptureError) as caught:
        read(Capture.open(golden))
    text = str(caught.value)
    assert text.startswith(f"the golden {golden} was damaged or changed after it was written")
    assert place in text
    assert "of sha256" in text
    assert text.endswith(
        "Copy the golden again from where it was made, or make it again: mm2-gpu extract-all."
    )


def test_what_replaces_a_file_is_checked_again(golden: Path) -> None:
    capture = Capture.open(golden)
    capture.read_twin(0, Site.OUTPUT)
    change(golden, "layer_0.fp32.safetensors", "output", torch.zeros_like)
    with pytest.raises(CaptureError, match="does not match its manifest"):
        capture.read_twin(0, Site.OUTPUT)


def test_tensor_that_is_left_out_or_put_in_is_refused(golden: Path) -> None:
    path = golden / "layer_0.floor.safetensors"
    path.unlink()
    safetensors.torch.save_file({"moe_delta.error": torch.ones(2, 3)}, path)
    capture = Capture.open(golden)
    with pytest.raises(CaptureError, match=r"lacks the floor's output\.error of layer 0, which its manifest"):
        capture.read_floor(0, "output.error")
    with pytest.raises(CaptureError, match=r"moe_delta\.error of layer 0 in .* has no digest"):
        capture.read_floor(0, "moe_delta.error")


def test_generated_tokens_are_proved(golden: Path) -> None:
    path = golden / "generation.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(
        CaptureError, match=r"changed after it was written: generation\.json: expected sha256"
    ):
        Capture.open(golden).read_generation()
    path.unlink()
    with pytest.raises(CaptureError, match=r"generation\.json: expected sha256 .*, found none"):
        Capture.open(golden).read_generation()


@pytest.mark.parametrize(
    ("how", "found"),
    [
        (torch.Tensor.bfloat16, r"expected float32 \[2, 3, 4\], found bfloat16"),
        (lambda twin: twin.to(torch.int8), "found int8"),
        (lambda twin: twin[..., :2].contiguous(), r"found float32 \[2, 3, 2\]"),
        (one_nan, "a number wherever the golden holds one, found 1 NaN or Inf"),
    ],
)
def test_twin_of_an_older_golden_must_be_one(golden: Path, how: Change, found: str) -> None:
    make_old(golden)
    change(golden, "layer_0.fp32.safetensors", "output", how)
    with pytest.raises(
        CaptureError, match=rf"float32 twin of output of layer 0 in .* is no float32 twin: .*{found}"
    ):
        Capture.open(golden).read_twin(0, Site.OUTPUT)


def test_twin_may_be_no_number_on_padding(golden: Path) -> None:
    make_old(golden)

    def plant(twin: torch.Tensor) -> torch.Tensor:
        # The second row has two tokens.
        twin[1, 2] = torch.nan
        return twin

    change(golden, "layer_0.fp32.safetensors", "output", plant)
    assert Capture.open(golden).read_twin(0, Site.OUTPUT) is not None


def test_inputs_of_an_older_golden_are_proved_too(golden: Path) -> None:
    make_old(golden)
    change(golden, "inputs.safetensors", "position_ids", lambda one: one + 1)
    with pytest.raises(CaptureError, match=r"inputs\.safetensors does not match its manifest"):
        Capture.open(golden).read_inputs()


def test_values_of_other_statistics_are_refused_whatever_their_digest(golden: Path) -> None:
    path = golden / MANIFEST_NAME
    path.write_text(path.read_text().replace('"noise_floor": "full"', '"noise_floor": "stats"'))
    change(golden, "layer_0.safetensors", "output", lambda output: (output.float() * 1.01).bfloat16())
    record = json.loads((golden / MANIFEST_NAME).read_text())
    changed = safetensors.torch.load_file(golden / "layer_0.safetensors")["output"]
    for entry in record["entries"]:
        if entry["site"] == "output":
            entry["sha256"] = digest_tensor(changed)
    (golden / MANIFEST_NAME).write_text(json.dumps(record))
    with pytest.raises(CaptureError, match=r"output of layer 0 in layer_0\.safetensors has other statistics"):
        Capture.open(golden).read(0, Site.OUTPUT)


class TestCertified:
    @staticmethod
    def certify(directory: Path) -> None:
        manifest = Manifest.read(directory)
        files = {path.name: digest_file(path) for path in directory.glob("*.safetensors")}
        store_certificate(
            directory, Certificate(checks=(), content_digest=manifest.content_digest(), files=files)
        )

    def test_holds_while_nothing_changes(self, golden: Path) -> None:
        self.certify(golden)
        Capture.open(golden).refuse_void_certificate()

    @pytest.mark.parametrize("key", ["digests", "text_digests", "noise_floor", "entries"])
    def test_is_void_once_the_manifest_says_otherwise(self, golden: Path, key: str) -> None:
        self.certify(golden)
        record = json.loads((golden / MANIFEST_NAME).read_text())
        record[key] = {"digests": {}, "text_digests": {}, "noise_floor": "off", "entries": []}[key]
        (golden / MANIFEST_NAME).write_text(json.dumps(record))
        with pytest.raises(IncomparableError, match="was changed after it was certified: its certificate"):
            Capture.open(golden).refuse_void_certificate()

    def test_is_void_without_the_digests_that_it_speaks_of(self, golden: Path) -> None:
        self.certify(golden)
        make_old(golden)
        with pytest.raises(IncomparableError):
            Capture.open(golden).refuse_void_certificate()

    def test_proves_the_files_of_an_older_golden(self, golden: Path) -> None:
        make_old(golden)
        self.certify(golden)
        assert Capture.open(golden).read_twin(0, Site.OUTPUT) is not None
        change(golden, "layer_0.fp32.safetensors", "output", torch.zeros_like)
        with pytest.raises(CaptureError, match=r"changed after it was certified: layer_0\.fp32\.safetensors"):
            Capture.open(golden).read_twin(0, Site.OUTPUT)

    def test_is_taken_off_what_is_written_to_again(
        self, describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
    ) -> None:
        with open_capture(tmp_path, describe(), inputs=inputs) as writer:
            writer.write_layer(0, layer_of(0))
        self.certify(tmp_path)
        with open_capture(tmp_path, describe(), inputs=inputs) as writer:
            assert writer.complete_layers == (0,)
            writer.write_layer(1, layer_of(1))
        assert Manifest.read(tmp_path).certificate is None
