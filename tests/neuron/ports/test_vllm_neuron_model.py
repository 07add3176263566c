"""`--target vllm-neuron:…`: a whole port for the vLLM Neuron plugin, fed as the plugin's runner feeds it.

The plugin is not on the public index: a stand-in with its names and signatures takes its place (its README says more).
What needs the plugin itself is skipped where it cannot be imported.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.ports.packed_request import (
    BLOCK_SIZE,
    NO_BLOCK,
    BlockCache,
    DividedTokens,
    PackedRequest,
    pack_prompt,
    pack_step,
    refuse_uneven,
)

PORTS = Path(__file__).parents[2] / "ports"
PORT, STAND_IN = PORTS / "vllm_neuron_port.py", PORTS / "vllm_neuron_stand_in"
IMPORTS = f"import sys\nsys.path.insert(0, {str(PORTS)!r})\nfrom vllm_neuron_port import *\n"


@pytest.fixture
def run_port(run: Any, tmp_path: Path, on_small: Any, vllm_neuron: Path) -> Any:
    """Runs a model of the test's file, or of a source that extends it: the result, and its JSON."""

    def run_model(name: str, source: str = "") -> tuple[Any, dict[str, Any]]:
        file = PORT
        if source:
            file = tmp_path / "extended_port.py"
            file.write_text(IMPORTS + source)
        arguments = ("model", *on_small, "--backend", "cpu", "--decode", 2, "--json", "--quiet")
        target = ("--target", f"vllm-neuron:{file}:{name}", "--output-dir", tmp_path / "run")
        result = run(*arguments, *target)
        return result, json.loads(result.stdout) if result.stdout else {}

    return run_model


