from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import (
    CaptureWriter,
    WrittenFiles,
    read_shared,
    refuse_other_owner,
    wait_for_lock,
)
from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import LOCK_NAME, locked_directory
from minimax_tools.model.sites import ModelSite, Site

Disturb = Callable[[Path], object]


def test_directory_is_a_capture_before_its_first_layer(recipe: Any, tmp_path: Path) -> None:
    hidden_states = torch.randn(2, 3, 4).bfloat16()
    with recipe.open(tmp_path, hidden_states=hidden_states):
        capture = Capture.open(tmp_path)
        assert (capture.layers, capture.manifest.is_complete) == ((), False)
    assert {path.name for path in tmp_path.iterdir()} == {"inputs.safetensors", "manifest.json"}
    assert torch.equal(capture.read_hidden_states(), hidden_states)


def test_layers_and_model_sites_are_written_with_their_floors(recipe: Any, tmp_path: Path) -> None:
    capture = recipe.write_golden(tmp_path)
    output, logits = recipe.layer(1)[Site.OUTPUT], torch.arange(30.0).reshape(2, 3, 5)
    for layer, site, values in ((1, Site.OUTPUT, output), (None, ModelSite.LOGITS, logits)):
        assert torch.equal(capture.read(layer, site), values)
        assert capture.read(layer, site).dtype == values.dtype
    assert torch.equal(capture.read_twin(1, Site.OUTPUT), output.float() + 0.5)
    assert torch.equal(capture.read_twin(None, ModelSite.LOGITS), logits)
    assert torch.equal(capture.read_floor(1, "output.error"), torch.ones(2, 3))
    assert torch.equal(capture.read_floor(None, "logits.error"), torch.zeros(2, 3))
    # One file for each kind, with the sites' names.
    assert set(safetensors.torch.load_file(tmp_path / "layer_0.safetensors")) == {"input", "output"}
    assert set(safetensors.torch.load_file(tmp_path / "layer_0.fp32.safetensors")) == {"output"}
    assert set(safetensors.torch.load_file(tmp_path / "model.floor.safetensors")) == {"logits.error"}


def test_writer_knows_what_it_has_written(recipe: Any, tmp_path: Path) -> None:
    with recipe.open(tmp_path) as writer:
        writer.write(0, recipe.layer(0))
        assert (writer.complete_layers, writer.has_model_sites) == ((0,), False)
        assert torch.equal(writer.capture.read(0, Site.OUTPUT), recipe.layer(0)[Site.OUTPUT])
        assert writer.capture.digest_note == ""
        writer.write(None, {ModelSite.LOGITS: torch.ones(2, 3, 5)})
        assert writer.has_model_sites


