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

DEADLINE_S = 300


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize(
    "words",
    [
        "sweep --layers 1:4",
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("multi-layer --start-layer 1 --end-layer 3", marks=pytest.mark.slow),
        # From tokens, in mid-model.
        "multi-layer --layers 1:4 --seq-len 9",
    ],
)
def test_failed_run_resumes_to_the_bytes_of_an_uninterrupted_one(
    run: Any, stumbling: str, write_port: Any, fail_at: Any, on_small: Any, tmp_path: Path, words: str
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    sides = on_small[:2] if "--seq-len" in words else on_small
    common = (*words.split(), *sides, "--target", write_port(stumbling), "--output-dir")
    assert run(*common, whole).exit_code == 0
    fail_at(2)
    failed = run(*common, resumed)
    assert failed.exit_code == 3
    assert "layer 2 failed while it ran: found RuntimeError: out of luck" in failed.stderr
    fail_at(-1)
    done = run(*common, resumed)
    assert done.exit_code == 0
    assert "after layer 1" in done.stderr
    assert re.search(r"Layer 1 \(\d of \d\): done before", done.stderr)
    assert re.search(r"Layer 2 \(\d of \d\): .*memory", done.stderr)
    assert contents(resumed) == contents(whole)
    if "--seq-len" in words:
        stored = load_file(resumed / "inputs.safetensors")["hidden_states"]
        assert torch.equal(stored, load_file(resumed / "layer_1.safetensors")["input"])


@pytest.mark.usefixtures("as_in_forks")
def test_killed_sweep_locks_nobody_out_and_resumes(
    run: Any, hanging: Any, stumbling: str, write_port: Any, on_small: tuple[object, ...], tmp_path: Path
) -> None:
    common = ["sweep", *on_small, "--sites", "layer", "--target", write_port(stumbling)]
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
        self,
        run: Any,
        stumbling: str,
        write_port: Any,
        fail_at: Any,
        small_fp8: Path,
        small_golden: Path,
        tmp_path: Path,
    ) -> Any:
        """Leaves a sweep that failed at layer 2; goes on with it, with other arguments if given."""
        target = write_port(stumbling)
        # What is kept is decided for whole layers: their inputs and outputs are enough.
        common = ("--model", small_fp8, "--output-dir", tmp_path / "left", "--sites", "layer")
        fail_at(2)
        assert run("sweep", *common, "--golden", small_golden, "--target", target).exit_code == 3
        fail_at(-1)

        def go_on(*, golden: Path = small_golden, target: str = target) -> Any:
            result = run("sweep", *common, "--golden", golden, "--target", target)
            assert result.exit_code == 0, result.stderr
            return result

        return go_on

    def test_another_port_is_named(self, left: Any, stumbling: str, write_port: Any) -> None:
        write_port(stumbling + "# faster now\n")
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
