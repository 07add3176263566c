from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Entry, Manifest
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.resumption import (
    add_part,
    find_free_directory,
    holds_same,
    is_numbered,
    numbered_directories,
    part_name,
    refuse_other_run,
)
from minimax_tools.capture.writer import CaptureWriter, tidy_capture
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import locked_directory

STATES = torch.ones(2, 3, 4)
# The target of a run once the port's file was edited.
EDITED = "e" * 64


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The lines that the resumption logs."""
    caplog.set_level(logging.INFO)
    return caplog


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("until", [0, 1, 2])
def test_interrupted_capture_goes_on_after_its_last_whole_layer(
    recipe: Any, tmp_path: Path, log: pytest.LogCaptureFixture, until: int
) -> None:
    recipe.write(tmp_path / "plain")
    recipe.write(tmp_path / "cut", until=until)
    recipe.write(tmp_path / "cut")
    assert recipe.written == list(range(until, 3))
    assert contents(tmp_path / "cut") == contents(tmp_path / "plain")
    assert (f"Resuming {tmp_path / 'cut'} after layer {until - 1}." in log.text) == (until > 0)
    assert "Starting anew" not in log.text


def test_what_a_killed_run_left_half_written_is_removed(recipe: Any, tmp_path: Path) -> None:
    recipe.write(tmp_path / "plain")
    recipe.write(tmp_path / "cut", until=1)
    for name in (".layer_1.safetensors.0123abcd.tmp", ".manifest.json.0123abcd.tmp"):
        (tmp_path / "cut" / name).mkdir()
        (tmp_path / "cut" / name / "half").write_bytes(b"half")
    (tmp_path / "cut/.lock").touch()
    # A layer whose files are there but which the manifest does not list yet is written again.
    (tmp_path / "cut/layer_1.safetensors").write_bytes(b"whole, but unlisted")
    recipe.write(tmp_path / "cut")
    assert recipe.written == [1, 2]
    assert contents(tmp_path / "cut") == contents(tmp_path / "plain")


def test_what_a_run_left_that_was_killed_at_its_end_is_tidied_unless_another_writes(
    recipe: Any, tmp_path: Path
) -> None:
    recipe.write(tmp_path)
    whole = contents(tmp_path)

    def leave() -> None:
        (tmp_path / ".lock").touch()
        (tmp_path / ".manifest.json.0123abcd.tmp").mkdir(exist_ok=True)

    leave()
    tidy_capture(tmp_path)
    assert contents(tmp_path) == whole
    with locked_directory(tmp_path):
        leave()
        tidy_capture(tmp_path)
        assert (tmp_path / ".lock").exists()
        assert (tmp_path / ".manifest.json.0123abcd.tmp").exists()
    tidy_capture(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    "left",
    [[], ["manifest.json"], [".manifest.json.0123abcd.tmp"], ["manifest.json", "inputs.safetensors"]],
)
def test_run_killed_before_its_first_layer_does_not_block_the_directory(
    recipe: Any, tmp_path: Path, left: list[str]
) -> None:
    recipe.write(tmp_path / "plain")
    recipe.write(tmp_path / "cut", until=0)
    for path in (tmp_path / "cut").iterdir():
        if path.name not in left:
            path.unlink()
    for path in (tmp_path / "cut" / name for name in left):
        path.mkdir() if path.suffix == ".tmp" else path.touch(exist_ok=True)
    recipe.write(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "plain")


def test_other_description_starts_anew_says_why_and_leaves_nothing(
    recipe: Any, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    other = {"target": "port.py:Layer", "target_digest": "3" * 64}
    recipe.write(tmp_path / "plain", **other)
    recipe.write(tmp_path / "used", until=2)
    for name in ("layer_61.safetensors", "layer_0.fp32.safetensors", "model.safetensors", "generation.json"):
        (tmp_path / "used" / name).write_bytes(b"old")
    recipe.write(tmp_path / "used", **other)
    assert recipe.written == [0, 1, 2]
    assert (
        f"Starting anew in {tmp_path / 'used'}: the capture there has other target, target_digest."
        in log.text
    )
    assert contents(tmp_path / "used") == contents(tmp_path / "plain")


@pytest.mark.parametrize("hidden_states", [STATES + 1, STATES.bfloat16(), torch.ones(2, 3, 5), None], ids=str)
def test_other_hidden_states_start_anew(
    recipe: Any, tmp_path: Path, log: pytest.LogCaptureFixture, hidden_states: torch.Tensor | None
) -> None:
    recipe.write(tmp_path, until=2, hidden_states=STATES)
    recipe.write(tmp_path, until=2, hidden_states=STATES.clone())
    assert recipe.written == []
    recipe.write(tmp_path, hidden_states=hidden_states)
    assert recipe.written == [0, 1, 2]
    assert "the capture there began with other hidden states" in log.text


OTHER_DIGEST = "a stored tensor does not match its digest"


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "layer_0.safetensors",
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
            OTHER_DIGEST,
        ),
        ("layer_1.safetensors", lambda path: path.write_bytes(path.read_bytes()[:20]), OTHER_DIGEST),
        ("layer_1.safetensors", Path.unlink, OTHER_DIGEST),
        ("manifest.json", lambda path: path.write_text("{"), "manifest.json is damaged"),
    ],
    ids=["altered", "cut", "removed", "manifest"],
)
def test_damaged_capture_is_made_anew_and_says_why(
    recipe: Any,
    tmp_path: Path,
    log: pytest.LogCaptureFixture,
    name: str,
    change: Callable[[Path], object],
    reason: str,
) -> None:
    recipe.write(tmp_path, until=2)
    change(tmp_path / name)
    recipe.write(tmp_path)
    assert recipe.written == [0, 1, 2]
    assert reason in log.text
    recipe.write(tmp_path)
    assert recipe.written == [0, 1, 2]
    assert "the same capture is there, complete" in log.text


@pytest.mark.parametrize(
    "files",
    [
        {"readme.txt": "mine"},
        {"weights.safetensors": "mine"},
        {"manifest.json": json.dumps({"name": "my app"}), "index.html": "mine"},
        {"manifest.json": "{", "config.json": "{}"},
    ],
)
def test_directory_of_others_is_refused_and_left_alone(
    recipe: Any, tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        CaptureError, match=r"is not empty and holds no capture: found .*Choose another --output-dir"
    ):
        recipe.write(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_notes_beside_a_capture_survive_it(recipe: Any, tmp_path: Path) -> None:
    recipe.write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots.json").mkdir()
    recipe.write(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "plots.json").is_dir()


class TestHiddenStatesThatAreMade:
    """A first input that takes work to make: made once, and not again where the stored one counts."""

    FED = torch.full((2, 3, 4), -1.0).bfloat16()

    @pytest.fixture
    def made(self) -> list[str]:
        return []

    @pytest.fixture
    def write(self, recipe: Any, made: list[str]) -> Callable[..., None]:
        def make() -> torch.Tensor:
            made.append("made")
            return self.FED

        def write(directory: Path, *, until: int = 3) -> None:
            recipe.write(directory, until=until, hidden_states=make)

        return write

    def test_are_not_made_again_behind_a_stored_layer(
        self, write: Any, recipe: Any, made: list[str], tmp_path: Path
    ) -> None:
        write(tmp_path / "whole")
        write(tmp_path / "cut", until=1)
        write(tmp_path / "cut")
        assert (recipe.written, len(made)) == ([1, 2], 2)
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")

    def test_are_made_again_where_no_layer_is_stored(
        self, write: Any, made: list[str], tmp_path: Path
    ) -> None:
        write(tmp_path, until=0)
        write(tmp_path)
        assert len(made) == 2

    def test_are_made_again_where_the_stored_ones_are_not_what_the_first_layer_was_fed(
        self, write: Any, recipe: Any, made: list[str], tmp_path: Path
    ) -> None:
        write(tmp_path, until=1)
        writer = CaptureWriter(tmp_path, Capture.open(tmp_path).manifest)
        writer.write_inputs(recipe.inputs, self.FED + 1)
        write(tmp_path)
        assert (recipe.written, len(made)) == ([0, 1, 2], 2)


class TestParts:
    """Manifests of several ranks that write one capture."""

    @pytest.fixture
    def parts(self, recipe: Any, tmp_path: Path) -> list[Manifest]:
        """Manifests of two ranks, of which the second one wrote layers 1 and 2."""
        with recipe.open(tmp_path) as first:
            second = CaptureWriter(tmp_path, first.manifest, manifest_name=part_name(1))
            for writer, layers in ((first, (0,)), (second, (1, 2))):
                for layer in layers:
                    writer.write(layer, recipe.layer(layer))
            return [first.manifest, second.manifest]

    def test_that_are_told_make_the_capture_of_one_process(
        self, recipe: Any, parts: list[Manifest], tmp_path: Path
    ) -> None:
        # What the ranks tell is enough: the part's file need not be seen.
        (tmp_path / part_name(1)).unlink()
        writer = CaptureWriter(tmp_path, parts[0])
        writer.add_part(decode(Manifest, encode(parts[1])))
        writer.finish()
        recipe.write(tmp_path / "one")
        assert (tmp_path / "manifest.json").read_bytes() == (tmp_path / "one/manifest.json").read_bytes()

    def test_add_the_digests_of_their_layers_alone(self, recipe: Any) -> None:
        files = {f"{group}.floor.safetensors": {} for group in ("layer_1", "layer_11", "model")}
        begun = Manifest(description=recipe.describe())
        part = replace(begun.with_digests(files), complete_layers=(1,))
        assert list(add_part(begun, part).digests) == ["layer_1.floor.safetensors"]
        logits = Entry.of(None, "logits", file="model.safetensors", tensor=torch.ones(1))
        part = part.with_layer(None, (logits,))
        assert list(add_part(begun, part).digests) == ["layer_1.floor.safetensors", "model.floor.safetensors"]

    def test_are_taken_up_and_removed_by_a_run_that_resumes(
        self, recipe: Any, parts: list[Manifest], tmp_path: Path
    ) -> None:
        with recipe.open(tmp_path) as writer:
            assert writer.complete_layers == (0, 1, 2)
            assert not (tmp_path / part_name(1)).exists()
        assert Capture.open(tmp_path).layers == (0, 1, 2)

    @pytest.mark.parametrize("damage", ["{", "[]", None])
    def test_that_are_damaged_or_of_another_capture_do_not_count(
        self, recipe: Any, parts: list[Manifest], tmp_path: Path, damage: str | None
    ) -> None:
        part = tmp_path / part_name(1)
        other = part.read_text().replace('"builtin"', '"other"')
        part.write_text(other if damage is None else damage)
        with recipe.open(tmp_path) as writer:
            assert writer.complete_layers == (0,)

    @pytest.mark.parametrize("is_resumed", [False, True])
    def test_records_stay_with_the_layers_that_they_are_of(
        self, recipe: Any, parts: list[Manifest], tmp_path: Path, is_resumed: bool
    ) -> None:
        record = ReadRecord.begun("a", plan="p").write(tmp_path / RECORDS_FOLDER)
        with recipe.open(tmp_path, target="builtin" if is_resumed else "other"):
            assert record.exists() == is_resumed


class TestPlaceOfARun:
    """The folder that a run writes into, beside other finished runs."""

    def test_free_place_and_same_run_keep_their_name(self, recipe: Any, tmp_path: Path) -> None:
        sweep, run = tmp_path / "sweep", recipe.describe()
        assert find_free_directory(sweep, run) == sweep
        assert not holds_same(sweep, run)
        recipe.write(sweep)
        assert find_free_directory(sweep, run) == sweep
        assert holds_same(sweep, run)
        # Configs make no other run.
        refuse_other_run(sweep, recipe.describe(model_config={"rope_theta": 1}, port_config={"a": 1}))

    def test_other_finished_run_is_kept_and_told(
        self, recipe: Any, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        sweep, edited = tmp_path / "sweep", recipe.describe(target_digest=EDITED)
        recipe.write(sweep)
        second = find_free_directory(sweep, edited)
        assert second == tmp_path / "sweep_2"
        assert f"since {sweep} holds another run (other target_digest). Add --overwrite to" in log.text
        with pytest.raises(CaptureError, match="finished capture: found other target_digest") as refused:
            refuse_other_run(sweep, edited)
        expected = "Add --overwrite to replace it, or name another folder with --output-dir."
        assert refused.value.next_step == expected
        recipe.write(second, target_digest=EDITED)
        assert find_free_directory(sweep, edited) == second
        assert find_free_directory(sweep, recipe.describe(target="reference")) == tmp_path / "sweep_3"
        assert find_free_directory(sweep, recipe.describe()) == sweep

    def test_other_unfinished_run_has_nothing_to_keep(self, recipe: Any, tmp_path: Path) -> None:
        recipe.write(tmp_path, until=0)
        edited = recipe.describe(target_digest=EDITED)
        assert find_free_directory(tmp_path, edited) == tmp_path
        refuse_other_run(tmp_path, edited)

    def test_folder_of_something_else_is_not_written_into(self, recipe: Any, tmp_path: Path) -> None:
        recipe.write(tmp_path / "sweep")
        (tmp_path / "sweep_2").mkdir()
        (tmp_path / "sweep_2" / "notes.txt").write_text("mine")
        free = find_free_directory(tmp_path / "sweep", recipe.describe(target_digest=EDITED))
        assert free == tmp_path / "sweep_3"

    def test_numbered_folders_are_those_beside(self, recipe: Any, tmp_path: Path) -> None:
        for name in ("sweep_0_to_3", "sweep_0_to_3_2", "sweep_0_to_31", "sweep_0_to_3_old"):
            recipe.write(tmp_path / name)
        sweep = tmp_path / "sweep_0_to_3"
        assert {path.name for path in numbered_directories(sweep)} == {"sweep_0_to_3", "sweep_0_to_3_2"}
        assert is_numbered(sweep, sweep)
        assert not is_numbered(tmp_path / "elsewhere" / "sweep_0_to_3_2", sweep)
