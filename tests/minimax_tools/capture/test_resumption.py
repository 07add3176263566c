from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Description, Entry, Manifest
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
from minimax_tools.capture.writer import CaptureWriter, open_capture, tidy_capture
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import locked_directory
from minimax_tools.model.inputs import Inputs


class Recipe:
    """Writes a capture of three layers, all of it or until it is interrupted."""

    def __init__(self, description: Description, inputs: Inputs, layer_of: Any) -> None:
        self.description = description
        self.inputs = inputs
        self.layer_of = layer_of
        self.written: list[int] = []

    def write(
        self,
        directory: Path,
        *,
        until: int = 3,
        description: Description | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> None:
        described = description or self.description
        self.written = []
        with open_capture(directory, described, inputs=self.inputs, hidden_states=hidden_states) as writer:
            self._layers(writer, until)
            if until == 3:
                writer.finish()

    def _layers(self, writer: CaptureWriter, until: int) -> None:
        for layer in range(until):
            if layer not in writer.complete_layers:
                writer.write(layer, self.layer_of(layer))
                self.written.append(layer)


@pytest.fixture
def recipe(describe: Any, inputs: Inputs, layer_of: Any) -> Recipe:
    return Recipe(describe(), inputs, layer_of)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The lines that the resumption logs."""
    caplog.set_level(logging.INFO)
    return caplog


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("until", [0, 1, 2])
def test_interrupted_capture_goes_on_after_its_last_whole_layer(
    recipe: Recipe, tmp_path: Path, log: pytest.LogCaptureFixture, until: int
) -> None:
    recipe.write(tmp_path / "plain")
    recipe.write(tmp_path / "cut", until=until)
    recipe.write(tmp_path / "cut")
    assert recipe.written == list(range(until, 3))
    assert contents(tmp_path / "cut") == contents(tmp_path / "plain")
    assert (f"Resuming {tmp_path / 'cut'} after layer {until - 1}." in log.text) == (until > 0)
    assert "Starting anew" not in log.text


def test_what_a_killed_run_left_half_written_is_removed(recipe: Recipe, tmp_path: Path) -> None:
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
    recipe: Recipe, tmp_path: Path
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
    recipe: Recipe, tmp_path: Path, left: list[str]
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


def test_other_description_starts_anew_and_says_why(
    recipe: Recipe, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    recipe.write(tmp_path, until=2)
    provenance = replace(recipe.description.provenance, target="port.py:Layer", target_digest="3" * 64)
    other = replace(recipe.description, provenance=provenance)
    recipe.write(tmp_path, description=other)
    assert recipe.written == [0, 1, 2]
    assert f"Starting anew in {tmp_path}: the capture there has other target, target_digest." in log.text
    assert Capture.open(tmp_path).description == other


STATES = torch.ones(2, 3, 4)


@pytest.mark.parametrize("hidden_states", [STATES + 1, STATES.bfloat16(), torch.ones(2, 3, 5), None], ids=str)
def test_other_hidden_states_start_anew(
    recipe: Recipe, tmp_path: Path, log: pytest.LogCaptureFixture, hidden_states: torch.Tensor | None
) -> None:
    recipe.write(tmp_path, until=2, hidden_states=STATES)
    recipe.write(tmp_path, until=2, hidden_states=STATES.clone())
    assert recipe.written == []
    recipe.write(tmp_path, hidden_states=hidden_states)
    assert recipe.written == [0, 1, 2]
    assert "the capture there began with other hidden states" in log.text


OBSTACLES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "altered": (
        "layer_0.safetensors",
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
        "a stored tensor does not match its digest",
    ),
    "cut": (
        "layer_1.safetensors",
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        "a stored tensor does not match its digest",
    ),
    "removed": ("layer_1.safetensors", Path.unlink, "a stored tensor does not match its digest"),
    "manifest": ("manifest.json", lambda path: path.write_text("{"), "manifest.json is damaged"),
}


@pytest.mark.parametrize("damage", OBSTACLES)
def test_damaged_capture_is_made_anew_and_says_why(
    recipe: Recipe, tmp_path: Path, log: pytest.LogCaptureFixture, damage: str
) -> None:
    name, change, reason = OBSTACLES[damage]
    recipe.write(tmp_path, until=2)
    change(tmp_path / name)
    recipe.write(tmp_path)
    assert recipe.written == [0, 1, 2]
    assert reason in log.text
    recipe.write(tmp_path)
    assert recipe.written == [0, 1, 2]
    assert "the same capture is there, complete" in log.text


def test_nothing_of_an_earlier_capture_is_left(recipe: Recipe, tmp_path: Path) -> None:
    recipe.write(tmp_path / "plain")
    recipe.write(tmp_path / "used", until=1)
    for name in ("layer_61.safetensors", "layer_0.fp32.safetensors", "model.safetensors", "generation.json"):
        (tmp_path / "used" / name).write_bytes(b"old")
    other = replace(recipe.description, noise_floor="full")
    recipe.write(tmp_path / "used", until=0, description=other)
    recipe.write(tmp_path / "used")
    assert contents(tmp_path / "used") == contents(tmp_path / "plain")


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
    recipe: Recipe, tmp_path: Path, files: dict[str, str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(
        CaptureError, match=r"is not empty and holds no capture: found .*Choose another --output-dir"
    ):
        recipe.write(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_notes_beside_a_capture_survive_it(recipe: Recipe, tmp_path: Path) -> None:
    recipe.write(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots.json").mkdir()
    recipe.write(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "plots.json").is_dir()


class TestHiddenStatesThatAreMade:
    """A first input that takes work to make: made once, and not again where the stored one counts."""

    FED = torch.full((2, 3, 4), -1.0).bfloat16()

    def write(self, recipe: Recipe, directory: Path, *, until: int = 3, made: list[str]) -> None:
        def make() -> torch.Tensor:
            made.append("made")
            return self.FED

        recipe.write(directory, until=until, hidden_states=make)

    def test_are_not_made_again_behind_a_stored_layer(self, recipe: Recipe, tmp_path: Path) -> None:
        made: list[str] = []
        self.write(recipe, tmp_path / "whole", made=made)
        self.write(recipe, tmp_path / "cut", until=1, made=made)
        self.write(recipe, tmp_path / "cut", made=made)
        assert (recipe.written, len(made)) == ([1, 2], 2)
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")

    def test_are_made_again_where_no_layer_is_stored(self, recipe: Recipe, tmp_path: Path) -> None:
        made: list[str] = []
        self.write(recipe, tmp_path, until=0, made=made)
        self.write(recipe, tmp_path, made=made)
        assert len(made) == 2

    def test_are_made_again_where_the_stored_ones_are_not_what_the_first_layer_was_fed(
        self, recipe: Recipe, inputs: Inputs, tmp_path: Path
    ) -> None:
        made: list[str] = []
        self.write(recipe, tmp_path, until=1, made=made)
        writer = CaptureWriter(tmp_path, Capture.open(tmp_path).manifest)
        writer.write_inputs(inputs, self.FED + 1)
        self.write(recipe, tmp_path, made=made)
        assert (recipe.written, len(made)) == ([0, 1, 2], 2)


def write_together(directory: Path, describe: Any, inputs: Inputs, layer_of: Any) -> list[Manifest]:
    """Two ranks write, the second one layers 1 and 2; what each listed."""
    with open_capture(directory, describe(), inputs=inputs) as first:
        second = CaptureWriter(directory, first.manifest, manifest_name=part_name(1))
        for writer, layers in ((first, (0,)), (second, (1, 2))):
            for layer in layers:
                writer.write(layer, layer_of(layer))
        return [first.manifest, second.manifest]


def test_parts_that_are_told_make_the_capture_of_one_process(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any
) -> None:
    with open_capture(tmp_path / "one", describe(), inputs=inputs) as writer:
        for layer in range(3):
            writer.write(layer, layer_of(layer))
        writer.finish()
    own, other = write_together(tmp_path / "two", describe, inputs, layer_of)
    # What the ranks tell is enough: the part's file need not be seen.
    (tmp_path / "two" / part_name(1)).unlink()
    writer = CaptureWriter(tmp_path / "two", own)
    writer.add_part(decode(Manifest, encode(other)))
    writer.finish()
    assert (tmp_path / "two/manifest.json").read_bytes() == (tmp_path / "one/manifest.json").read_bytes()


def test_part_adds_the_digests_of_its_layers_alone(describe: Any) -> None:
    files = {f"{group}.floor.safetensors": {} for group in ("layer_1", "layer_11", "model")}
    begun = Manifest(description=describe())
    part = replace(begun.with_digests(files), complete_layers=(1,))
    assert list(add_part(begun, part).digests) == ["layer_1.floor.safetensors"]
    part = part.with_layer(None, (Entry.of(None, "logits", file="model.safetensors", tensor=torch.ones(1)),))
    assert list(add_part(begun, part).digests) == ["layer_1.floor.safetensors", "model.floor.safetensors"]


def test_run_that_resumes_takes_parts_up_and_removes_them(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any
) -> None:
    write_together(tmp_path, describe, inputs, layer_of)
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        assert writer.complete_layers == (0, 1, 2)
        assert not (tmp_path / part_name(1)).exists()
    assert Capture.open(tmp_path).layers == (0, 1, 2)


@pytest.mark.parametrize("damage", ["{", "[]", None])
def test_part_that_is_damaged_or_of_another_capture_does_not_count(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any, damage: str | None
) -> None:
    write_together(tmp_path, describe, inputs, layer_of)
    part = tmp_path / part_name(1)
    text = part.read_text()
    part.write_text(text.replace('"builtin"', '"other"') if damage is None else damage)
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        assert writer.complete_layers == (0,)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_records_stay_with_the_layers_that_they_are_of(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any, is_resumed: bool
) -> None:
    write_together(tmp_path, describe, inputs, layer_of)
    record = ReadRecord.begun("a", plan="p").write(tmp_path / RECORDS_FOLDER)
    with open_capture(tmp_path, describe(target="builtin" if is_resumed else "other"), inputs=inputs):
        assert record.exists() == is_resumed


@pytest.fixture
def keep(inputs: Inputs) -> Any:
    """Writes a capture, finished unless told otherwise."""

    def write(directory: Path, description: Description, *, is_finished: bool = True) -> Path:
        with open_capture(directory, description, inputs=inputs) as writer:
            if is_finished:
                writer.finish()
        return directory

    return write


def edited(description: Description) -> Description:
    """Return the description of the run once the port's file was edited."""
    return replace(description, provenance=replace(description.provenance, target_digest="e" * 64))


def test_free_place_and_same_run_keep_their_name(describe: Any, keep: Any, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    assert find_free_directory(sweep, describe()) == sweep
    keep(sweep, describe())
    assert find_free_directory(sweep, describe()) == sweep
    refuse_other_run(sweep, describe())


def test_other_finished_run_is_kept_and_told(
    describe: Any, keep: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = keep(tmp_path / "sweep", describe())
    with caplog.at_level(logging.INFO):
        second = find_free_directory(sweep, edited(describe()))
    assert second == tmp_path / "sweep_2"
    assert f"since {sweep} holds another run (other target_digest)" in caplog.text
    assert "--overwrite" in caplog.text
    keep(second, edited(describe()))
    assert find_free_directory(sweep, edited(describe())) == second
    assert find_free_directory(sweep, describe(target="reference")) == tmp_path / "sweep_3"
    assert find_free_directory(sweep, describe()) == sweep


def test_other_unfinished_run_has_nothing_to_keep(describe: Any, keep: Any, tmp_path: Path) -> None:
    sweep = keep(tmp_path / "sweep", describe(), is_finished=False)
    assert find_free_directory(sweep, edited(describe())) == sweep
    refuse_other_run(sweep, edited(describe()))


def test_folder_of_something_else_is_not_written_into(describe: Any, keep: Any, tmp_path: Path) -> None:
    sweep = keep(tmp_path / "sweep", describe())
    (tmp_path / "sweep_2").mkdir()
    (tmp_path / "sweep_2" / "notes.txt").write_text("mine")
    assert find_free_directory(sweep, edited(describe())) == tmp_path / "sweep_3"


def test_refusal_names_the_difference_and_both_ways(describe: Any, keep: Any, tmp_path: Path) -> None:
    keep(tmp_path / "run", describe())
    with pytest.raises(CaptureError, match="another finished capture: found other target_digest") as error:
        refuse_other_run(tmp_path / "run", edited(describe()))
    assert "--overwrite" in str(error.value)
    assert "--output-dir" in str(error.value)


def test_numbered_folders_are_those_beside(describe: Any, keep: Any, tmp_path: Path) -> None:
    for name in ("sweep_0_to_3", "sweep_0_to_3_2", "sweep_0_to_31", "sweep_0_to_3_old"):
        keep(tmp_path / name, describe())
    sweep = tmp_path / "sweep_0_to_3"
    assert {path.name for path in numbered_directories(sweep)} == {"sweep_0_to_3", "sweep_0_to_3_2"}
    assert is_numbered(sweep, sweep)
    assert not is_numbered(tmp_path / "elsewhere" / "sweep_0_to_3_2", sweep)


def test_finished_capture_is_the_same_with_or_without_a_certificate(
    describe: Any, keep: Any, tmp_path: Path
) -> None:
    assert not holds_same(tmp_path / "gone", describe())
    keep(tmp_path / "golden", describe())
    assert holds_same(tmp_path / "golden", describe())


def test_configs_make_no_other_run(describe: Any, keep: Any, tmp_path: Path) -> None:
    keep(tmp_path / "run", describe())
    provenance = replace(describe().provenance, model_config={"rope_theta": 1}, port_config={"a": 1})
    refuse_other_run(tmp_path / "run", replace(describe(), provenance=provenance))
