"""mm2's own device layer: right in both dtypes, the same from every stored dtype, whatever the chunks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import PRESETS, SyntheticModel
from neuron.builtin.moe import CHUNK_SIZE_BYTES, experts_per_chunk
from neuron.devices.weights import WeightLoader
from neuron.ports.targets import find_target

FLOAT32_LIMIT = 1e-5
ALTERNATIVES = ("Eager", "BatchedExperts")
SHAPES = {
    "toy": SyntheticModel(num_hidden_layers=2),
    "wide": SyntheticModel(
        num_hidden_layers=2,
        hidden_size=384,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=48,
        num_experts_per_tok=8,
        intermediate_size=256,
    ),
}


@pytest.fixture
def in_float32(run: Any, float32_golden: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Judges a run in float32: the exit code, and the JSON."""

    def judge(model: Path, *words: object) -> tuple[int, dict[str, Any]]:
        result = run(*words, "--model", model, "--golden", float32_golden, "--dtype", "float32", "--json")
        return result.exit_code, json.loads(result.stdout)

    return judge


@pytest.mark.parametrize("target", ["builtin", "reference"])
@pytest.mark.parametrize("preset", ["sweep", "full"])
def test_float32_agrees_with_transformers_on_the_cpu(
    in_float32: Any, small_fp8: Path, target: str, preset: str
) -> None:
    exit_code, record = in_float32(small_fp8, preset, "--target", target)
    assert (exit_code, record["verdict"]) == (0, "pass")
    errors = [site["metrics"]["relative_l2"] for site in record["sites"] if site["routing"] is None]
    assert max(errors) <= FLOAT32_LIMIT


def test_float32_limit_would_notice_a_bfloat16_router_input(
    in_float32: Any, write_port: Any, small_fp8: Path
) -> None:
    source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        gate = self.block_sparse_moe.gate
        gate.register_forward_pre_hook(lambda module, args: (args[0].bfloat16().float(),))
"""
    exit_code, record = in_float32(small_fp8, "sweep", "--layers", "1:2", "--target", write_port(source))
    assert (exit_code, record["blame"][0]["sites"]) == (1, ["router_logits"])


def test_float32_run_is_exact_from_fp8_too(in_float32: Any, copies: dict[torch.dtype, Path]) -> None:
    codes = {dtype: in_float32(folder, "sweep", "--layers", "1:2")[0] for dtype, folder in copies.items()}
    # The weights of the copy in BF16 are rounded for good.
    assert codes == {torch.float8_e4m3fn: 0, torch.float32: 0, torch.bfloat16: 1}


def test_fp8_bf16_and_float32_copies_give_the_same_weights(copies: dict[torch.dtype, Path]) -> None:
    states = [loaded_state(folder, torch.bfloat16) for folder in copies.values()]
    for state in states[1:]:
        assert [name for name in state if not torch.equal(state[name], states[0][name])] == []
    float32 = {name for name, tensor in states[0].items() if tensor.dtype is torch.float32}
    assert float32 == {"block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"}


def loaded_state(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state of the device layer with layer 1 of the checkpoint."""
    spec, target = ModelSpec.from_folder(folder), find_target("builtin")
    module = target.build(spec, 1, dtype=dtype)
    with CheckpointReader(folder) as reader, ReadingPool(2) as pool:
        tensors = LayerTensors.open(reader, spec, 1, dtype)
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=pool)
        target.load(module, tensors, spec, loader=loader)
    return dict(module.state_dict())


