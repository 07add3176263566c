"""Layers shared by several ranks: each site as on one, each rank a part, and every failure told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

Tensors = dict[str, torch.Tensor]

LIMIT = 1e-5
LAYER_0 = ("single-layer", "--layer", 0, "--seq-len", "12,7", "--dtype", "float32", "--json")

# The device layer, whose layer 1 fails until it is told to run.
FAILS_ONCE = """
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    reuse = False

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if layer_idx == 1 and os.environ.get("LAYER_1") != "runs":
            raise ValueError("not yet")
"""


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A float32 model of so many heads and kv heads; 8 experts of width 24, which 5 ranks do not divide."""
    made: dict[tuple[int, int], Path] = {}

    def make(num_heads: int, num_kv_heads: int) -> Path:
        key = (num_heads, num_kv_heads)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("ranks") / "x".join(map(str, key))
            model = SyntheticModel(
                num_hidden_layers=2,
                hidden_size=64,
                num_attention_heads=num_heads,
                num_key_value_heads=num_kv_heads,
                head_dim=16,
                rotary_dim=8,
                num_local_experts=8,
                num_experts_per_tok=2,
                intermediate_size=24,
            )
            synthesize(made[key], model=model, dtype=torch.float32, shard_size_bytes=None, seed=0)
        return made[key]

    return make


@pytest.fixture
def on_one(run: Any, tmp_path: Path) -> Callable[..., Tensors]:
    """Layer 0 on one rank."""

    def run_alone(model: Path, *arguments: object) -> Tensors:
        result = run(
            *LAYER_0, "--model", model, "--backend", "cpu", "--output-dir", tmp_path / "one", *arguments
        )
        assert result.exit_code == 0, result.stderr
        return load_file(tmp_path / "one" / "layer_0.safetensors")

    return run_alone


@pytest.fixture
def on_ranks(forked_ranks: Any, tmp_path: Path) -> Callable[..., Tensors]:
    """Layer 0 on several ranks."""

    def run_shared(model: Path, num_ranks: int, *arguments: object) -> Tensors:
        directory = tmp_path / "ranks"
        place = ("--backend", "cpu", "--output-dir", directory)
        done = forked_ranks(*LAYER_0, "--model", model, *place, *arguments, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
        return load_file(directory / "layer_0.safetensors")

    return run_shared


def errors_of(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative L2 distances of all sites."""
    assert found.keys() == expected.keys()
    assert all(found[site].shape == expected[site].shape for site in expected)
    return {
        site: float((found[site].double() - expected[site].double()).norm() / expected[site].double().norm())
        for site in expected
    }


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "ep_degree"),
    [
        # Heads are padded, the kv head is on both ranks, each has other experts.
        (3, 1, 2, 2),
        pytest.param(3, 1, 2, 1, marks=pytest.mark.slow),
        pytest.param(6, 2, 4, 2, marks=pytest.mark.slow),
        pytest.param(6, 2, 2, 1, marks=pytest.mark.slow),
        pytest.param(6, 1, 4, 1, marks=pytest.mark.slow),
        pytest.param(6, 3, 4, 4, marks=pytest.mark.slow),
        pytest.param(6, 6, 4, 1, marks=pytest.mark.slow),
        pytest.param(8, 2, 8, 2, marks=pytest.mark.slow),
        pytest.param(6, 2, 8, 1, marks=pytest.mark.slow),
        pytest.param(10, 5, 5, 1, marks=pytest.mark.slow),
        pytest.param(10, 5, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_every_site_is_that_of_one_rank(
    model_of: Any,
    on_one: Any,
    on_ranks: Any,
    num_heads: int,
    num_kv_heads: int,
    num_ranks: int,
    ep_degree: int,
) -> None:
    model = model_of(num_heads, num_kv_heads)
    shared = on_ranks(model, num_ranks, "--ep-degree", ep_degree)
    errors = errors_of(shared, on_one(model))
    assert len(errors) == 18
    assert max(errors.values()) <= LIMIT, errors


@pytest.mark.slow
def test_a_capture_tells_its_ranks_and_resumes_with_the_same_alone(
    model_of: Any, process: Any, write_port: Any, tmp_path: Path
) -> None:
    port = write_port(FAILS_ONCE)
    run = ("multi-layer", "--layers", "0:2", "--model", model_of(6, 2), "--seq-len", "12,7", "--target", port)
    place = ("--backend", "cpu", "--output-dir", tmp_path / "capture")
    assert process(*run, *place, "--tp-degree", 2).returncode == 3
    other = process(*run, *place, "--tp-degree", 2, "--reduce-dtype", "bfloat16", LAYER_1="fails")
    assert "Starting anew" in other.stderr
    assert "options.reduce_dtype" in other.stderr
    resumed = process(*run, *place, "--tp-degree", 2, "--reduce-dtype", "bfloat16", LAYER_1="runs")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming" in resumed.stderr
    assert "after layer 0" in resumed.stderr
    assert "divided among 2, summed in bfloat16" in resumed.stdout
    other = process(*run, *place, LAYER_1="runs")
    assert (other.returncode, "options.tp_degree" in other.stderr) == (3, True)
    anew = process(*run, *place, "--overwrite", LAYER_1="runs")
    assert anew.returncode == 0, anew.stderr


def test_one_rank_is_what_no_option_says(run: Any, model_of: Any, tmp_path: Path) -> None:
    for name, arguments in (("without", ()), ("with", ("--tp-degree", 1))):
        place = ("--backend", "cpu", "--output-dir", tmp_path / name)
        result = run(*LAYER_0, "--model", model_of(6, 2), *place, *arguments)
        assert result.exit_code == 0, result.stderr
    files = sorted(path.name for path in (tmp_path / "with").iterdir())
    assert "manifest.json" in files
    for name in files:
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


@pytest.mark.slow
def test_the_whole_model_goes_on_with_the_same_tokens(
    model_of: Any, run: Any, process: Any, tmp_path: Path
) -> None:
    model = model_of(6, 2)
    whole = ("full", "--model", model, "--seq-len", "12,7", "--dtype", "float32", "--max-new-tokens", 4)
    place = ("--backend", "cpu", "--json", "--output-dir")
    alone = run(*whole, *place, tmp_path / "one")
    shared = process(*whole, *place, tmp_path / "ranks", "--tp-degree", 4)
    assert (alone.exit_code, shared.returncode) == (0, 0), shared.stderr
    assert json.loads(shared.stdout)["generation"] == json.loads(alone.stdout)["generation"]
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "one"))
    assert max(errors_of(found, expected).values()) <= LIMIT
