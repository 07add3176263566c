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
from safetensors.torch import save_file

from minimax_tools.capture.manifest import Certificate, Description, Manifest, digest_tensor
from minimax_tools.capture.proof import OpenFiles
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.capture.writer import open_capture, store_certificate
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def golden(describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Path:
    """A golden of one layer, its twin and floor, and what was generated."""
    description: Description = replace(describe(noise_floor="full"), side="gpu_reference")
    with open_capture(tmp_path, description, inputs=inputs) as writer:
        tensors = layer_of(0)
        twin = {Site.OUTPUT: tensors[Site.OUTPUT].float() + 0.5}
        writer.write(0, tensors, twin=twin, floor={"output.error": torch.ones(2, 3)})
        writer.write_json("generation.json", {"rows": [], "sampling": {}})
        writer.finish()
    return tmp_path


def change(directory: Path, file: str, name: str, how: Change) -> None:
    tensors = {key: one.clone() for key, one in safetensors.torch.load_file(directory / file).items()}
    tensors[name] = how(tensors[name])
    (directory / file).unlink()
    safetensors.torch.save_file(tensors, directory / file)


def one_nan(tensor: torch.Tensor, bad: float = torch.nan) -> torch.Tensor:
    tensor[0, 0, 0] = bad
    return tensor


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
        digest = Manifest.read(directory).content_digest()
        store_certificate(directory, Certificate(checks=(), content=digest))

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

    def test_is_taken_off_what_is_written_to_again(
        self, describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
    ) -> None:
        with open_capture(tmp_path, describe(), inputs=inputs) as writer:
            writer.write(0, layer_of(0))
        self.certify(tmp_path)
        with open_capture(tmp_path, describe(), inputs=inputs) as writer:
            assert writer.complete_layers == (0,)
            writer.write(1, layer_of(1))
        assert Manifest.read(tmp_path).certificate is None


class TestStatistics:
    """Statistics show that a golden's tensor was changed along with its digest, where nothing else does."""

    VALUES = torch.tensor([[[-3.0, 0.5, 1.0, 4.0]]])

    def read(
        self,
        describe: Any,
        inputs: Inputs,
        directory: Path,
        *,
        tensor: torch.Tensor | None = None,
        side: str = "gpu_reference",
        noise_floor: str = "stats",
        site: Site = Site.OUTPUT,
        is_certified: bool = False,
        **statistics: float,
    ) -> torch.Tensor:
        """Store a tensor of one site, change its statistics in the manifest, and read it."""
        values = self.VALUES if tensor is None else tensor
        description = replace(describe(noise_floor=noise_floor), side=side)
        with open_capture(directory, description, inputs=inputs) as writer:
            writer.write(0, {site: values})
        path = directory / MANIFEST_NAME
        record = json.loads(path.read_text())
        (entry,) = record["entries"]
        entry["statistics"] |= statistics
        path.write_text(json.dumps(record))
        if is_certified:
            TestCertified.certify(directory)
        return Capture.open(directory).read(0, site)

    @pytest.mark.parametrize(
        "changed",
        [
            *({"min": -2.0}, {"max": 5.0}, {"l2": 5.13}, {"num_nan": 1}, {"num_inf": 1}, {"l2": 0.0}),
            # Numbers alone are not those of a tensor with NaN.
            *(
                {"tensor": torch.tensor([1.0, bad]), "num_nan": 0, "num_inf": 0}
                for bad in (torch.nan, torch.inf, -torch.inf)
            ),
            # An input has no twin.
            {"site": Site.INPUT, "noise_floor": "full", "max": 5.0},
        ],
    )
    def test_others_are_refused(
        self, changed: dict[str, Any], describe: Any, inputs: Inputs, tmp_path: Path
    ) -> None:
        with pytest.raises(CaptureError, match=r"of layer 0 in .* has other statistics than its manifest"):
            self.read(describe, inputs, tmp_path, **changed)

    def test_norm_is_as_exact_as_float32_sums(self, describe: Any, inputs: Inputs, tmp_path: Path) -> None:
        norm = float(self.VALUES.norm())
        self.read(describe, inputs, tmp_path / "near", l2=norm * 1.00005, mean=9.0)
        with pytest.raises(CaptureError, match="has other statistics"):
            self.read(describe, inputs, tmp_path / "far", l2=norm * 1.0002)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.zeros(1, 2, 3),
            torch.zeros(0, 2, 3),
            torch.full((1, 2, 3), 1e30),
            torch.tensor([1.0, torch.nan, torch.inf]),
            torch.tensor([1.0, torch.inf]),
            torch.tensor([1.0, -torch.inf]),
            torch.full((3,), torch.nan),
        ],
        ids=["zeros", "empty", "large", "NaN and Inf", "Inf", "-Inf", "NaN alone"],
    )
    def test_own_are_accepted(
        self, tensor: torch.Tensor, describe: Any, inputs: Inputs, tmp_path: Path
    ) -> None:
        found = self.read(describe, inputs, tmp_path, tensor=tensor)
        assert torch.equal(found.nan_to_num(), tensor.nan_to_num())

    @pytest.mark.parametrize(
        "kind",
        [
            {"side": "neuron"},
            {"noise_floor": "full"},
            {"is_certified": True},
            {"side": "neuron", "noise_floor": "full", "site": Site.INPUT},
        ],
        ids=["run", "golden with twins", "certified", "input of a run"],
    )
    def test_need_not_fit_where_something_else_shows_the_change(
        self, kind: dict[str, Any], describe: Any, inputs: Inputs, tmp_path: Path
    ) -> None:
        self.read(describe, inputs, tmp_path, max=5.0, **kind)


