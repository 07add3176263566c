from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import open_capture
from minimax_tools.errors import CaptureError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def stored(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - no mapping


def test_directory_is_a_capture_before_its_first_layer(describe: Any, inputs: Inputs, tmp_path: Path) -> None:
    with open_capture(tmp_path, describe(), inputs=inputs):
        capture = Capture.open(tmp_path)
        assert (capture.layers, capture.manifest.is_complete) == ((), False)
    assert names(tmp_path) == ["inputs.safetensors", "manifest.json"]
    assert stored(tmp_path / "inputs.safetensors").keys() == {"input_ids", "attention_mask", "position_ids"}


def test_layer_is_written_with_its_floor_beside_it(
    describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    tensors = layer_of(0)
    twin = {Site.OUTPUT: tensors[Site.OUTPUT].float() + 0.5}
    floor = {"output.error": torch.ones(2, 3)}
    with open_capture(tmp_path, describe(noise_floor="full"), inputs=inputs) as writer:
        writer.write_layer(0, tensors, twin=twin, floor=floor)
        assert writer.complete_layers == (0,)
        read = writer.capture.read(0, Site.OUTPUT)
        assert (read.dtype, writer.capture.digest_note) == (torch.bfloat16, "")
        assert torch.equal(read, tensors[Site.OUTPUT])
    assert {"layer_0.safetensors", "layer_0.fp32.safetensors", "layer_0.floor.safetensors"} <= set(
        names(tmp_path)
    )
    assert stored(tmp_path / "layer_0.safetensors").keys() == {"input", "output"}
    assert torch.equal(stored(tmp_path / "layer_0.fp32.safetensors")["output"], twin[Site.OUTPUT])
    assert torch.equal(stored(tmp_path / "layer_0.floor.safetensors")["output.error"], floor["output.error"])


def test_tensor_that_lies_transposed_is_written_in_row_major_order(
    describe: Any, inputs: Inputs, tmp_path: Path
) -> None:
    tensor = torch.arange(24.0).reshape(2, 4, 3).transpose(1, 2)
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write_layer(0, {Site.OUTPUT: tensor})
    assert torch.equal(Capture.open(tmp_path).read(0, Site.OUTPUT), tensor)


def test_entries_are_in_the_order_of_sites_and_the_same_for_any_number_of_threads(
    describe: Any, inputs: Inputs, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Long enough for torch to share its sums among its threads.
    sites = (Site.INPUT, Site.ATTN_DELTA, Site.MOE_DELTA, Site.OUTPUT)
    tensors = {site: torch.randn(2, 1000, 160, generator=generator) for site in sites}
    num_threads, entries = torch.get_num_threads(), {}
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            with open_capture(tmp_path / str(number), describe(), inputs=inputs) as writer:
                writer.write_layer(0, tensors)
                entries[number] = writer.manifest.entries
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(num_threads)
    assert [entry.site for entry in entries[1]] == [str(site) for site in sites]
    assert entries[1] == entries[4]


def test_model_sites_are_written_with_their_floor(describe: Any, inputs: Inputs, tmp_path: Path) -> None:
    logits = torch.ones(2, 3, 5)
    with open_capture(tmp_path, describe(noise_floor="full"), inputs=inputs) as writer:
        assert not writer.has_model_sites
        writer.write_model(
            {ModelSite.LOGITS: logits},
            twin={ModelSite.LOGITS: logits * 2},
            floor={"logits.error": torch.zeros(2, 3)},
        )
        assert writer.has_model_sites
    capture = Capture.open(tmp_path)
    assert torch.equal(capture.read(None, ModelSite.LOGITS), logits)
    assert torch.equal(capture.read_twin(None, ModelSite.LOGITS), logits * 2)
    assert torch.equal(capture.read_floor(None, "logits.error"), torch.zeros(2, 3))


def test_hidden_states_lie_with_the_inputs(describe: Any, inputs: Inputs, tmp_path: Path) -> None:
    hidden_states = torch.randn(2, 3, 4).bfloat16()
    with open_capture(tmp_path, describe(), inputs=inputs, hidden_states=hidden_states):
        pass
    assert torch.equal(Capture.open(tmp_path).read_hidden_states(), hidden_states)


def test_layer_that_fails_to_be_written_is_not_listed(
    describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write_layer(0, layer_of(0))
        # A directory where the layer's file should go: the floor is written, the layer is not.
        (tmp_path / "layer_1.safetensors").mkdir()
        with pytest.raises(CaptureError, match=r"cannot write .*layer_1\.safetensors"):
            writer.write_layer(1, layer_of(1), floor={"output.error": torch.ones(2, 3)})
        assert writer.complete_layers == (0,)
    assert Capture.open(tmp_path).layers == (0,)


def test_json_beside_the_tensors_is_text_of_the_whole_alphabet(
    describe: Any, inputs: Inputs, tmp_path: Path
) -> None:
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write_json("generation.json", {"text": "Grüße"})
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.write_json("generation.json", {"nan": float("nan")})
    assert "Grüße" in (tmp_path / "generation.json").read_text(encoding="utf-8")
