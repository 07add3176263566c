"""A run's account of itself: where its time went, and whether recording changes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from minimax_tools.errors import CaptureError
from minimax_tools.model.spec import ModelSpec
from neuron.cli import main
from neuron.runs.layer_run import LayerTimes
from neuron.runs.run_profile import CaptureEffect, LayerProfile, RunProfile

# Its attention is fused where nobody looks: a hook on q_norm makes it take the other way.
# A shift changes every value. A scale would keep those that are exactly zero, and machines differ in how many are.
CHANGES_WHEN_WATCHED = """
class Port(ReferenceLayer):
    def forward(self, *args):
        output = super().forward(*args)
        return output + 1 if self.self_attn.q_norm._forward_hooks else output
"""
PHASES = ("read", "regroup", "transfer", "compile", "run", "copy back")


def test_profile_has_a_row_and_all_phases_of_each_layer(run: Any, small: Path, tmp_path: Path) -> None:
    directory = tmp_path / "profiled"
    layers = ("multi-layer", "--layers", "0:2", "--model", small, "--seq-len", "12,7")
    result = run(*layers, "--profile", "--output-dir", directory)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    # Peaks are of the process that runs the tests: megabytes, or more.
    rows = [line[0] for line in lines if line[:1] in (["0"], ["1"], ["all"]) and {"MB", "GB"} & set(line)]
    assert rows == ["0", "1", "all"]
    assert f"trace: {directory / 'profile.json'}" in result.stdout
    events = json.loads((directory / "profile.json").read_text())["traceEvents"]
    for layer in (0, 1):
        (whole,) = [event for event in events if event["name"] == f"layer {layer}"]
        phases = [event for event in events if event["args"].get("layer") == layer]
        assert tuple(event["name"] for event in phases) == PHASES
        assert sum(event["dur"] for event in phases) == pytest.approx(whole["dur"])
        assert whole["args"]["peak_host_bytes"] > 10**8
    first, second = (event for event in events if event["name"].startswith("layer"))
    assert first["ts"] + first["dur"] <= second["ts"] + 1e3
    # Nothing is profiled unasked.
    assert "copy back" not in run(*layers, "--output-dir", tmp_path / "plain").stdout
    assert not (tmp_path / "plain" / "profile.json").exists()


def make_profile(*, times: Mapping[str, float] = MappingProxyType({}), **about: Any) -> RunProfile:
    """Return a profile of three layers that take the same times, but for compiling the first."""
    layers = tuple(
        LayerProfile(
            layer=layer,
            started_s=0.0,
            times=LayerTimes(compile_s=9.0 if layer == 0 else 0.0, **times),
            peak_host_bytes=1,
            peak_device_bytes=None,
        )
        for layer in range(3)
    )
    run = {"backend": "cpu", "spec_digest": "0", "dtype": "bfloat16", "num_ranks": 1, "num_decoded": 0}
    return RunProfile(**{**run, "batch_size": 2, "sequence_length": 64, **about}, layers=layers)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ({"mm2": 3}, "expected an object, found 3"),
        ({"mm2": {"batch_size": "2"}}, "expected a whole number, found '2'"),
        ({"mm2": {"batch_size": 0}}, "batch_size is 0"),
        ({"mm2": {"layers": []}}, "no layer ran"),
        ({"mm2": {"layers": [{"layer": True}]}}, "expected a whole number, found True"),
    ],
)
def test_damaged_profile_is_refused_by_name(tmp_path: Path, damage: Any, found: str) -> None:
    profile = make_profile()
    path = profile.write(tmp_path)
    assert RunProfile.read(tmp_path) == profile
    whole = json.loads(path.read_text())
    other = damage["mm2"]
    changed = {**whole["mm2"], **other} if isinstance(other, dict) else other
    for record in ({**whole, "mm2": changed}, [whole], 3, {}):
        path.write_text(json.dumps(record))
        with pytest.raises(CaptureError, match="holds no profile that can be read") as caught:
            RunProfile.read(tmp_path)
        if record == {**whole, "mm2": changed}:
            assert found in str(caught.value.found)


class TestEstimate:
    """`mm2-test check --profile-of`."""

    @pytest.fixture
    def check(self, command: Any, small: Path, tmp_path: Path) -> Any:
        """Checks the small model with a profile of it; `about` names what is of something else."""

        def run(times: dict[str, float], *options: object, **about: Any) -> Any:
            made = make_profile(
                **{"spec_digest": ModelSpec.from_folder(small).digest(), **about}, times=times
            )
            made.write(tmp_path)
            return command(main, "check", "--model", small, "--profile-of", tmp_path, *options)

        return run

    def test_loading_stays_and_running_grows(self, check: Any) -> None:
        times = {"read_s": 2.0, "regroup_s": 0.5, "transfer_s": 0.5, "run_s": 4.0}
        findings = json.loads(check(times, "--seq-len", "64,128", "--json").stdout)["findings"]
        same, twice = (finding["found"] for finding in findings if finding["subject"] == "time")
        # A row is half of the batch that was measured; four layers; what was compiled is left out.
        assert (
            "a row of 64 tokens takes about 5.00 s a layer (3.00 s to load, 2.00 s to run) and 0:20 for 4 layers"
            in same
        )
        run_s = float(twice.split("load, ")[1].split(" s")[0])
        assert 4.0 < run_s < 8.0, "attention grows with the square of the length"

    @pytest.mark.parametrize(
        ("about", "message"),
        [
            ({"spec_digest": "another"}, "another model"),
            ({"dtype": "float32"}, "another dtype"),
            ({"backend": "xla-cpu"}, "another backend"),
            ({"num_ranks": 2}, "several ranks"),
            ({"num_decoded": 3}, "a run that decodes"),
        ],
    )
    def test_profile_of_something_else_is_refused(
        self, check: Any, about: dict[str, Any], message: str
    ) -> None:
        result = check({"run_s": 1.0}, "--backend", "cpu", **about)
        assert result.exit_code == 3
        assert f"the profile is of {message}" in result.stderr

    def test_run_that_kept_no_profile_is_refused(self, command: Any, golden: Path) -> None:
        result = command(main, "check", "--profile-of", golden)
        assert result.exit_code == 3
        assert "holds no profile that can be read" in result.stderr


class TestCheckCapture:
    """`--check-capture`."""

    def test_recording_that_changes_nothing_is_said_to(self, run: Any, small: Path) -> None:
        layer = ("single-layer", "--layer", 0, "--model", small, "--seq-len", "12,7", "--check-capture")
        text = run(*layer).stdout
        assert "recording the sites changes no bit of the output of 1 layer" in text
        (effect,) = json.loads(run(*layer, "--json").stdout)["capture_effects"]
        assert (effect["num_changed"], effect["num_values"], effect["max_abs_diff"]) == (0, 2 * 12 * 64, 0.0)

    def test_recording_that_changes_the_output_is_warned_of(
        self, run: Any, write_port: Any, small: Path
    ) -> None:
        layer = ("single-layer", "--layer", 0, "--model", small, "--seq-len", "12,7", "--check-capture")
        result = run(*layer, "--target", write_port(CHANGES_WHEN_WATCHED))
        assert result.exit_code == 0
        changes = "recording the sites changes the output of layer 0: of layer 0 1536 of 1536 values"
        assert f"warning: {changes}" in result.stderr

    def test_nan_on_both_sides_is_no_change_and_on_one_is(self) -> None:
        values = torch.tensor([1.0, float("nan"), 3.0])
        assert CaptureEffect.between(0, values, values.clone()).num_changed == 0
        effect = CaptureEffect.between(0, values, torch.tensor([1.0, 2.0, 3.5]))
        assert effect.num_changed == 2
        assert effect.max_abs_diff != effect.max_abs_diff
