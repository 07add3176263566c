from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_loading
from loading import bench as loading_bench
from loading.bench import Checkpoint, LoadingBench
from loading.scales import SCALES
from page_cache import CacheState

from minimax_tools.synthetic.checkpoint import FP8

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_loading.py"
NAMED_IN_THE_ISSUE = {
    "peak_anonymous_over_layer",
    "peak_anonymous_over_layer_prefetching",
    "peak_anonymous_packed_over_fp8_layer",
    "peak_anonymous_over_layer_from_pretrained",
    "peak_anonymous_over_layer_offload",
    "warm_load_over_raw_read",
    "fp8_dequantise_gb_per_s",
    "fp8_dequantise_share_of_memory_bandwidth",
    "stream_over_bound",
    "offload_over_stream",
    "extra_disk_bytes",
    "bytes_read_over_stored",
    "split_qwen2_low_memory_on_peak_anonymous_over_model",
    "split_minimax_m2_low_memory_off_load_s",
}

WRITING_PROBE = """
import pathlib, time

def write(path):
    path = pathlib.Path(path)
    path.write_bytes(bytes(1 << 20))
    time.sleep(1)  # ten times the interval of the gauges
    path.unlink()
    return {}
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), "--scale", "toy", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def record_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The printed record; a measurement that could not run (exit code 3) prints nothing, and its reason to stderr."""
    assert result.returncode in (0, 1), f"exit code {result.returncode}: {result.stderr}"
    record: dict[str, Any] = json.loads(result.stdout)
    return record


@pytest.fixture
def bench(tmp_path: Path) -> LoadingBench:
    return LoadingBench(scratch=tmp_path, scale=SCALES["toy"], seq_lens=(5, 3))


@pytest.mark.slow
def test_figures_asked_for_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    wanted = "fp8_dequantise_gb_per_s,memory_bandwidth_gb_per_s"
    result = run("--only", wanted, "--scratch", tmp_path, "--json")
    record = record_of(result)
    assert record["benchmark"] == "loading"
    figures = {figure["figure"]: figure for figure in record["figures"]}
    assert set(wanted.split(",")) <= set(figures)
    assert all(figure["value"] > 0 for figure in figures.values())
    assert result.returncode == (0 if all(figure["holds"] for figure in figures.values()) else 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_figure_of_the_issue_is_measured(tmp_path: Path) -> None:
    result = run("--scratch", tmp_path, "--json")
    figures = {figure["figure"]: figure for figure in record_of(result)["figures"]}
    assert set(figures) >= NAMED_IN_THE_ISSUE
    assert sorted(figures) == sorted(name for group in bench_loading.GROUPS for name in group.figures)
    for name in figures:
        if name.endswith(("_equals_whole", "_eager_whole", "_equal", "_equal_streamed")):
            assert figures[name]["value"] == 1, name
        if name.startswith("extra_disk_bytes"):
            assert figures[name]["value"] == 0, name
        if name.startswith("bytes_read_over_stored"):
            # Of the embedding only the rows of the tokens are read.
            assert 0.9 < figures[name]["value"] <= 1, name
    # A toy's layer is smaller than what any process takes.
    assert not figures["peak_anonymous_over_layer"]["holds"]
    assert result.returncode == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ("peak_anonymous", "no figure peak_anonymous: choose of"),
        ("full_size_s,memory_bandwidth_gb_per_s", "add --full-size DIR"),
    ],
)
def test_unknown_figure_and_one_of_full_size_without_its_checkpoint_are_wrong_usage(
    only: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["bench_loading.py", "--scale", "toy", "--only", only, "--scratch", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        bench_loading.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("only", "is_measured"), [("full_size_s", True), ("offload_load_s", False)])
def test_full_size_is_measured_if_its_figures_are_asked_for(
    only: str, is_measured: bool, bench: LoadingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(bench_loading, "GROUPS", ())
    monkeypatch.setattr(
        bench_loading, "measure_full_size", lambda _, folder, **__: asked.append(folder) or ()
    )
    words = ["bench_loading.py", "--only", only, "--full-size", "model"]
    monkeypatch.setattr(sys, "argv", words)
    assert not list(bench_loading._measure(bench, bench_loading._parse_arguments()))
    assert asked == [Path("model")] * is_measured


@pytest.mark.slow
def test_probe_that_fails_ends_the_benchmark(bench: LoadingBench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.probe(loading_bench.LOAD_LAYERS, model=str(bench.scratch / "absent"), prefetch=False)
    assert ended.value.code == 3
    assert "loading.reads:load_layers ended with 1" in capsys.readouterr().err


def test_probe_that_would_not_fit_the_memory_is_not_run(
    bench: LoadingBench, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.probe(loading_bench.LOAD_WHOLE, needs_bytes=1 << 60, model="absent")
    assert ended.value.code == 3
    assert "are free" in capsys.readouterr().err


def test_file_written_beside_the_capture_is_extra_even_if_removed(
    bench: LoadingBench, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path_factory.mktemp("modules")
    (modules / "writing_probe.py").write_text(WRITING_PROBE)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    (bench.scratch / "captures").mkdir()
    found = {
        place: bench.probe("writing_probe:write", path=str(bench.scratch / place)).extra_disk_bytes
        for place in ("captures/file", "tmp/file", "file")
    }
    assert found == {"captures/file": 0, "tmp/file": 1 << 20, "file": 1 << 20}


@pytest.mark.slow
def test_cold_read_comes_from_the_disk_and_a_warm_one_does_not(bench: LoadingBench) -> None:
    with bench.checkpoint("model", dtype=FP8) as checkpoint:
        for cache, share in ((CacheState.COLD, 1), (CacheState.WARM, 0)):
            measured = bench.probe(
                loading_bench.READ_PLAINLY,
                cache=cache,
                checkpoint=checkpoint,
                model=str(checkpoint.folder),
                num_threads=1,
                memory_bytes=0,
                layers_only=False,
            )
            assert measured.values["bytes_read"] == checkpoint.stored_bytes
            assert measured.disk_bytes / checkpoint.stored_bytes == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("cache", "disk_bytes", "fits"),
    [
        (CacheState.WARM, 0, True),
        # Libraries that left the cache, and one part in fifty of the checkpoint.
        (CacheState.WARM, 20_000_000 + 18_000_000, True),
        (CacheState.WARM, 100_000_000, False),
        (CacheState.COLD, 1_000_000_000, True),
        (CacheState.COLD, 100_000_000, False),
        (CacheState.ANY, 100_000_000, True),
    ],
)
def test_state_of_the_cache_is_told_by_the_bytes_from_the_disk(
    cache: CacheState, disk_bytes: int, fits: bool
) -> None:
    assert cache.fits(disk_bytes, 1_000_000_000) is fits


@pytest.mark.slow
@pytest.mark.parametrize(("module", "comes_first"), [("loading.goldens", True), ("loading.rivals", False)])
def test_how_threads_wait_is_settled_for_goldens_and_not_for_rivals(module: str, comes_first: bool) -> None:
    # torch reads it when it is loaded.
    order = "names.index('gpu_reference') < names.index('torch')"
    code = f"import sys, {module}; names = list(sys.modules); print({order})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(comes_first)


def test_layer_of_a_checkpoint_is_counted_as_stored(bench: LoadingBench) -> None:
    with bench.checkpoint("fp8", dtype=FP8, num_layers=2) as checkpoint:
        stored = Checkpoint.of(checkpoint.folder)
    assert stored.layer_bytes < loading_bench.bf16_layer_bytes(bench.scale.model) < 2 * stored.layer_bytes
    assert stored.stored_bytes > 2 * stored.layer_bytes
