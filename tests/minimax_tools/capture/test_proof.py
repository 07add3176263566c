"""Tensors that are read of a capture are those that were written, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from minimax_tools.capture.manifest import Certificate, Manifest
from minimax_tools.capture.proof import OpenFiles
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.capture.writer import store_certificate
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite, Site

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def golden(recipe: Any, tmp_path: Path) -> Path:
    recipe.write_golden(tmp_path)
    return tmp_path


def edit_manifest(directory: Path, **changes: object) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change(directory: Path, file: str, name: str, how: Change) -> None:
    tensors = {key: one.clone() for key, one in safetensors.torch.load_file(directory / file).items()}
    tensors[name] = how(tensors[name])
    (directory / file).unlink()
    safetensors.torch.save_file(tensors, directory / file)


def one_nan(tensor: torch.Tensor, bad: float = torch.nan) -> torch.Tensor:
    tensor[0, 0, 0] = bad
    return tensor


Read = Callable[[Capture], object]


@pytest.mark.parametrize(
    ("file", "name", "read", "place"),
    [
        ("layer_0.safetensors", "output", lambda golden: golden.read(0, Site.OUTPUT), "output of layer 0"),
        (
            "layer_0.fp32.safetensors",
            "output",
            lambda golden: golden.read_twin(0, Site.OUTPUT),
            "float32 twin of output of layer 0",
        ),
        (
            "layer_0.floor.safetensors",
            "output.error",
            lambda golden: golden.read_floor(0, "output.error"),
            "output.error of layer 0",
        ),
        (
            "model.safetensors",
            "logits",
            lambda golden: golden.read(None, ModelSite.LOGITS),
            "written: logits",
        ),
        ("inputs.safetensors", "input_ids", Capture.read_inputs, "input_ids"),
        ("inputs.safetensors", "attention_mask", Capture.read_attention_mask, "attention_mask"),
    ],
    ids=["site", "twin", "floor", "site outside the layers", "ids", "mask"],
)
@pytest.mark.parametrize("how", [lambda one: one + 1, lambda one: one.flatten()], ids=["values", "shape"])
def test_another_tensor_is_refused_by_name(
    golden: Path, file: str, name: str, read: Read, place: str, how: Change
) -> None:
    change(golden, file, name, how)
    with pytest.raises(CaptureError) as caught:
        read(Capture.open(golden))
    text = str(caught.value)
    assert text.startswith(f"the golden {golden} was damaged or changed after it was written")
    assert f"{place} in {file}" in text
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


def certify(directory: Path) -> None:
    digest = Manifest.read(directory).content_digest()
    store_certificate(directory, Certificate(checks=(), content=digest))


@pytest.mark.parametrize(
    "changes", [{"digests": {}}, {"text_digests": {}}, {"noise_floor": "off"}, {"entries": []}], ids=list
)
def test_certificate_is_void_once_the_manifest_says_otherwise(
    golden: Path, changes: dict[str, object]
) -> None:
    certify(golden)
    Capture.open(golden).refuse_void_certificate()
    edit_manifest(golden, **changes)
    with pytest.raises(IncomparableError, match="was changed after it was certified: its certificate"):
        Capture.open(golden).refuse_void_certificate()


def test_certificate_is_taken_off_what_is_written_to_again(recipe: Any, tmp_path: Path) -> None:
    recipe.write(tmp_path, until=1)
    certify(tmp_path)
    recipe.write(tmp_path, until=2)
    assert recipe.written == [1]
    assert Manifest.read(tmp_path).certificate is None


class TestStatistics:
    """Statistics show that a golden's tensor was changed along with its digest, where nothing else does."""

    VALUES = torch.tensor([[[-3.0, 0.5, 1.0, 4.0]]])

    @pytest.fixture
    def read(self, recipe: Any, tmp_path: Path) -> Callable[..., torch.Tensor]:
        """Stores a tensor of one site, changes its statistics in the manifest, and reads it."""

        def read(
            tensor: torch.Tensor = self.VALUES,
            *,
            side: str = "gpu_reference",
            noise_floor: str = "stats",
            site: Site = Site.OUTPUT,
            is_certified: bool = False,
            **statistics: float,
        ) -> torch.Tensor:
            directory = tmp_path / str(len(list(tmp_path.iterdir())))
            with recipe.open(directory, side=side, noise_floor=noise_floor) as writer:
                writer.write(0, {site: tensor})
            (entry,) = json.loads((directory / MANIFEST_NAME).read_text())["entries"]
            edit_manifest(directory, entries=[{**entry, "statistics": entry["statistics"] | statistics}])
            if is_certified:
                certify(directory)
            return Capture.open(directory).read(0, site)

        return read

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
    def test_others_are_refused(self, changed: dict[str, Any], read: Any) -> None:
        with pytest.raises(CaptureError, match=r"of layer 0 in .* has other statistics than its manifest"):
            read(**changed)

    def test_norm_is_as_exact_as_float32_sums(self, read: Any) -> None:
        norm = float(self.VALUES.norm())
        read(l2=norm * 1.00005, mean=9.0)
        with pytest.raises(CaptureError, match="has other statistics"):
            read(l2=norm * 1.0002)

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
    def test_own_are_accepted(self, tensor: torch.Tensor, read: Any) -> None:
        assert torch.equal(read(tensor).nan_to_num(), tensor.nan_to_num())

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
        self, kind: dict[str, Any], read: Any
    ) -> None:
        read(max=5.0, **kind)


