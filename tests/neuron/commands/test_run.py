"""Runs and their folders: further outputs of a port, runs of a port that is edited between them, warnings of graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test
from neuron.commands.device_run import find_warnings
from neuron.devices.compiler import GraphBreak
from neuron.runs.run_profile import CompileReport, RunReport

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"
CACHE = ("--also", "cache=:output[1]")
PORT = "class Port(ReferenceLayer):\n    pass\n"
MENDED = PORT + "# mended\n"
BREAK = GraphBreak(reason="Failed to trace builtin operator", place='port.py:7 `print("x")`')


@pytest.fixture
def layer(run: Any, on_small: tuple[object, ...]) -> Any:
    """Runs layer 1 of a port on the CPU."""

    def run_port(target: str, *options: object) -> Any:
        return run("single-layer", "--layer", 1, *on_small, "--target", target, "--backend", "cpu", *options)

    return run_port


class TestFurtherOutputs:
    """`--also`: further outputs are stored, shown, and never judged."""

    @pytest.fixture
    def cached(self, layer: Any, tmp_path: Path) -> Any:
        """Runs the example port with a cache."""
        target = f"{EXAMPLES / 'cached_port.py'}:DecoderLayer"
        return lambda *options: layer(target, "--quiet", "--output-dir", tmp_path / "run", *options)

    @pytest.mark.parametrize("compiler", ["off", pytest.param("eager", marks=pytest.mark.slow)])
    def test_are_stored_shown_and_not_judged(
        self, cached: Any, command: Any, tmp_path: Path, compiler: str
    ) -> None:
        done = cached(*CACHE, "--compile", compiler, "--json")
        assert done.exit_code == 0, done.output
        record = json.loads(done.stdout)
        assert (record["compared"], record["of"]) == (17, 17)
        assert "further outputs of the run, stored and not judged: cache.0, cache.1" in record["notes"]
        capture = Capture.open(tmp_path / "run")
        keys, values = (capture.read_further(1, name) for name in ("cache.0", "cache.1"))
        assert torch.equal(keys, capture.read(1, Site.K_ROPE))
        assert torch.equal(values.transpose(1, 2).flatten(2), capture.read(1, Site.V_PROJ))
        shown = command(mm2_test, "show", tmp_path / "run").stdout
        assert "further outputs, never judged" in shown
        assert "cache.1" in shown
        record = json.loads(command(mm2_test, "show", tmp_path / "run", "--json").stdout)
        assert [one["name"] for one in record["layers"][0]["further"]] == ["cache.0", "cache.1"]
        # A damaged one is told, and the rest is shown.
        file = tmp_path / "run" / "layer_1.further.safetensors"
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
        damaged = command(mm2_test, "show", tmp_path / "run")
        assert damaged.exit_code == 3
        assert "cache.1" in damaged.stdout
        assert "moe_delta" in damaged.stdout

    def test_another_request_is_another_run(self, cached: Any, tmp_path: Path) -> None:
        assert cached().exit_code == 0
        assert Capture.open(tmp_path / "run").further(1) == ()
        refused = cached(*CACHE)
        assert (refused.exit_code, "found other options.also" in refused.stderr) == (3, True)
        assert cached(*CACHE, "--overwrite").exit_code == 0
        assert cached(*CACHE, "--skip-compile").exit_code == 0
        refused = cached("--also", "gate=moe.router", "--skip-compile")
        assert refused.exit_code == 3
        assert "expected gate=moe.router, found cache=:output[1]" in refused.stderr

    @pytest.mark.parametrize(
        ("options", "exit_code", "message"),
        [
            (("--also", "cache=:output[7]"), 3, "showed no tensor at the further output cache=:output[7]"),
            (("--also", "cache=self_atn"), 3, "Did you mean self_attn"),
            (("--also", "cache"), 2, "expected NAME=PATH"),
            ((*CACHE, "--decode", 2), 2, "--decode runs several"),
        ],
    )
    def test_request_that_cannot_be_met_is_refused(
        self, cached: Any, options: tuple[object, ...], exit_code: int, message: str
    ) -> None:
        refused = cached(*options)
        assert (refused.exit_code, message in refused.stderr) == (exit_code, True)


class TestEditedPort:
    """None of its runs replaces another unannounced."""

    @pytest.fixture
    def edited(self, layer: Any, write_port: Any) -> Any:
        """Runs the port as it is edited."""
        return lambda source, *options: layer(write_port(source), *options)

    def test_gets_a_folder_of_its_own(self, edited: Any, tmp_path: Path) -> None:
        runs = tmp_path / "captures" / "neuron"
        assert edited(PORT).exit_code == 0
        mended = edited(MENDED)
        assert mended.exit_code == 0
        assert "since" in mended.stderr
        assert "(other target_digest)" in mended.stderr
        # The next command finds the place again by itself.
        assert "--output-dir" not in mended.stdout
        # Without an edit, the same place is taken again.
        for option in ("--quiet", "--skip-compile"):
            assert "single_layer_1_2" in edited(MENDED, option).stdout
        assert sorted(path.name for path in runs.iterdir()) == ["single_layer_1", "single_layer_1_2"]

    def test_overwrite_replaces_the_run(self, edited: Any, tmp_path: Path) -> None:
        run = tmp_path / "captures" / "neuron" / "single_layer_1"
        edited(PORT)
        before = Capture.open(run).description
        assert edited(MENDED, "--overwrite").exit_code == 0
        assert [path.name for path in run.parent.iterdir()] == [run.name]
        assert before.differences(Capture.open(run).description) == ["target_digest"]

    def test_named_folder_is_refused_before_anything_runs(self, edited: Any, tmp_path: Path) -> None:
        place = ("--output-dir", tmp_path / "mine")
        edited(PORT, *place)
        stored = (tmp_path / "mine" / "manifest.json").read_bytes()
        refused = edited(MENDED, *place, "--json")
        assert refused.exit_code == 3
        record = json.loads(refused.stdout)
        assert "holds another finished capture: found other target_digest" in record["error"]
        assert "--overwrite" in record["error"]
        assert "Layer 1" not in refused.stderr
        assert (tmp_path / "mine" / "manifest.json").read_bytes() == stored
        assert edited(MENDED, *place, "--overwrite").exit_code == 0


def report(*, first_layer: int = 1, later_layers: int = 0, **told: Any) -> RunReport:
    compiles = CompileReport(first_layer=first_layer, later_layers=later_layers, fallbacks=(), **told)
    return RunReport(compiles=compiles)


def test_break_is_warned_of_with_its_line_and_reason() -> None:
    (warning,) = find_warnings(report(compiler="eager", graph_breaks=(BREAK,)))
    assert warning == (
        'the graph breaks at port.py:7 `print("x")`: Failed to trace builtin operator: this line runs uncompiled; '
        "in a loop, its whole function does"
    )


def test_compiler_that_made_no_graph_is_warned_of() -> None:
    (warning,) = find_warnings(report(first_layer=0, compiler="eager"))
    assert warning.startswith("torch.compile made no graph")
    assert list(find_warnings(report(first_layer=0))) == []
    assert list(find_warnings(report(compiler="eager"))) == []
    # Breaks say why there is none.
    (warning,) = find_warnings(report(first_layer=0, compiler="eager", graph_breaks=(BREAK,)))
    assert warning.startswith("the graph breaks at")
