"""Scripts tell how they are used, and those whose figures are published run at toy scale."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
COMMANDS = sorted(path.name for path in SCRIPTS.glob("*.py") if '__name__ == "__main__"' in path.read_text())
# Arguments of a small measurement, and some of the figures that it is named for.
TOYS = {
    "bench_chained_ends.py": (
        ("--shapes", "narrow", "--seeds", "1", "--every", "60"),
        {"1 layer: largest median"},
    ),
    "bench_compare.py": (
        ("--scale", "toy"),
        {"seed_over_ours", "share_of_memory_bandwidth", "peak_of_16_layers_over_2"},
    ),
    "bench_compare_command.py": (("--scale", "toy"), {"cold_over_reading", "warm_over_reading", "peak_gb"}),
    "bench_device.py": (
        ("--scale", "toy"),
        {
            *("graphs_for_62_layers", "compiles_after_first_layer", "sweep_over_bare", "bisect_runs_62"),
            *("regroup_peak_over_output", "regroup_over_memcpy"),
        },
    ),
    "bench_faults.py": (("--quick",), {"detected_%", "site_named_%", "false_alarms", "false_passes"}),
    "bench_growth.py": (("--axes", "layers"), {"golden_layers_calls_exponent"}),
    "bench_loading.py": (
        ("--scale", "toy"),
        {
            *("peak_anonymous_over_layer", "peak_anonymous_over_layer_prefetching", "stream_over_bound"),
            *(
                "peak_anonymous_packed_over_fp8_layer",
                "peak_anonymous_over_layer_offload",
                "offload_over_stream",
            ),
            *(
                "warm_load_over_raw_read",
                "fp8_dequantise_gb_per_s",
                "bytes_read_over_stored",
                "extra_disk_bytes",
            ),
        },
    ),
    "bench_logits.py": (("--goldens", "1", "--ports", "3"), {"prompts: right ports that fail"}),
    "bench_names.py": (
        ("--drawn", "1", "--groups", "reported", "--mistakes", "vllm#50761"),
        {"reported, sites: named_%", "reported: wrong names proved"},
    ),
    "bench_proof.py": (
        ("--parts", "single", "--mistakes", "gate_up_swapped"),
        {"proved by weights", "wrong names proved"},
    ),
    "bench_report.py": (("--layers", "2"), {"MB of report.html"}),
    "bench_slices.py": (
        ("--scale", "toy"),
        {
            *("feasible_plans_found", "invalid_plans", "plan_62_layers_64_nodes_ms"),
            *("extract_over_cp", "extract_peak_anonymous_mb", "bytes_read_over_slice", "two_ranks_over_one"),
        },
    ),
    "bench_start.py": (("--starts", "1"), {"commands measured"}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_script_tells_how_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_published_figures_are_measured(name: str) -> None:
    arguments, wanted = TOYS[name]
    words = [sys.executable, str(SCRIPTS / name), *arguments, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    figures = {figure["figure"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert wanted <= set(figures)
    # What does not depend on the machine holds at any scale.
    for figure in figures.values():
        if figure["goal"].startswith("= "):
            assert figure["holds"], figure