class TestTwins:
    @pytest.fixture
    def write(self, recipe: Any, tmp_path: Path) -> Callable[..., Capture]:
        """Writes a golden with a twin of any kind, under right digests."""

        def write(twin: dict[Site, torch.Tensor], **sites: torch.Tensor) -> Capture:
            tensors = {**recipe.layer(0), **{Site(name): tensor for name, tensor in sites.items()}}
            with recipe.open(tmp_path, side="gpu_reference", noise_floor="full") as writer:
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
    def test_of_another_form_is_refused(self, how: Change, found: str, write: Any, recipe: Any) -> None:
        capture = write({Site.OUTPUT: how(recipe.layer(0)[Site.OUTPUT].float())})
        place = "float32 twin of output of layer 0 in"
        with pytest.raises(CaptureError, match=rf"{place} .* is no float32 twin: .*{found}"):
            capture.read_twin(0, Site.OUTPUT)

    def test_may_be_no_number_on_padding(self, write: Any, recipe: Any) -> None:
        twin = recipe.layer(0)[Site.OUTPUT].float()
        # The second row has two tokens.
        twin[1, 2] = torch.nan
        assert write({Site.OUTPUT: twin}).read_twin(0, Site.OUTPUT) is not None

    def test_of_a_site_that_was_not_captured_is_refused_with_nan(self, write: Any) -> None:
        capture = write({Site.MOE_DELTA: one_nan(torch.ones(2, 3, 5))})
        with pytest.raises(CaptureError, match="found 1 NaN or Inf"):
            capture.read_twin(0, Site.MOE_DELTA)

    def test_nan_that_the_golden_has_too_is_accepted(self, write: Any, recipe: Any) -> None:
        golden = one_nan(recipe.layer(0)[Site.OUTPUT])
        twin = golden.float()
        found = write({Site.OUTPUT: twin}, output=golden).read_twin(0, Site.OUTPUT)
        assert torch.equal(found.isnan(), golden.isnan())

    def test_of_the_experts_is_refused_with_a_fraction(self, write: Any) -> None:
        experts = torch.arange(12).reshape(2, 3, 2)
        capture = write({Site.ROUTER_EXPERTS: experts.float()}, router_experts=experts)
        with pytest.raises(CaptureError, match=r"expected int64 \[2, 3, 2\], found float32"):
            capture.read_twin(0, Site.ROUTER_EXPERTS)


# Elements of a float32 tensor whose file is read whole, and of one that is mapped.
@pytest.mark.parametrize("size", [8, 2**21], ids=["small", "large"])
def test_a_tensor_belongs_to_its_reader_alone_and_is_that_of_the_file_there_now(
    tmp_path: Path, size: int
) -> None:
    files, states = OpenFiles(tmp_path), set()
    for value in (1.0, 2.0):
        save_file({"values": torch.full((size,), value)}, tmp_path / "new.safetensors")
        (tmp_path / "new.safetensors").replace(tmp_path / "file.safetensors")
        for _ in range(2):
            read = files.read("file.safetensors", "values")
            assert read is not None
            assert torch.equal(read, torch.full((size,), value))
            read.zero_()
        states.add(files.state("file.safetensors"))
    assert len(states) == 2
    assert files.read("file.safetensors", "others") is None


def test_a_small_file_may_hold_scales_of_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"scales": scales}, tmp_path / "file.safetensors")
    read = OpenFiles(tmp_path).read("file.safetensors", "scales")
    assert read is not None
    assert torch.equal(read.float(), torch.tensor([1.0, 2.0]))
