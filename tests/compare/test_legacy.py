"""Captures in the `.pt` layout of the tools before mm2, on either side of `mm2-compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.cli import main as mm2_compare
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.sites import ModelSite, Site

Command = Callable[..., click.testing.Result]

NUM_LAYERS = 4


@pytest.fixture
def source(golden: Path) -> Capture:
    return Capture.open(golden)


def write_golden(directory: Path, source: Capture, *, with_mask: bool = True) -> Path:
    """Write all layers' outputs and the embedding as a whole-model run of the older tools did."""
    directory.mkdir(parents=True)
    inputs = source.read_inputs()
    metadata: dict[str, Any] = {"model_path": "/models/MiniMax-M2", "inputs": {"input_ids": inputs.input_ids}}
    if with_mask:
        metadata["inputs"]["attention_mask"] = inputs.attention_mask
    torch.save(metadata, directory / "metadata.pt")
    torch.save(source.read_model(ModelSite.EMBEDDING), directory / "embedding_output.pt")
    for layer in range(NUM_LAYERS):
        torch.save(source.read(layer, Site.OUTPUT), directory / f"layer_{layer}_output.pt")
    return directory


def write_single_layer(directory: Path, source: Capture, layer: int, **changes: Any) -> Path:
    directory.mkdir(parents=True)
    record = {
        "layer_idx": layer,
        "input_hidden_states": source.read(layer, Site.INPUT),
        "input_attention_mask": source.read_inputs().attention_mask,
        "output_hidden_states": source.read(layer, Site.OUTPUT),
    }
    torch.save({**record, **changes}, directory / "layer_output.pt")
    return directory


def write_range(directory: Path, source: Capture, start: int, end: int, **changes: Any) -> Path:
    directory.mkdir(parents=True)
    record = {
        "start_layer": start,
        "end_layer": end,
        "num_layers": end - start + 1,
        "input_hidden_states": source.read(start, Site.INPUT),
        "output_hidden_states": source.read(end, Site.OUTPUT),
    }
    torch.save({**record, **changes}, directory / "layers_output.pt")
    return directory


