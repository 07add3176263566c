"""Runs that are killed, fail, or find other things than they left: resumed, or begun anew."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

# Fails, or waits to be killed, at the layer that a variable names: the source stays the same.
STUMBLING = """
import time

class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, *arguments):
        if os.environ.get("FAIL_AT") == str(self.layer_idx):
            raise RuntimeError("out of luck")
        if os.environ.get("HANG_AT") == str(self.layer_idx):
            open(os.environ["HANGS"], "w").close()
            time.sleep(600)
        return super().forward(*arguments)
"""
DEADLINE_S = 300


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the stumbling port fail at a layer, or at none."""

    def set_layer(layer: int | None) -> None:
        if layer is None:
            monkeypatch.delenv("FAIL_AT", raising=False)
        else:
            monkeypatch.setenv("FAIL_AT", str(layer))

    return set_layer


@pytest.mark.parametrize(
    "preset",
    [
        ("sweep",),
        pytest.param(("multi-layer", "--start-layer", 1, "--end-layer", 3), marks=pytest.mark.slow),
        ("full",),
    ],
)
def test_failed_run_resumes_to_the_bytes_of_an_uninterrupted_one(
    run: Any,
    write_port: Any,
    fail_at: Any,
    small_fp8: Path,
    small_golden: Path,
    tmp_path: Path,
    preset: tuple[object, ...],
) -> None:
    common = ("--model", small_fp8, "--golden", small_golden, "--target", write_port(STUMBLING))
    assert run(*preset, *common, "--output-dir", tmp_path / "whole").exit_code == 0
    fail_at(2)
    failed = run(*preset, *common, "--output-dir", tmp_path / "resumed")
    assert failed.exit_code == 3
    assert "layer 2 failed while it ran: found RuntimeError: out of luck" in failed.stderr
    fail_at(None)
    resumed = run(*preset, *common, "--output-dir", tmp_path / "resumed")
    assert resumed.exit_code == 0
    assert "after layer 1" in resumed.stderr
    assert (
        "Layer 1 (2 of 4): done before" in resumed.stderr or "Layer 1 (1 of 3): done before" in resumed.stderr
    )
    assert re.search(r"Layer 2 \(\d of \d\): .*memory", resumed.stderr)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")


def test_chained_run_from_tokens_in_mid_model_resumes(
    run: Any, write_port: Any, fail_at: Any, small_fp8: Path, tmp_path: Path
) -> None:
    common: tuple[object, ...] = ("multi-layer", "--layers", "1:4")
    common += ("--model", small_fp8, "--seq-len", 9, "--target", write_port(STUMBLING))
    run(*common, "--output-dir", tmp_path / "whole")
    fail_at(3)
    run(*common, "--output-dir", tmp_path / "resumed")
    fail_at(None)
    resumed = run(*common, "--output-dir", tmp_path / "resumed")
    assert "after layer 2" in resumed.stderr
    assert contents(tmp_path / "resumed") == contents(tmp_path / "whole")
    stored = load_file(tmp_path / "resumed" / "inputs.safetensors")["hidden_states"]
    assert torch.equal(stored, load_file(tmp_path / "resumed" / "layer_1.safetensors")["input"])


@pytest.mark.usefixtures("as_in_forks")
def test_killed_sweep_locks_nobody_out_and_resumes(
    run: Any,
    hanging: Any,
    write_port: Any,
    on_small: tuple[object, ...],
    tmp_path: Path,
) -> None:
    common = ["sweep", *on_small, "--target", write_port(STUMBLING)]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with hanging([*common, "--output-dir", resumed], layer=2):
        meanwhile = run(*common, "--output-dir", resumed)
    assert meanwhile.exit_code == 3
    assert f"the output directory {resumed} is in use by another run" in meanwhile.stderr
    assert "choose another --output-dir" in meanwhile.stderr
    done = run(*common, "--output-dir", resumed)
    assert done.exit_code == 0
    assert "after layer 1" in done.stderr
    assert run(*common, "--output-dir", whole).exit_code == 0
    assert contents(resumed) == contents(whole)


@pytest.fixture
def hanging(forked_start: Any, tmp_path: Path) -> Any:
    """Starts a run that reaches a layer and goes no further; killed at the end."""

    @contextlib.contextmanager
    def start(arguments: list[object], *, layer: int) -> Iterator[None]:
        marker = tmp_path / "hangs"
        with forked_start(*arguments, HANG_AT=str(layer), HANGS=str(marker)) as running:
            deadline = time.monotonic() + DEADLINE_S
            while not marker.exists():
                assert not running.has_ended(), "the run ended before it reached the layer"
                assert time.monotonic() < deadline, "the run did not reach the layer"
                time.sleep(0.05)
            yield
            # The port runs in a child, which dies with its supervisor.
            children = psutil.Process(running.pid).children()
            running.kill()
            _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
            assert alive == []

    return start


class TestBegunAnew:
    """Runs begun anew: a failed run is not resumed if something else would be computed."""

    @pytest.fixture
    def left(
        self, run: Any, write_port: Any, fail_at: Any, small_fp8: Path, small_golden: Path, tmp_path: Path
    ) -> Any:
        """Leaves a sweep that failed at layer 2; goes on with it, with other arguments if given."""
        target = write_port(STUMBLING)
        # What is kept is decided for whole layers: their inputs and outputs are enough.
        common = ("--model", small_fp8, "--output-dir", tmp_path / "left", "--sites", "layer")
        fail_at(2)
        assert run("sweep", *common, "--golden", small_golden, "--target", target).exit_code == 3
        fail_at(None)

        def go_on(*, golden: Path = small_golden, target: str = target) -> Any:
            result = run("sweep", *common, "--golden", golden, "--target", target)
            assert result.exit_code == 0, result.stderr
            return result

        return go_on

    def test_changed_source_of_the_target_is_named(self, left: Any, write_port: Any) -> None:
        write_port(STUMBLING + "# faster now\n")
        result = left()
        assert "Starting anew" in result.stderr
        assert "other target_digest" in result.stderr
        assert re.search(r"Layer 0 \(1 of 4\): .*memory", result.stderr)

    def test_other_target_is_named(self, left: Any) -> None:
        assert "other target, target_digest" in left(target="reference").stderr

    def test_golden_made_anew_with_other_values_is_not_mixed_in(
        self, left: Any, make_golden: Any, small_fp8: Path
    ) -> None:
        options = ("--attn-implementation", "eager", "--noise-floor", "stats")
        result = left(golden=make_golden(small_fp8, "--seq-len", "24,15", *options))
        assert "Starting anew" in result.stderr
        assert "golden_inputs" in result.stderr

    def test_damaged_layer_is_not_kept(self, left: Any, tmp_path: Path) -> None:
        path = tmp_path / "left" / "layer_0.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        assert "Starting anew" in left().stderr
        assert path.read_bytes() != damaged