def test_tensor_that_lies_transposed_is_written_in_row_major_order(recipe: Any, tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(2, 4, 3).transpose(1, 2)
    with recipe.open(tmp_path) as writer:
        writer.write(0, {Site.OUTPUT: tensor})
    assert torch.equal(Capture.open(tmp_path).read(0, Site.OUTPUT), tensor)


def test_entries_are_in_the_order_of_sites_and_the_same_for_any_number_of_threads(
    recipe: Any, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Long enough for torch to share its sums among its threads.
    sites = (Site.INPUT, Site.ATTN_DELTA, Site.MOE_DELTA, Site.OUTPUT)
    tensors = {site: torch.randn(2, 500, 160, generator=generator) for site in sites}
    num_threads, entries = torch.get_num_threads(), {}
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            with recipe.open(tmp_path / str(number)) as writer:
                writer.write(0, tensors)
                entries[number] = writer.manifest.entries
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(num_threads)
    assert [entry.site for entry in entries[1]] == [str(site) for site in sites]
    assert entries[1] == entries[4]


def test_layer_that_fails_to_be_written_is_not_listed(recipe: Any, tmp_path: Path) -> None:
    with recipe.open(tmp_path) as writer:
        writer.write(0, recipe.layer(0))
        # A directory where the layer's file should go: the floor is written, the layer is not.
        (tmp_path / "layer_1.safetensors").mkdir()
        with pytest.raises(CaptureError, match=r"cannot write .*layer_1\.safetensors"):
            writer.write(1, recipe.layer(1), floor={"output.error": torch.ones(2, 3)})
        assert writer.complete_layers == (0,)
    assert Capture.open(tmp_path).layers == (0,)


def test_json_beside_the_tensors_is_text_of_the_whole_alphabet(recipe: Any, tmp_path: Path) -> None:
    with recipe.open(tmp_path) as writer:
        writer.write_json("generation.json", {"text": "Grüße"})
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.write_json("generation.json", {"nan": float("nan")})
    assert "Grüße" in (tmp_path / "generation.json").read_text(encoding="utf-8")


def remove(name: str) -> Disturb:
    return lambda directory: (directory / name).unlink()


def alter(name: str) -> Disturb:
    """Changes the last byte of a file, which keeps its size."""

    def change(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return change


class TestFilesThatAreDisturbed:
    """Files that are removed or changed while the capture is written."""

    @pytest.fixture
    def run(self, recipe: Any) -> Callable[..., None]:
        """Writes a capture of three layers, calling `disturb` before it is finished, and `afterwards` behind that."""

        def run(
            directory: Path, *, disturb: Disturb | None = None, afterwards: Disturb | None = None
        ) -> None:
            with recipe.open(directory) as writer:
                for layer in range(3):
                    if layer not in writer.complete_layers:
                        writer.write(layer, recipe.layer(layer))
                writer.write_json("extra.json", {"a": 1})
                if disturb:
                    disturb(directory)
                writer.finish()
                if afterwards:
                    afterwards(directory)

        return run

    @pytest.mark.parametrize("name", ["layer_0.safetensors", "inputs.safetensors", "extra.json"])
    def test_one_that_was_removed_fails_the_run_and_the_next_mends_it(
        self, run: Any, tmp_path: Path, name: str
    ) -> None:
        with pytest.raises(
            CaptureError, match=rf"were removed or changed while .*found {name} is missing.*again\.$"
        ):
            run(tmp_path, disturb=remove(name))
        assert not Capture.open(tmp_path).is_complete
        run(tmp_path)
        assert Capture.open(tmp_path).is_complete

    def test_removed_manifest_asks_for_another_directory(self, run: Any, tmp_path: Path) -> None:
        with pytest.raises(CaptureError, match=r"manifest\.json is missing.*, with another --output-dir\.$"):
            run(tmp_path, disturb=remove("manifest.json"))

    @pytest.mark.parametrize("name", ["layer_1.safetensors", "extra.json", "manifest.json"])
    def test_one_that_was_changed_fails_the_run(self, run: Any, tmp_path: Path, name: str) -> None:
        with pytest.raises(CaptureError, match="were removed or changed"):
            run(tmp_path, disturb=alter(name))

    def test_one_that_was_removed_after_the_finish_fails_the_run(self, run: Any, tmp_path: Path) -> None:
        with pytest.raises(CaptureError, match=r"found layer_1\.safetensors is missing"):
            run(tmp_path, afterwards=remove("layer_1.safetensors"))

    def test_folder_that_was_copied_back_is_as_good(self, run: Any, tmp_path: Path) -> None:
        def copy_back(directory: Path) -> None:
            shutil.copytree(directory, tmp_path / "copy")
            shutil.rmtree(directory)
            shutil.copytree(tmp_path / "copy", directory)

        run(tmp_path / "run", disturb=copy_back)
        assert Capture.open(tmp_path / "run").is_complete

    def test_stored_layer_that_a_resumed_run_lost_fails_it(
        self, run: Any, recipe: Any, tmp_path: Path
    ) -> None:
        recipe.write(tmp_path, until=1)
        with pytest.raises(CaptureError, match=r"layer_0\.safetensors is missing"):
            run(tmp_path, disturb=remove("layer_0.safetensors"))

    def test_files_of_other_ranks_must_be_there_with_the_size_of_their_header(
        self, recipe: Any, tmp_path: Path
    ) -> None:
        manifest = recipe.write(tmp_path).manifest

        def require() -> None:
            # Files that only the manifest tells of.
            WrittenFiles(tmp_path).require(manifest, manifest_name="manifest.json", patience_s=0.1)

        require()
        path = tmp_path / "layer_1.safetensors"
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CaptureError, match=r"layer_1\.safetensors is missing"):
            require()
        path.write_bytes(content[:-1])
        with pytest.raises(CaptureError, match=r"layer_1\.safetensors is damaged"):
            require()


def test_directory_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    late = threading.Timer(0.1, (tmp_path / LOCK_NAME).write_text, ["mine"])
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


def test_tensor_of_another_rank_is_waited_for_and_must_be_of_its_run(recipe: Any, tmp_path: Path) -> None:
    writer = CaptureWriter(tmp_path, recipe.write(tmp_path, until=2).manifest)
    file, away = tmp_path / "layer_0.safetensors", tmp_path / "away"
    (entry,) = (one for one in writer.manifest.entries if (one.layer, one.site) == (0, "output"))
    file.rename(away)
    late = threading.Timer(0.1, away.rename, [file])
    late.start()
    found = read_shared(tmp_path, writer.manifest, entry, patience_s=10)
    late.join()
    assert torch.equal(found, recipe.layer(0)[Site.OUTPUT])
    (tmp_path / "layer_1.safetensors").rename(file)
    with pytest.raises(
        CaptureError,
        match="output of layer 0 does not show in .*: found .* in layer_0.safetensors does not match",
    ):
        read_shared(tmp_path, writer.manifest, entry, patience_s=0)