def test_several_chunks_give_what_one_gives(
    run: Any, write_chunked_port: Any, on_small: tuple[object, ...]
) -> None:
    sites = {}
    for num_chunks in (1, 4, 8):
        target = write_chunked_port(8 // num_chunks, num_chunks=num_chunks)
        record = json.loads(run("single-layer", "--layer", 1, *on_small, "--json", "--target", target).stdout)
        assert record["verdict"] == "pass"
        sites[num_chunks] = load_file(Path(record["directory"]) / "layer_1.safetensors")
    whole = sites[1]
    for found in (sites[4], sites[8]):
        # The experts' outputs are added in another order, in float32: BF16 results differ by a rounding.
        assert torch.allclose(found["moe_delta"].float(), whole["moe_delta"].float(), rtol=2**-7, atol=1e-6)
        assert all(found[site].equal(whole[site]) for site in found if site not in ("moe_delta", "output"))


def test_chunks_of_a_true_size_layer_stay_under_the_limit_of_one_tensor() -> None:
    spec = PRESETS["m2"].spec()
    size = experts_per_chunk(spec, dtype=torch.bfloat16, chunk_size_bytes=CHUNK_SIZE_BYTES)
    gate_up_bytes = size * 2 * spec.intermediate_size * spec.hidden_size * 2
    assert size > 1
    assert gate_up_bytes < 4_000_000_000


@pytest.mark.parametrize(
    ("num_experts", "fitting", "expected"), [(24, 5, 4), (7, 3, 1), (8, 100, 8), (6, 0, 1)]
)
def test_chunks_are_of_one_size(num_experts: int, fitting: int, expected: int) -> None:
    quantities: Any = SimpleNamespace(hidden_size=8, intermediate_size=4, num_local_experts=num_experts)
    chunk = {"dtype": torch.bfloat16, "chunk_size_bytes": fitting * 3 * 8 * 4 * 2}
    assert experts_per_chunk(quantities, **chunk) == expected


@pytest.mark.parametrize(("side", "rows"), [("left", slice(15, 32)), ("right", slice(0, 17))])
def test_padded_rows_stay_finite_and_real_rows_do_not_see_them(
    run: Any, small_fp8: Path, side: str, rows: slice
) -> None:
    ids = ("--input-ids", ",".join(str(number) for number in range(3, 20)))
    tensors = []
    for padded in (("--input-ids", "1,2", "--padding-side", side, "--pad-to", 32), ()):
        result = run("multi-layer", "--layers", "0:2", "--model", small_fp8, "--json", *ids, *padded)
        tensors.append(load_file(Path(json.loads(result.stdout)["directory"]) / "layer_1.safetensors"))
    both, alone = tensors
    assert all(tensor.isfinite().all() for tensor in both.values())
    difference = both["output"][0, rows].float() - alone["output"][0].float()
    assert difference.norm() / alone["output"][0].float().norm() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_clean_runs_stand_where_transformers_own_alternatives_stand(
    run: Any, command: Any, serve: Any, needs_xla: None, tmp_path: Path, shape: str, seed: int
) -> None:
    model, golden = tmp_path / "model", tmp_path / "golden"
    synthesize(model, model=SHAPES[shape], dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=seed)
    made = ("--seq-len", "64,37,5", "--seed", seed, "--output-dir", golden, "--quiet")
    assert command(mm2_gpu, "extract-all", "--model", model, *made).exit_code == 0
    common = ("sweep", "--model", model, "--golden", golden, "--json")
    port = Path(__file__).parents[3] / "scripts/examples/transformers_port.py"
    alternatives = [json.loads(run(*common, "--target", f"{port}:{name}").stdout) for name in ALTERNATIVES]
    (on_xla,) = serve([[*common, "--backend", "xla-cpu", "--captures", tmp_path / "xla"]])
    own = {"cpu": json.loads(run(*common).stdout), "xla-cpu": json.loads(on_xla["stdout"])}
    limit = 1.25 * max(worst_rho(record) for record in alternatives)
    for backend, record in own.items():
        assert (backend, record["verdict"]) == (backend, "pass")
        assert worst_rho(record) <= limit


def worst_rho(record: dict[str, Any]) -> float:
    return max(site["noise"]["whole"] for site in record["sites"] if site["noise"] is not None)
