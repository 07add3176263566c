"""Captures in the `.pt` layout of the tools before mm2, on either side of `mm2-compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.cli import main as mm2_compare
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.sites import ModelSite, Site

NUM_LAYERS = 4


@dataclass(frozen=True)
class Old:
    """Writes a golden's values as the older tools did, and judges what is written."""

    source: Capture
    command: Callable[..., click.testing.Result]
    folder: Path

    def output(self, layer: int = 2) -> torch.Tensor:
        return self.source.read(layer, Site.OUTPUT)

    @property
    def wrong_output(self) -> torch.Tensor:
        """Layer 2's output without what the experts add, on the second row."""
        output = self.output()
        output[1] = self.source.read(2, Site.ATTN_RESIDUAL)[1]
        return output

    def whole(self, *, with_mask: bool = True) -> Path:
        """Write all layers' outputs and the embedding, as a run of the whole model."""
        directory = self._new("full_model")
        inputs = self.source.read_inputs()
        held = {"input_ids": inputs.input_ids}
        if with_mask:
            held["attention_mask"] = inputs.attention_mask
        torch.save({"model_path": "/models/MiniMax-M2", "inputs": held}, directory / "metadata.pt")
        torch.save(self.source.read(None, ModelSite.EMBEDDING), directory / "embedding_output.pt")
        for layer in range(NUM_LAYERS):
            torch.save(self.output(layer), directory / f"layer_{layer}_output.pt")
        return directory

    def layer(self, name: str = "run", **changes: Any) -> Path:
        """Write a run of layer 2."""
        record = {
            "layer_idx": 2,
            "input_hidden_states": self.source.read(2, Site.INPUT),
            "input_attention_mask": self.source.read_inputs().attention_mask,
            "output_hidden_states": self.output(),
        }
        torch.save({**record, **changes}, self._new(name) / "layer_output.pt")
        return self.folder / name

    def range(self, name: str = "run", **changes: Any) -> Path:
        """Write a run of layers 0 to 2."""
        record = {
            "start_layer": 0,
            "end_layer": 2,
            "num_layers": 3,
            "input_hidden_states": self.source.read(0, Site.INPUT),
            "output_hidden_states": self.output(),
        }
        torch.save({**record, **changes}, self._new(name) / "layers_output.pt")
        return self.folder / name

    def compare(self, target: Path, *options: str, golden: Path | None = None) -> tuple[int, dict[str, Any]]:
        sides = ("--golden", golden or self.source.directory, "--run", target)
        result = self.command(mm2_compare, *sides, "--json", "--quiet", *options)
        return result.exit_code, json.loads(result.stdout)

    def _new(self, name: str) -> Path:
        (self.folder / name).mkdir()
        return self.folder / name


@pytest.fixture
def old(golden: Path, command: Callable[..., click.testing.Result], tmp_path: Path) -> Old:
    return Old(Capture.open(golden), command, tmp_path)