class TestTwins:
    @pytest.fixture
    def write(self, describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path) -> Callable[..., Capture]:
        """Writes a golden with a twin of any kind, under right digests."""

        def write(twin: dict[Site, torch.Tensor], **sites: torch.Tensor) -> Capture:
            description = replace(describe(noise_floor="full"), side="gpu_reference")
            tensors = {**layer_of(0), **{Site(name): tensor for name, tensor in sites.items()}}
            with open_capture(tmp_path, description, inputs=inputs) as writer:
                writer.write(0, tensors, twin=twin)
            return Capture.open(tmp_path)

        return write

    @pytest.mark.parametrize(
        ("how", "found"),
        [
            (torch.Tensor.bfloat16, r"expected float32 \[2, 3, 4\], found bfloat16"),
            (lambda twin: twin.to(torch.int8), "found int8"),
            (lambda twin: twin[..., :2].contiguous(), r"found float32 \[2, 3, 2\]"),
            (one_nan, "a number wherever the golden holds one, found 1 NaN or Inf"),
            (lambda twin: one_nan(twin, torch.inf), "found 1 NaN or Inf"),
            (lambda twin: one_nan(twin, -torch.inf), "found 1 NaN or Inf"),
        ],
    )
    def test_of_another_form_is_refused(self, how: Change, found: str, write: Any, layer_of: Any) -> None:
        capture = write({Site.OUTPUT: how(layer_of(0)[Site.OUTPUT].float())})
        place = "float32 twin of output of layer 0 in"
        with pytest.raises(CaptureError, match=rf"{place} .* is no float32 twin: .*{found}"):
            capture.read_twin(0, Site.OUTPUT)

    def test_may_be_no_number_on_padding(self, write: Any, layer_of: Any) -> None:
        twin = layer_of(0)[Site.OUTPUT].float()
        # The second row has two tokens.
        twin[1, 2] = torch.nan
        assert write({Site.OUTPUT: twin}).read_twin(0, Site.OUTPUT) is not None

    def test_of_a_site_that_was_not_captured_is_refused_with_nan(self, write: Any) -> None:
        capture = write({Site.MOE_DELTA: one_nan(torch.ones(2, 3, 5))})
        with pytest.raises(CaptureError, match="found 1 NaN or Inf"):
            capture.read_twin(0, Site.MOE_DELTA)

    def test_nan_that_the_golden_has_too_is_accepted(self, write: Any, layer_of: Any) -> None:
        golden = one_nan(layer_of(0)[Site.OUTPUT])
        twin = golden.float()
        found = write({Site.OUTPUT: twin}, output=golden).read_twin(0, Site.OUTPUT)
        assert torch.equal(found.isnan(), golden.isnan())

    def test_of_the_experts_is_refused_with_a_fraction(self, write: Any) -> None:
        experts = torch.arange(12).reshape(2, 3, 2)
        capture = write({Site.ROUTER_EXPERTS: experts.float()}, router_experts=experts)
        with pytest.raises(CaptureError, match=r"expected int64 \[2, 3, 2\], found float32"):
            capture.read_twin(0, Site.ROUTER_EXPERTS)


def test_site_outside_the_layers_is_named_without_one(describe: Any, inputs: Inputs, tmp_path: Path) -> None:
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write(None, {ModelSite.LOGITS: torch.ones(2, 3, 5)})
    change(tmp_path, "model.safetensors", "logits", lambda logits: logits + 1)
    with pytest.raises(CaptureError, match=r"written: logits in model\.safetensors does not match"):
        Capture.open(tmp_path).read(None, ModelSite.LOGITS)


# Elements of a float32 tensor whose file is read whole, and of one that is mapped.
SIZES = {"small": 8, "large": 2**21}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_tensor_belongs_to_its_reader_alone(tmp_path: Path, size: int) -> None:
    save_file({"ones": torch.ones(size), "twos": torch.full((size,), 2.0)}, tmp_path / "file.safetensors")
    files = OpenFiles(tmp_path)
    first = files.read("file.safetensors", "ones")
    assert first is not None
    first.zero_()
    again = files.read("file.safetensors", "ones")
    assert again is not None
    assert torch.equal(again, torch.ones(size))
    assert files.read("file.safetensors", "threes") is None


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path, size: int) -> None:
    files = OpenFiles(tmp_path)
    states = set()
    for value in (1.0, 2.0):
        save_file({"values": torch.full((size,), value)}, tmp_path / "new.safetensors")
        (tmp_path / "new.safetensors").replace(tmp_path / "file.safetensors")
        read = files.read("file.safetensors", "values")
        assert read is not None
        assert torch.equal(read, torch.full((size,), value))
        states.add(files.state("file.safetensors"))
    assert len(states) == 2


def test_a_small_file_may_hold_scales_of_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"scales": scales}, tmp_path / "file.safetensors")
    read = OpenFiles(tmp_path).read("file.safetensors", "scales")
    assert read is not None
    assert torch.equal(read.float(), torch.tensor([1.0, 2.0]))