@pytest.fixture
def run_ranks(forked_ranks: Any, on_small: Any) -> Any:
    """Runs one of the test's models on two ranks of the CPU: the process, and its JSON."""

    def run_model(name: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        given = ("model", *on_small, "--backend", "cpu", "--decode", 2, "--json")
        done: subprocess.CompletedProcess[str] = forked_ranks(
            *given,
            "--target",
            f"vllm-neuron:{PORT}:{name}",
            PYTHONPATH=f"{Path(__file__).parents[3]}:{STAND_IN}",
            VLLM_NEURON_CPU_MODE="1",
        )
        return done, json.loads(done.stdout) if done.stdout else {}

    return run_model


@pytest.mark.parametrize("name", ["MiniMaxM2ForCausalLM", "Summands"])
def test_right_models_pass_and_their_cache_is_read(run_port: Any, tmp_path: Path, name: str) -> None:
    result, record = run_port(name)
    assert (result.exit_code, record["verdict"]) == (0, "pass"), result.stderr
    assert (record["compared"], record["of"]) == (39, 71)
    assert "findings" not in record
    passes = json.loads((tmp_path / "run" / "passes.json").read_text())
    assert (passes["cached_layers"], passes["cache_form"]) == ([0, 1, 2, 3], "by position")
    assert passes["layer_calls"] == [[0, 1, 2, 3]] * 3


def test_tokens_that_a_model_samples_on_the_device_are_its_choices(run_port: Any, tmp_path: Path) -> None:
    result, record = run_port("Sampling")
    assert (result.exit_code, record["verdict"]) == (0, "pass"), result.stderr
    choices = json.loads((tmp_path / "run" / "passes.json").read_text())["choices"]
    assert len(choices) == 6
    assert all(choice["chosen"] == choice["likeliest"] for choice in choices)


# Keys that are written to another slot.
LATE = """
class Late(MiniMaxM2ForCausalLM):
    def forward(self, input_ids, positions, attn_metadata=None, **given):
        name = "layers.3.self_attn"
        slots = attn_metadata[name]["slot_mapping"]
        attn_metadata[name] = {**attn_metadata[name], "slot_mapping": slots + (slots > 0)}
        return super().forward(input_ids, positions, attn_metadata=attn_metadata, **given)
"""


@pytest.mark.parametrize(
    ("name", "source", "place", "found"),
    [
        ("Swapped", "", (0, 2), "gate_up_swapped"),
        ("SwappedSummands", "", (0, 2), "gate_up_swapped"),
        ("ShortSighted", "", (1, 1), "attn_delta"),
        ("Late", LATE, (0, 3), ""),
    ],
)
def test_mistake_is_placed(run_port: Any, name: str, source: str, place: tuple[int, int], found: str) -> None:
    result, record = run_port(name, source)
    assert (result.exit_code, record["verdict"]) == (1, "fail"), result.stderr
    assert_placed(record, place, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place", "found"),
    [("Swapped", (0, 2), "gate_up_swapped"), ("NormPerRank", (0, 1), "attn_delta")],
)
def test_mistake_is_placed_on_two_ranks_too(
    run_ranks: Any, name: str, place: tuple[int, int], found: str
) -> None:
    done, record = run_ranks(name)
    assert (done.returncode, record["verdict"]) == (1, "fail"), done.stderr
    assert_placed(record, place, found)


def assert_placed(record: dict[str, Any], place: tuple[int, int], found: str) -> None:
    """Check the first finding's pass and layer, and that it has a mistake or one of its sites, if any is given."""
    first = record["findings"][0]
    assert (first["number"], first["layer"]) == place
    assert found in ("", first["mistake"], *first["sites"])


def test_a_right_model_passes_on_two_ranks_that_divide_the_tokens(run_ranks: Any) -> None:
    done, record = run_ranks("MiniMaxM2ForCausalLM")
    assert (done.returncode, record["verdict"]) == (0, "pass"), done.stderr
    # Queries and keys are divided by heads, and the port does not say how: they are not compared.
    assert (record["compared"], record["of"]) == (31, 71)


# A model that takes the checkpoint as it is.
TAKES_FP8 = """
class TakesFp8(MiniMaxM2ForCausalLM):
    takes_fp8 = True

    def load_weights(self, checkpoint_path, device, cache_dir):
        raise RuntimeError(f"loaded from {checkpoint_path}")
"""


@pytest.mark.parametrize(
    ("name", "source", "texts"),
    [
        ("Unloaded", "", ("left weights without values: found model.norm.weight",)),
        ("Norm", "", ("is no model for vLLM Neuron", "from_configs(hf_config, neuron_config)")),
        ("TakesFp8", TAKES_FP8, ("loaded from {model}",)),
    ],
)
def test_model_that_cannot_be_run_is_refused(
    run_port: Any, small_fp8: Path, name: str, source: str, texts: tuple[str, ...]
) -> None:
    result, _ = run_port(name, source)
    assert result.exit_code == 3
    stderr = " ".join(result.stderr.split())
    assert [text for text in texts if text.format(model=small_fp8) not in stderr] == []


def test_cpu_that_the_plugin_was_not_told_of_is_refused(
    run_port: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    result, _ = run_port("MiniMaxM2ForCausalLM")
    assert result.exit_code == 3
    assert "expected VLLM_NEURON_CPU_MODE=1, found VLLM_NEURON_CPU_MODE=0" in result.stderr


def test_what_names_no_class_is_a_usage_error(on_small: Any, run: Any, vllm_neuron: Path) -> None:
    result = run("model", *on_small, "--target", "vllm-neuron:port")
    assert result.exit_code == 2
    assert "vllm-neuron:PATH.py:NAME or vllm-neuron:package.module:NAME" in " ".join(result.stderr.split())


def test_without_the_plugin_it_says_what_to_install(on_small: Any, forked_python: Any, run: Any) -> None:
    if forked_python("import vllm_neuron.model.neuron_config").returncode == 0:
        pytest.skip("the vLLM Neuron plugin is installed")
    arguments = ("model", *on_small, "--backend", "cpu")
    result = run(*arguments, "--target", "vllm-neuron:some.module:Model")
    assert result.exit_code == 3
    assert "needs the packages vllm and vllm_neuron" in result.stderr
    assert "pip.repos.neuron.amazonaws.com" in result.stderr


def test_the_model_passes_on_the_plugin_itself(on_small: Any, forked_python: Any, process: Any) -> None:
    done = forked_python("import vllm_neuron.nn, vllm_neuron.utils.checkpoints")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it is not installed"])[-1]
        pytest.skip(f"the vLLM Neuron plugin cannot be imported: {reason}")
    given = ("model", *on_small, "--backend", "cpu", "--json")
    done = process(*given, "--target", f"vllm-neuron:{PORT}:MiniMaxM2ForCausalLM", VLLM_NEURON_CPU_MODE="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"


# A layer whose cache the runner binds.
LAYER = SimpleNamespace(name="layers.0.self_attn", num_kv_heads=2, head_size=4, dtype=torch.bfloat16)


@pytest.fixture
def cache() -> BlockCache:
    return BlockCache([LAYER], device=torch.device("cpu"))


def test_a_prompt_is_padded_to_a_bucket_as_the_plugin_pads(cache: BlockCache) -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    request = pack_prompt(cache, torch.tensor([[7, 8, 9, 5]]), mask, torch.tensor([[0, 1, 2, 2]]))
    assert request.input_ids.dtype is torch.int32
    assert request.input_ids.tolist() == [7, 8, 9] + [0] * 125
    assert request.positions.tolist() == [0, 1, 2] + [2] * 125
    assert request.slots.tolist() == [BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2] + [0] * 125
    assert request.sampled.tolist() == [0, 1, 2, 3]
    assert request.last_tokens.tolist() == [2]
    metadata = request.metadata(torch.device("cpu"))
    assert (metadata["max_query_len"], metadata["decode_token_threshold"]) == (128, 1)
    assert metadata["block_table_tensor"].tolist() == [[1, -1, -1, -1]]


def pack_zeros(cache: BlockCache, num_tokens: int) -> PackedRequest:
    tokens = torch.zeros(1, num_tokens, dtype=torch.long)
    return pack_prompt(cache, tokens, torch.ones_like(tokens), torch.arange(num_tokens)[None])


def test_buckets_double(cache: BlockCache) -> None:
    assert pack_zeros(cache, 129).input_ids.shape == (256,)


def test_a_step_takes_one_token_of_each_request(cache: BlockCache) -> None:
    for length in (3, BLOCK_SIZE):
        pack_zeros(cache, length)
    request = pack_step(cache, torch.tensor([[4], [6]]), torch.tensor([[3], [BLOCK_SIZE]]))
    assert request.input_ids.tolist() == [4, 6]
    assert request.slots.tolist() == [BLOCK_SIZE + 3, 3 * BLOCK_SIZE]
    metadata = request.metadata(torch.device("cpu"))
    assert metadata["block_table_tensor"].tolist() == [[1, -1, -1, -1], [2, 3, -1, -1]]
    assert (metadata["max_query_len"], metadata["max_blocks_per_seq"]) == (1, 4)
    assert metadata["cached_seq_len"].tolist() == [[BLOCK_SIZE]]


def test_a_prompt_padded_before_its_tokens_is_refused(cache: BlockCache) -> None:
    with pytest.raises(TargetError, match="found 1 columns of padding before a prompt") as raised:
        pack_prompt(cache, torch.tensor([[5, 7]]), torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))
    assert "Leave out --padding-side left" in str(raised.value)


def write(cache: BlockCache, request: int, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Write keys [tokens,K,D] as a model does, and their negatives as values."""
    slots = cache.slots(request, positions)
    for pool, new in zip(cache.tensors[LAYER.name], (values, -values), strict=True):
        pool[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = new


def test_what_requests_write_is_read_back_at_its_positions(cache: BlockCache) -> None:
    written = torch.randn(2, BLOCK_SIZE + 3, 2, 4).bfloat16()
    for request in (cache.add_request(), cache.add_request()):
        write(cache, request, torch.arange(BLOCK_SIZE), written[request, :BLOCK_SIZE])
    # Steps, in which each request takes a further block: its blocks are not neighbours.
    for position in range(BLOCK_SIZE, BLOCK_SIZE + 3):
        for request in (0, 1):
            write(cache, request, torch.tensor([position]), written[request, position : position + 1])
    assert cache.tables((0, 1))[:, :3].tolist() == [[1, 3, NO_BLOCK], [2, 4, NO_BLOCK]]
    ((keys, values),) = cache.read()
    read = keys[:, :, : BLOCK_SIZE + 3].transpose(1, 2)
    assert torch.equal(read, written)
    assert torch.equal(values[:, :, : BLOCK_SIZE + 3].transpose(1, 2), -written)


def test_a_new_batch_takes_the_old_blocks_with_what_is_in_them(cache: BlockCache) -> None:
    write(cache, cache.add_request(), torch.arange(3), torch.ones(3, 2, 4).bfloat16())
    cache.begin()
    assert cache.num_requests == 0
    write(cache, cache.add_request(), torch.arange(1), torch.full((1, 2, 4), 5.0).bfloat16())
    ((keys, _),) = cache.read()
    assert keys[0, 0, :4, 0].tolist() == [5, 1, 1, 0]


def test_no_request_has_the_null_block_and_a_pool_that_grew_is_a_new_mapping(cache: BlockCache) -> None:
    before = cache.tensors
    slots = cache.slots(cache.add_request(), torch.arange(BLOCK_SIZE * 3))
    assert slots.min() >= BLOCK_SIZE
    assert cache.tensors is not before
    grown = cache.tensors
    cache.slots(0, torch.tensor([0]))
    assert cache.tensors is grown


def test_a_context_is_a_multiple_of_what_kernels_read(cache: BlockCache) -> None:
    cache.slots(cache.add_request(), torch.tensor([128]))
    assert cache.tables([0]).shape[1] * BLOCK_SIZE == 256


def test_a_single_rank_has_all_tokens() -> None:
    tokens, states = DividedTokens(Ranks()), torch.randn(1, 3, 4)
    assert tokens.cut(states) is states
    assert tokens.join(states) is states


def test_ranks_that_do_not_divide_a_bucket_are_refused() -> None:
    refuse_uneven(Ranks(degree=8))
    with pytest.raises(TargetError, match="3 ranks do not divide a prefill of 128 tokens"):
        refuse_uneven(Ranks(degree=3))