def compare(command: Command, reference: Path, target: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = command(mm2_compare, "--golden", reference, "--run", target, "--json", "--quiet", *options)
    return result.exit_code, json.loads(result.stdout)


def wrong_output(source: Capture, layer: int) -> torch.Tensor:
    """The output without what the experts add, on the second row."""
    output = source.read(layer, Site.OUTPUT)
    output[1] = source.read(layer, Site.ATTN_RESIDUAL)[1]
    return output


class TestDeviceRun:
    def test_single_layer_is_judged_by_the_goldens_noise(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        exit_code, record = compare(command, golden, write_single_layer(tmp_path / "run", source, 2))
        assert (exit_code, record["verdict"], record["compared"], record["of"]) == (0, "pass", 1, 1)
        (site,) = record["sites"]
        assert (site["layer"], site["site"]) == (2, "output")
        # The golden's variants stray a little further than the golden, which the run repeats.
        assert 0.6 < site["noise"]["whole"] <= 1.0
        assert record["notes"] == [
            "one side does not record its model and tokens: that they agree was not checked",
            "run: its layout has no digests; that its files are as they were written was not checked",
        ]

    def test_wrong_output_is_blamed_on_the_whole_layer(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        target = write_single_layer(tmp_path / "run", source, 2, output_hidden_states=wrong_output(source, 2))
        exit_code, record = compare(command, golden, target)
        assert (exit_code, record["verdict"]) == (1, "fail")
        (blame,) = record["blame"]
        assert blame["layer"] == 2
        assert (blame["sites"][0], blame["sites"][-1]) == ("input_norm", "output")

    def test_layer_that_was_fed_random_numbers_is_incomparable(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        random = torch.randn(source.read(2, Site.INPUT).shape).bfloat16()
        target = write_single_layer(tmp_path / "run", source, 2, input_hidden_states=random)
        exit_code, record = compare(command, golden, target)
        assert (exit_code, record["verdict"]) == (3, "incomparable")
        assert "the captures have different inputs: layer 2 got other hidden states" in record["error"]

    def test_other_mask_is_incomparable(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        mask = torch.ones_like(source.read_inputs().attention_mask)
        target = write_single_layer(tmp_path / "run", source, 2, input_attention_mask=mask)
        exit_code, record = compare(command, golden, target)
        assert exit_code == 3
        assert "different inputs: attention_mask differs" in record["error"]
        assert "expected rows of 48, 33 tokens (golden), found 48, 48" in record["error"]

    def test_input_that_is_not_stored_is_told_and_suspected(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        target = write_single_layer(
            tmp_path / "run",
            source,
            2,
            input_hidden_states=None,
            output_hidden_states=wrong_output(source, 2),
        )
        exit_code, record = compare(command, golden, target)
        assert exit_code == 1
        assert record["blame"][0]["sites"][0] == "input"
        assert any("nothing tells what was fed to layer 2" in note for note in record["notes"])

    def test_range_is_judged_at_its_end(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        exit_code, record = compare(command, golden, write_range(tmp_path / "right", source, 0, 2))
        assert (exit_code, record["compared"]) == (0, 1)
        wrong = write_range(tmp_path / "wrong", source, 0, 2, output_hidden_states=wrong_output(source, 2))
        exit_code, record = compare(command, golden, wrong)
        assert exit_code == 1
        (blame,) = record["blame"]
        assert (blame["layer"], blame["sites"][0], blame["sites"][-1]) == (2, "input", "output")

    def test_flat_output_is_the_same_as_a_batch(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        flat = source.read(2, Site.OUTPUT).flatten(0, 1)
        target = write_single_layer(
            tmp_path / "run", source, 2, output_hidden_states=flat, input_attention_mask=None
        )
        assert compare(command, golden, target)[0] == 0

    def test_float32_copy_passes(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        target = write_single_layer(
            tmp_path / "run", source, 2, output_hidden_states=source.read(2, Site.OUTPUT).float()
        )
        exit_code, record = compare(command, golden, target)
        assert (exit_code, record["verdict"]) == (0, "pass")

    def test_layers_of_a_whole_model_run_are_judged_on_its_own_values(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        target = write_golden(tmp_path / "run", source)
        assert compare(command, golden, target)[0] == 0
        for layer in (1, 2, 3):
            torch.save(3 * source.read(layer, Site.OUTPUT), target / f"layer_{layer}_output.pt")
        exit_code, record = compare(command, golden, target)
        # Each puts out three times what a right layer makes of a third of what it was fed.
        assert (exit_code, [blame["layer"] for blame in record["blame"]]) == (1, [1, 2, 3])

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_token_that_is_not_finite_from_a_layer_on_fails_that_layer(
        self, golden: Path, source: Capture, command: Command, tmp_path: Path, value: float
    ) -> None:
        target = write_golden(tmp_path / "full_model", source)
        for layer in range(1, NUM_LAYERS):
            output = source.read(layer, Site.OUTPUT)
            output[0, 3] = value
            torch.save(output, target / f"layer_{layer}_output.pt")
        exit_code, record = compare(command, golden, target)
        assert (exit_code, record["verdict"]) == (1, "fail")
        assert [blame["layer"] for blame in record["blame"]] == [1]


class TestGolden:
    def test_old_golden_judges_an_old_run_without_a_floor(
        self, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        reference = write_golden(tmp_path / "full_model", source)
        exit_code, record = compare(command, reference, write_single_layer(tmp_path / "right", source, 2))
        assert (exit_code, record["verdict"], record["compared"]) == (0, "pass", 1)
        assert any(note.startswith("the golden kept no noise floor") for note in record["notes"])
        # Without a floor and of a backend that nobody names, a tenth of the output is beyond doubt.
        output = 0.9 * source.read(2, Site.OUTPUT)
        wrong = write_single_layer(tmp_path / "wrong", source, 2, output_hidden_states=output)
        exit_code, record = compare(command, reference, wrong)
        assert (exit_code, record["verdict"]) == (1, "fail")

    def test_old_golden_judges_mm2s_run_by_its_outputs(
        self, copyist: Any, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        reference = write_golden(tmp_path / "full_model", source)
        exit_code, record = compare(command, reference, copyist.device_run())
        assert (exit_code, record["compared"], record["of"]) == (0, NUM_LAYERS, NUM_LAYERS * 17)
        target = copyist.device_run(
            {(2, Site.OUTPUT): lambda tensor: 2 * tensor},
            run=single_layer_run(2, sites_level="layer"),
            name="wrong",
        )
        assert compare(command, reference, target)[0] == 1

    def test_mask_of_the_run_serves_where_the_golden_has_none(
        self, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        reference = write_golden(tmp_path / "full_model", source, with_mask=False)
        output = source.read(2, Site.OUTPUT)
        output[1, 33:] = torch.nan
        target = write_single_layer(tmp_path / "run", source, 2, output_hidden_states=output)
        assert compare(command, reference, target)[0] == 0
        without = write_single_layer(
            tmp_path / "unmasked", source, 2, output_hidden_states=output, input_attention_mask=None
        )
        assert compare(command, reference, without)[0] == 1

    def test_golden_that_lacks_the_layers_input_leaves_it_unchecked(
        self, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        reference = write_golden(tmp_path / "full_model", source)
        (reference / "layer_1_output.pt").unlink()
        exit_code, record = compare(command, reference, write_single_layer(tmp_path / "run", source, 2))
        assert exit_code == 0
        assert any("nothing tells what was fed to layer 2" in note for note in record["notes"])

    def test_classic_limits_judge_old_captures(
        self, source: Capture, command: Command, tmp_path: Path
    ) -> None:
        reference = write_golden(tmp_path / "full_model", source)
        target = write_single_layer(tmp_path / "run", source, 2)
        exit_code, record = compare(command, reference, target, "--criteria", "classic")
        assert (exit_code, record["criteria"]) == (0, "classic")
        wrong = write_single_layer(
            tmp_path / "wrong", source, 2, output_hidden_states=2 * source.read(2, Site.OUTPUT)
        )
        exit_code, record = compare(command, reference, wrong, "--criteria", "classic")
        assert exit_code == 1
        assert "max_abs_diff" in record["sites"][0]["reason"]


def test_folder_that_holds_no_capture_is_named(golden: Path, command: Command, tmp_path: Path) -> None:
    exit_code, record = compare(command, golden, tmp_path)
    assert exit_code == 3
    assert f"no capture at {tmp_path}" in record["error"]
