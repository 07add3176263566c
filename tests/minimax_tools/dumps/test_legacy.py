"""Captures of the scripts before mm2; on either side of a comparison in tests/compare/test_legacy.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.dumps.legacy import LegacyCapture
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site

BATCH, LENGTH, HIDDEN = 2, 3, 4
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.int32)


class MiniMaxM2InferenceConfig:
    """Stands in every device file; this process must never make one."""

    def __init__(self) -> None:
        self.hidden_size = HIDDEN

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a class of the file was used")


def hidden_states(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).bfloat16()


def write_golden(directory: Path, layers: tuple[int, ...] = (0, 1, 2, 10), **metadata: Any) -> Path:
    directory.mkdir(parents=True)
    torch.save(hidden_states(100), directory / "embedding_output.pt")
    for layer in layers:
        torch.save(hidden_states(layer), directory / f"layer_{layer}_output.pt")
    torch.save({"model_path": "/models/MiniMax-M2", **metadata}, directory / "metadata.pt")
    return directory


def single_layer(layer: int, **changes: Any) -> dict[str, Any]:
    output = hidden_states(layer)
    record = {
        "layer_idx": layer,
        "config": MiniMaxM2InferenceConfig(),
        "input_hidden_states": hidden_states(layer - 1),
        "input_attention_mask": MASK,
        "input_position_ids": torch.arange(LENGTH, dtype=torch.int32)[None].expand(BATCH, -1),
        "output_hidden_states": output,
        "output_full": (output, None),
        "statistics": {"mean": output.float().mean().item(), "has_nan": False},
    }
    return {**record, **changes}


def layer_range(start: int, end: int, **changes: Any) -> dict[str, Any]:
    record = {
        "start_layer": start,
        "end_layer": end,
        "num_layers": end - start + 1,
        "config": MiniMaxM2InferenceConfig(),
        "input_hidden_states": hidden_states(start - 1),
        "output_hidden_states": hidden_states(end),
        "statistics": {"std": 1.0},
    }
    return {**record, **changes}


def write_run(directory: Path, record: Any) -> Path:
    directory.mkdir(parents=True)
    is_range = isinstance(record, dict) and "start_layer" in record
    torch.save(record, directory / ("layers_output.pt" if is_range else "layer_output.pt"))
    torch.save(MiniMaxM2InferenceConfig(), directory / "config.pt")
    return directory


def without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return write_golden(tmp_path / "full_model")


def test_golden_is_read_bit_for_bit_and_an_input_is_the_output_before_it(golden: Path) -> None:
    capture = LegacyCapture.open(golden)
    assert capture.layers == (0, 1, 2, 10)
    assert capture.sites(2) == (Site.INPUT, Site.OUTPUT)
    for layer, site, seed in ((2, Site.OUTPUT, 2), (2, Site.INPUT, 1), (0, Site.INPUT, 100)):
        assert torch.equal(capture.read(layer, site), hidden_states(seed))
        assert capture.read(layer, site).dtype == torch.bfloat16
    assert capture.sites(10) == (Site.OUTPUT,)
    with pytest.raises(CaptureError, match=r"holds no input of layer 10: found layer 0: input/output"):
        capture.read(10, Site.INPUT)
    assert capture.read_attention_mask() is None


@pytest.mark.parametrize(
    "content",
    [
        *({"layer": 0, key: hidden_states(0)} for key in ("hidden_states", "output_hidden_states", "any")),
        (hidden_states(0), hidden_states(5)),
    ],
    ids=["hidden_states", "output_hidden_states", "any key", "tuple"],
)
def test_golden_output_in_a_container_is_found(content: Any, golden: Path) -> None:
    torch.save(content, golden / "layer_0_output.pt")
    assert torch.equal(LegacyCapture.open(golden).read(0, Site.OUTPUT), hidden_states(0))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"input_hidden_states": hidden_states(0)}, "a dict with input_hidden_states"),
        ({"one": hidden_states(0), "two": hidden_states(1)}, "a dict with one, two"),
        (MiniMaxM2InferenceConfig(), r"a pickled .*\.MiniMaxM2InferenceConfig"),
        (torch.nn.Linear(2, 2), r"a pickled torch\.nn\.modules\.linear\.Linear"),
        ((), "tuple"),
        (None, "NoneType"),
        ([[[[[hidden_states(0)]]]]], "list"),
    ],
    ids=["input only", "two tensors", "foreign class", "module", "empty", "None", "too deep"],
)
def test_golden_output_that_cannot_be_told_is_refused(content: Any, found: str, golden: Path) -> None:
    torch.save(content, golden / "layer_0_output.pt")
    said = rf"layer_0_output\.pt holds no tensor where one is looked for.*found {found}"
    with pytest.raises(CaptureError, match=said):
        LegacyCapture.open(golden).read(0, Site.OUTPUT)


def test_model_sites_are_read_where_they_are_stored(golden: Path) -> None:
    torch.save({"logits": hidden_states(7)}, golden / "logits.pt")
    capture = LegacyCapture.open(golden)
    assert capture.model_sites() == (ModelSite.EMBEDDING, ModelSite.LOGITS)
    assert torch.equal(capture.read(None, ModelSite.LOGITS), hidden_states(7))
    with pytest.raises(CaptureError, match="holds no final_norm"):
        capture.read(None, ModelSite.FINAL_NORM)


@pytest.mark.parametrize("metadata", [{"attention_mask": MASK}, {"inputs": {"attention_mask": MASK.bool()}}])
def test_golden_mask_comes_from_its_metadata(metadata: dict[str, Any], tmp_path: Path) -> None:
    mask = LegacyCapture.open(write_golden(tmp_path / "full_model", **metadata)).read_attention_mask()
    assert mask is not None
    assert mask.dtype == torch.int64
    assert mask.tolist() == MASK.tolist()


@pytest.mark.parametrize(
    "mask", [torch.zeros(1, 1, 3, 3), torch.tensor([[0.0, -1e9]]), "causal"], ids=["4-D", "additive", "text"]
)
def test_mask_that_hides_the_padding_is_refused(mask: Any, tmp_path: Path) -> None:
    capture = LegacyCapture.open(write_golden(tmp_path / "full_model", attention_mask=mask))
    with pytest.raises(CaptureError, match="does not tell real tokens from padding"):
        capture.read_attention_mask()


def test_flat_tokens_get_the_shape_of_the_mask(tmp_path: Path) -> None:
    directory = write_golden(tmp_path / "full_model", attention_mask=MASK)
    torch.save(hidden_states(1).reshape(BATCH * LENGTH, HIDDEN), directory / "layer_1_output.pt")
    assert torch.equal(LegacyCapture.open(directory).read(1, Site.OUTPUT), hidden_states(1))


def test_single_layer_gives_input_output_and_mask(tmp_path: Path) -> None:
    capture = LegacyCapture.open(write_run(tmp_path / "single_layer_7", single_layer(7)))
    assert (capture.layers, capture.sites(7)) == ((7,), (Site.INPUT, Site.OUTPUT))
    assert torch.equal(capture.read(7, Site.INPUT), hidden_states(6))
    assert torch.equal(capture.read(7, Site.OUTPUT), hidden_states(7))
    mask = capture.read_attention_mask()
    assert mask is not None
    assert torch.equal(mask, MASK.long())


@pytest.mark.parametrize("lacking", ["output_hidden_states", "layer_idx"])
def test_output_and_layer_may_be_told_elsewhere(lacking: str, tmp_path: Path) -> None:
    """In `output_full`, and by the folder's name."""
    directory = write_run(tmp_path / "single_layer_7", without(single_layer(7), lacking))
    assert torch.equal(LegacyCapture.open(directory).read(7, Site.OUTPUT), hidden_states(7))


