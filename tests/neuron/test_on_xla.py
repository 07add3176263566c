"""The device layer on XLA: every preset, in float32, in chunks; all of them in one process that compiles them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Records = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def on_xla(
    needs_xla: None,
    serve: Callable[..., list[dict[str, Any]]],
    write_chunked_port: Callable[..., str],
    toy: Path,
    golden: Path,
    float32_golden: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Records:
    """The JSON of runs on XLA, one after the other in one process: presets of builtin, and the two below."""
    folder = tmp_path_factory.mktemp("on_xla")
    target = write_chunked_port(8, num_chunks=4)
    chunked = ("--golden", golden, "--target", target, "--output-dir", folder / "chunked")
    float32 = ("--golden", float32_golden, "--dtype", "float32", "--output-dir", folder / "float32")
    runs = {
        "sweep": ("sweep", "--golden", golden),
        "full": ("full", "--golden", golden),
        "multi-layer": ("multi-layer", "--layers", "1:4", "--golden", golden),
        "single-layer": ("single-layer", "--layer", 2, "--golden", golden),
        "component": ("component", "--layer", 1, "--component", "experts", "--golden", golden),
        "chunked": ("sweep", *chunked),
        "float32": ("full", *float32),
    }
    common = ("--model", toy, "--backend", "xla-cpu", "--captures", folder, "--json")
    results = serve([(*arguments, *common) for arguments in runs.values()])
    return {
        name: {"exit_code": result["exit_code"], **json.loads(result["stdout"])}
        for name, result in zip(runs, results, strict=True)
    }


@pytest.mark.parametrize("name", ["sweep", "full", "multi-layer", "single-layer", "component"])
def test_builtin_passes(on_xla: Records, name: str) -> None:
    record = on_xla[name]
    assert (record["exit_code"], record["verdict"]) == (0, "pass")
    assert record["compared"] == record["of"] > 0
    assert record["description"]["provenance"]["backend"] == "xla-cpu"


def test_xla_on_the_cpu_is_never_called_neuron(on_xla: Records) -> None:
    for record in on_xla.values():
        provenance = record["description"]["provenance"]
        assert "neuron" not in f"{provenance['backend']} {provenance['device']}".lower()


def test_float32_agrees_with_transformers(on_xla: Records) -> None:
    record = on_xla["float32"]
    assert record["verdict"] == "pass"
    # As near as on the CPU.
    assert max(site["metrics"]["relative_l2"] for site in record["sites"] if site["routing"] is None) <= 1e-5


def test_chunks_share_their_graphs(on_xla: Records) -> None:
    assert on_xla["chunked"]["verdict"] == "pass"
    # The expert chunk's graph has other shapes than that of one chunk; the others were compiled before.
    assert 0 < on_xla["chunked"]["graphs"]["first_layer"] <= on_xla["sweep"]["graphs"]["first_layer"]
    assert on_xla["chunked"]["graphs"]["later_layers"] == 0