class TestDeviceRun:
    def test_single_layer_is_judged_by_the_goldens_noise(self, old: Old) -> None:
        exit_code, record = old.compare(old.layer())
        assert (exit_code, record["verdict"], record["compared"], record["of"]) == (0, "pass", 1, 1)
        (site,) = record["sites"]
        assert (site["layer"], site["site"]) == (2, "output")
        # The golden's variants stray a little further than the golden, which the run repeats.
        assert 0.6 < site["noise"]["whole"] <= 1.0
        assert record["notes"] == [
            "one side does not record its model and tokens: that they agree was not checked",
            "run: its layout has no digests; that its files are as they were written was not checked",
        ]

    def test_wrong_output_is_blamed_on_the_whole_layer(self, old: Old) -> None:
        exit_code, record = old.compare(old.layer(output_hidden_states=old.wrong_output))
        assert (exit_code, record["verdict"]) == (1, "fail")
        (blame,) = record["blame"]
        assert (blame["layer"], blame["sites"][0], blame["sites"][-1]) == (2, "input_norm", "output")

    def test_other_input_and_other_mask_are_incomparable(self, old: Old) -> None:
        random = torch.randn(old.output().shape).bfloat16()
        exit_code, record = old.compare(old.layer(input_hidden_states=random))
        assert (exit_code, record["verdict"]) == (3, "incomparable")
        assert "the captures have different inputs: layer 2 got other hidden states" in record["error"]
        mask = torch.ones_like(old.source.read_inputs().attention_mask)
        exit_code, record = old.compare(old.layer("masked", input_attention_mask=mask))
        assert exit_code == 3
        assert "different inputs: attention_mask differs" in record["error"]
        assert "expected rows of 48, 33 tokens (golden), found 48, 48" in record["error"]

    def test_input_that_is_not_stored_is_told_and_suspected(self, old: Old) -> None:
        target = old.layer(input_hidden_states=None, output_hidden_states=old.wrong_output)
        exit_code, record = old.compare(target)
        assert exit_code == 1
        assert record["blame"][0]["sites"][0] == "input"
        assert any("nothing tells what was fed to layer 2" in note for note in record["notes"])

    def test_range_is_judged_at_its_end(self, old: Old) -> None:
        exit_code, record = old.compare(old.range())
        assert (exit_code, record["compared"]) == (0, 1)
        exit_code, record = old.compare(old.range("wrong", output_hidden_states=old.wrong_output))
        assert exit_code == 1
        (blame,) = record["blame"]
        assert (blame["layer"], blame["sites"][0], blame["sites"][-1]) == (2, "input", "output")

    def test_flat_output_and_a_float32_copy_pass(self, old: Old) -> None:
        flat = old.output().flatten(0, 1)
        assert old.compare(old.layer(output_hidden_states=flat, input_attention_mask=None))[0] == 0
        _, record = old.compare(old.layer("float32", output_hidden_states=old.output().float()))
        assert record["verdict"] == "pass"

    def test_layers_of_a_whole_model_run_are_judged_on_its_own_values(self, old: Old) -> None:
        target = old.whole()
        assert old.compare(target)[0] == 0
        for layer in (1, 2, 3):
            torch.save(3 * old.output(layer), target / f"layer_{layer}_output.pt")
        exit_code, record = old.compare(target)
        # Each puts out three times what a right layer makes of a third of what it was fed.
        assert (exit_code, [blame["layer"] for blame in record["blame"]]) == (1, [1, 2, 3])

    def test_token_that_is_not_finite_from_a_layer_on_fails_that_layer(self, old: Old) -> None:
        target = old.whole()
        for layer in range(1, NUM_LAYERS):
            output = old.output(layer)
            output[0, 3], output[0, 4] = float("nan"), float("inf")
            torch.save(output, target / f"layer_{layer}_output.pt")
        exit_code, record = old.compare(target)
        assert (exit_code, record["verdict"]) == (1, "fail")
        assert [blame["layer"] for blame in record["blame"]] == [1]


class TestGolden:
    def test_old_golden_judges_an_old_run_without_a_floor(self, old: Old) -> None:
        golden = old.whole()
        exit_code, record = old.compare(old.layer(), golden=golden)
        assert (exit_code, record["verdict"], record["compared"]) == (0, "pass", 1)
        assert any(note.startswith("the golden kept no noise floor") for note in record["notes"])
        # Without a floor and of a backend that nobody names, a tenth of the output is beyond doubt.
        wrong = old.layer("wrong", output_hidden_states=0.9 * old.output())
        exit_code, record = old.compare(wrong, golden=golden)
        assert (exit_code, record["verdict"]) == (1, "fail")

    def test_old_golden_judges_mm2s_run_by_its_outputs(self, old: Old, copyist: Any) -> None:
        golden = old.whole()
        exit_code, record = old.compare(copyist.device_run(), golden=golden)
        assert (exit_code, record["compared"], record["of"]) == (0, NUM_LAYERS, NUM_LAYERS * 17)
        target = copyist.device_run(
            {(2, Site.OUTPUT): lambda tensor: 2 * tensor},
            run=single_layer_run(2, sites_level="layer"),
            name="wrong",
        )
        assert old.compare(target, golden=golden)[0] == 1

    def test_mask_of_the_run_serves_where_the_golden_has_none(self, old: Old) -> None:
        golden, output = old.whole(with_mask=False), old.output()
        output[1, 33:] = torch.nan
        assert old.compare(old.layer(output_hidden_states=output), golden=golden)[0] == 0
        without = old.layer("unmasked", output_hidden_states=output, input_attention_mask=None)
        assert old.compare(without, golden=golden)[0] == 1

    def test_golden_that_lacks_the_layers_input_leaves_it_unchecked(self, old: Old) -> None:
        golden = old.whole()
        (golden / "layer_1_output.pt").unlink()
        exit_code, record = old.compare(old.layer(), golden=golden)
        assert exit_code == 0
        assert any("nothing tells what was fed to layer 2" in note for note in record["notes"])


def test_folder_that_holds_no_capture_is_named(old: Old) -> None:
    exit_code, record = old.compare(old.folder)
    assert exit_code == 3
    assert f"no capture at {old.folder}" in record["error"]