def test_single_layer_without_output_holds_its_input_only(tmp_path: Path) -> None:
    record = without(single_layer(7), "output_hidden_states", "output_full")
    capture = LegacyCapture.open(write_run(tmp_path / "single_layer_7", record))
    assert capture.sites(7) == (Site.INPUT,)
    with pytest.raises(CaptureError, match=r"holds no output of layer 7.*capture with mm2"):
        capture.read(7, Site.OUTPUT)


def test_range_gives_the_first_input_and_the_last_output(tmp_path: Path) -> None:
    capture = LegacyCapture.open(write_run(tmp_path / "layers_2_to_5", layer_range(2, 5)))
    assert [(layer, capture.sites(layer)) for layer in capture.layers] == [
        (2, (Site.INPUT,)),
        (5, (Site.OUTPUT,)),
    ]
    assert torch.equal(capture.read(2, Site.INPUT), hidden_states(1))
    assert torch.equal(capture.read(5, Site.OUTPUT), hidden_states(5))
    assert capture.read_attention_mask() is None


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            layer_range(2, 5, num_layers=3),
            r"contradicts itself: expected 4 layers, 2 to 5, found num_layers 3",
        ),
        *(
            (single_layer(7, layer_idx=wrong), r"does not say which layer it holds.*single_layer_N")
            for wrong in (None, "7", MiniMaxM2InferenceConfig())
        ),
        (hidden_states(7), r"another layout: expected a dict with layer_idx"),
    ],
)
def test_run_that_does_not_say_what_it_holds_is_refused(record: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=said):
        LegacyCapture.open(write_run(tmp_path / "run", record))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            ("layer_1_output.pt", "layer_output.pt"),
            r"output of layer 1 twice: found layer_1_output\.pt and layer_output\.pt",
        ),
        (("logits.pt", "lm_head_output.pt"), r"the logits twice: found lm_head_output\.pt and logits\.pt"),
    ],
)
def test_folder_that_holds_a_site_twice_is_refused(files: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in files:
        torch.save(single_layer(1) if name == "layer_output.pt" else hidden_states(1), tmp_path / name)
    with pytest.raises(CaptureError, match=said):
        LegacyCapture.open(tmp_path)


def test_damaged_file_is_named_when_it_is_read(golden: Path) -> None:
    path = golden / "layer_1_output.pt"
    path.write_bytes(path.read_bytes()[:-100])
    capture = LegacyCapture.open(golden)
    assert torch.equal(capture.read(0, Site.OUTPUT), hidden_states(0))
    with pytest.raises(CaptureError, match=r"layer_1_output\.pt is damaged"):
        capture.read(1, Site.OUTPUT)
