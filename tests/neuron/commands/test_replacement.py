"""`mm2-test replacement`: its files, the lines that it prints, and the logits that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import ModelSite, Site

NUM_DECODED = 4
# The small model's vocabulary.
VOCABULARY = 512


@pytest.fixture
def ask(run: Any, small_fp8: Path, small_golden: Path, tmp_path: Path) -> Any:
    """Gives the command on one folder: the result, and its JSON."""

    def give(*options: object, tool: str = "nxdi", golden: Path = small_golden) -> tuple[Any, dict[str, Any]]:
        arguments = ("replacement", "--model", small_fp8, "--golden", golden, "--format", tool, "--quiet")
        given = ("--decode", NUM_DECODED) if "--decode" not in options else ()
        result = run(*arguments, *given, "--output-dir", tmp_path / "replaced", "--json", *options)
        return result, json.loads(result.stdout) if result.stdout.startswith("{") else {}

    return give


@pytest.fixture
def put(tmp_path: Path) -> Any:
    """Writes the logits of runs into the folder, by name."""

    def write(**logits: torch.Tensor) -> None:
        for name, found in logits.items():
            save_file({"it": found}, tmp_path / "replaced" / "logits" / f"{name}.safetensors")

    return write


@pytest.fixture(scope="module")
def logits(small_golden: Path) -> torch.Tensor:
    """The golden's own logits of each row's last tokens, [B,t,V]: a right port's, wherever its stream is replaced."""
    capture = Capture.open(small_golden)
    rows = zip(capture.read(None, ModelSite.LOGITS), capture.read_inputs().lengths, strict=True)
    return torch.stack([row[length - NUM_DECODED - 1 : length] for row, length in rows])


class TestNxdiFiles:
    def test_stream_is_the_goldens_at_every_point(self, ask: Any, small_golden: Path, tmp_path: Path) -> None:
        result, _ = ask()
        assert result.exit_code == 3
        golden = Capture.open(small_golden)
        expected = {f"layer_{layer}": golden.read(layer, Site.INPUT) for layer in range(4)}
        expected["final_norm"] = golden.read(3, Site.OUTPUT)
        files = {path.stem: path for path in (tmp_path / "replaced" / "stream").iterdir()}
        assert set(files) == set(expected)
        assert all(torch.equal(load_file(files[name])["stream"], expected[name]) for name in files)

    def test_printed_lines_are_complete(self, ask: Any, tmp_path: Path) -> None:
        _, record = ask("--layer", 3)
        text = "\n".join(record["lines"])
        assert f"run_replaced(application, '{tmp_path / 'replaced'}', point=3)" in text
        assert "num_layers=4, hidden_size=64" in text
        assert "batch_size=2, max_context_length=128" in text
        assert "writes logits/layer_3.safetensors" in text
        assert record["next"][-1].startswith("mm2-test replacement --model")


class TestSearch:
    def test_right_logits_are_taken_one_run_after_the_other(
        self, ask: Any, put: Any, logits: torch.Tensor, tmp_path: Path
    ) -> None:
        result, record = ask()
        points = []
        while not record["is_finished"]:
            point = record["waits_for"]["point"]
            points.append(point)
            # Both forms are read.
            if point == 1:
                torch.save(logits, tmp_path / "replaced" / "logits" / "layer_1.pt")
            else:
                put(**{"unreplaced" if point is None else f"layer_{point}": logits})
            result, record = ask()
        assert points == [2, 1, 0, None]
        assert (result.exit_code, record["verdict"]) == (0, "pass")

    def test_exhaustive_search_begins_at_the_end(self, ask: Any, put: Any, logits: torch.Tensor) -> None:
        _, record = ask("--exhaustive")
        assert record["waits_for"] == {"point": 4}
        put(final_norm=logits.roll(1, -1))
        result, record = ask("--exhaustive")
        assert (result.exit_code, record["blame"][0]["part"]) == (1, "the final norm or the head")
        # One run cannot tell it from a port without the lines.
        assert any("see that the lines are in it" in note for note in record["notes"])

    def test_the_same_logits_at_two_points_are_no_verdict_unless_the_head_lacks_weights(
        self, ask: Any, put: Any, logits: torch.Tensor
    ) -> None:
        ask()
        put(layer_2=logits.roll(1, -1), final_norm=logits.roll(1, -1))
        result, _ = ask()
        assert result.exit_code == 3
        assert "the same in every bit, whether its stream was replaced at layer 2's input" in result.stderr
        ask("--anew")
        put(layer_2=torch.zeros_like(logits), final_norm=torch.zeros_like(logits))
        result, record = ask()
        assert (result.exit_code, record["blame"][0]["part"]) == (1, "the final norm or the head")

    def test_mended_port_is_asked_for_all_runs_anew(self, ask: Any, put: Any, logits: torch.Tensor) -> None:
        ask()
        put(layer_2=logits.roll(1, -1), final_norm=logits, layer_3=logits)
        result, record = ask()
        assert (result.exit_code, record["blame"][0]["layer"]) == (1, 2)
        assert record["next"][0].endswith("--anew")
        result, record = ask("--anew")
        assert (result.exit_code, record["runs"], record["waits_for"]) == (3, [], {"point": 2})
        # The next command judges the run that is made now.
        assert "--anew" not in record["next"][0]


