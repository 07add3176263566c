from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import (
    CaptureWriter,
    WrittenFiles,
    open_capture,
    read_shared,
    refuse_other_owner,
    wait_for_lock,
)
from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import LOCK_NAME, locked_directory
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
        writer.write(0, tensors, twin=twin, floor=floor)
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
        writer.write(0, {Site.OUTPUT: tensor})
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
                writer.write(0, tensors)
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
        writer.write(
            None,
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
        writer.write(0, layer_of(0))
        # A directory where the layer's file should go: the floor is written, the layer is not.
        (tmp_path / "layer_1.safetensors").mkdir()
        with pytest.raises(CaptureError, match=r"cannot write .*layer_1\.safetensors"):
            writer.write(1, layer_of(1), floor={"output.error": torch.ones(2, 3)})
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


Write = Callable[..., None]


@pytest.fixture
def write(describe: Callable[..., Description], inputs: Inputs, layer_of: Any) -> Write:
    """Writes a capture of three layers, calling `disturb` before it is finished, and `afterwards` behind that."""

    def write(directory: Path, *, disturb: Any = None, afterwards: Any = None) -> None:
        with open_capture(directory, describe(), inputs=inputs) as writer:
            for layer in range(3):
                if layer not in writer.complete_layers:
                    writer.write(layer, layer_of(layer))
            writer.write_json("extra.json", {"a": 1})
            if disturb:
                disturb(directory)
            writer.finish()
            if afterwards:
                afterwards(directory)

    return write


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def alter(name: str) -> Callable[[Path], None]:
    """Changes the last byte of a file, which keeps its size."""

    def change(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return change


@pytest.mark.parametrize(
    "name",
    ["layer_0.safetensors", "layer_2.safetensors", "inputs.safetensors", "extra.json", "manifest.json"],
)
def test_file_that_was_removed_fails_the_run(write: Write, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"were removed or changed while .*found {name} is missing"
    ) as caught:
        write(tmp_path / "run", disturb=remove(name))
    is_known = name != "manifest.json"
    assert not is_known or not Capture.open(tmp_path / "run").is_complete
    assert str(caught.value).endswith("again." if is_known else "again, with another --output-dir.")
    # That mends it.
    again = tmp_path / ("run" if is_known else "other")
    write(again)
    assert Capture.open(again).is_complete


@pytest.mark.parametrize("name", ["layer_1.safetensors", "extra.json", "manifest.json"])
def test_file_that_was_changed_fails_the_run(write: Write, tmp_path: Path, name: str) -> None:
    with pytest.raises(CaptureError, match="were removed or changed"):
        write(tmp_path, disturb=alter(name))


def test_file_that_was_removed_after_the_finish_fails_the_run(write: Write, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"found layer_1\.safetensors is missing"):
        write(tmp_path, afterwards=remove("layer_1.safetensors"))


def test_folder_that_was_copied_back_is_as_good(write: Write, tmp_path: Path) -> None:
    def copy_back(directory: Path) -> None:
        shutil.copytree(directory, tmp_path / "copy")
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "copy", directory)

    write(tmp_path / "run", disturb=copy_back)
    assert Capture.open(tmp_path / "run").is_complete


def test_stored_layer_that_a_resumed_run_lost_fails_it(
    write: Write, describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write(0, layer_of(0))
    with pytest.raises(CaptureError, match=r"layer_0\.safetensors is missing"):
        write(tmp_path, disturb=remove("layer_0.safetensors"))


class TestFilesOfOtherRanks:
    """Files that only the manifest tells of."""

    @pytest.fixture
    def writer(self, write: Write, tmp_path: Path) -> CaptureWriter:
        write(tmp_path)
        return CaptureWriter(tmp_path, Capture.open(tmp_path).manifest)

    def require(self, writer: CaptureWriter) -> None:
        WrittenFiles(writer.directory).require(writer.manifest, manifest_name="manifest.json", patience_s=0.3)

    def test_are_looked_for(self, writer: CaptureWriter) -> None:
        self.require(writer)
        (writer.directory / "layer_1.safetensors").unlink()
        with pytest.raises(CaptureError, match=r"layer_1\.safetensors is missing"):
            self.require(writer)

    def test_must_have_the_size_of_their_header(self, writer: CaptureWriter) -> None:
        path = writer.directory / "layer_1.safetensors"
        safetensors.torch.save_file({"output": torch.ones(4)}, path)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CaptureError, match=r"layer_1\.safetensors is damaged"):
            self.require(writer)


def test_directory_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    late = threading.Timer(0.3, (tmp_path / LOCK_NAME).write_text, ["mine"])
    late.start()
    wait_for_lock(tmp_path, "mine", patience_s=10)
    late.join()


@pytest.mark.parametrize(
    ("left", "found"), [(None, "none"), ("", "that of another"), ("x", "that of another")]
)
def test_directory_of_another_run_is_refused(tmp_path: Path, left: str | None, found: str) -> None:
    if left is not None:
        (tmp_path / LOCK_NAME).write_text(left)
    with pytest.raises(CaptureError, match=f"is not the directory that rank 0 opened: .*, found {found}\\."):
        wait_for_lock(tmp_path, "mine", patience_s=0)


def test_rank_that_outlived_its_run_writes_nothing_into_the_next(tmp_path: Path) -> None:
    refuse_other_owner(tmp_path, "mine")
    with locked_directory(tmp_path, owner="mine"):
        refuse_other_owner(tmp_path, "mine")
    with locked_directory(tmp_path, owner="next"), pytest.raises(CaptureError, match="another run writes in"):
        refuse_other_owner(tmp_path, "mine")


@pytest.fixture
def writer(tmp_path: Path, describe: Any, inputs: Any, layer_of: Any) -> CaptureWriter:
    """The writer of a capture that has one layer."""
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write(0, layer_of(0))
    return writer


def test_tensor_that_shows_late_is_waited_for(writer: CaptureWriter, tmp_path: Path, layer_of: Any) -> None:
    file, away = tmp_path / "layer_0.safetensors", tmp_path / "away"
    file.rename(away)
    late = threading.Timer(0.3, away.rename, [file])
    late.start()
    entry = next(entry for entry in writer.manifest.entries if entry.site == Site.OUTPUT)
    found = read_shared(tmp_path, writer.manifest, entry, patience_s=10)
    late.join()
    assert torch.equal(found, layer_of(0)[Site.OUTPUT])


def test_file_of_another_run_is_not_taken_for_it(
    writer: CaptureWriter, tmp_path: Path, layer_of: Any
) -> None:
    entry = next(entry for entry in writer.manifest.entries if entry.site == Site.OUTPUT)
    writer.write(1, layer_of(1))
    (tmp_path / "layer_1.safetensors").rename(tmp_path / "layer_0.safetensors")
    with pytest.raises(
        CaptureError,
        match="output of layer 0 does not show in .*: found .*output of layer 0 in layer_0.safetensors does not match",
    ):
        read_shared(tmp_path, writer.manifest, entry, patience_s=0)