class TestRefusals:
    @pytest.mark.parametrize(
        "shape", [(1, 5, VOCABULARY), (2, 5, VOCABULARY - 1), (2, 40, VOCABULARY), (2, VOCABULARY)]
    )
    def test_logits_of_another_shape(self, ask: Any, put: Any, shape: tuple[int, ...]) -> None:
        ask()
        put(layer_2=torch.zeros(shape))
        expected = "expected [2,t,512] of each row's last t tokens, t at most 15"
        assert_refused(ask()[0], 3, f"{expected}, found {[*shape]}")

    def test_files_that_are_none_of_a_run(
        self, ask: Any, put: Any, logits: torch.Tensor, tmp_path: Path
    ) -> None:
        ask()
        put(layer_2=logits)
        folder = tmp_path / "replaced"
        save_file({"it": logits, "more": logits + 1}, folder / "logits" / "layer_2.safetensors")
        assert_refused(ask()[0], 3, "holds 2 tensors")
        put(layer_2=logits)
        (folder / "inputs.safetensors").write_text("torn")
        assert_refused(ask()[0], 3, "inputs.safetensors cannot be read")

    def test_folder_of_another_run_or_with_something_else(self, ask: Any, tmp_path: Path) -> None:
        (tmp_path / "replaced").mkdir()
        (tmp_path / "replaced" / "notes.txt").write_text("mine")
        assert_refused(ask()[0], 2, "expected a new or empty folder")
        (tmp_path / "replaced" / "notes.txt").unlink()
        ask()
        for options, message in (
            (("--decode", 5), "written for another num_decoded: expected num_decoded 5, found num_decoded 4"),
            (("--bucket", 256), "written for another bucket: expected bucket 256, found bucket 128"),
        ):
            assert_refused(ask(*options)[0], 2, message)
        assert_refused(ask(tool="vllm-neuron")[0], 2, "written for another tool, bucket")

    @pytest.mark.parametrize(
        ("options", "tool", "message"),
        [
            (("--bucket", 16), "nxdi", "24 columns for a bucket of 16"),
            (("--bucket", 128), "vllm-neuron", "--bucket is an option of --format nxdi"),
            (("--layer", 5), "nxdi", "expected 0 to 4, the last for the final norm"),
            (("--decode", 40), "nxdi", "of a prompt of 15 tokens 40 cannot be decoded"),
            (("--decode", 40), "vllm-neuron", "of a prompt of 15 tokens 40 cannot be decoded"),
        ],
    )
    def test_options_that_do_not_fit(self, ask: Any, options: Any, tool: str, message: str) -> None:
        assert_refused(ask(*options, tool=tool)[0], 2, message)
        # So the folder serves a corrected command.
        assert ask(tool=tool)[0].exit_code == 3

    def test_prompts_that_the_tools_compute_otherwise(
        self, ask: Any, make_golden: Any, small_fp8: Path
    ) -> None:
        rows = ("--input-ids", "5,6,7,8", "--input-ids", "5,6,7", "--padding-side", "left")
        left = make_golden(small_fp8, *rows, "--sites", "layer")
        result, _ = ask("--decode", 1, golden=left)
        # For NxD Inference the rows are laid out anew, padded on the right.
        assert (result.exit_code, "left padding" in result.stderr) == (3, False), result.stderr
        result, _ = ask("--decode", 1, golden=left, tool="vllm-neuron")
        assert_refused(result, 2, "row 0 begins with row 1")


def assert_refused(result: Any, exit_code: int, message: str) -> None:
    assert (result.exit_code, message in result.stderr) == (exit_code, True), result.stderr
