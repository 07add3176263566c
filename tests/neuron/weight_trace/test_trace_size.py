"""`mm2-test weights --full-size`: within a memory budget some experts are followed, and the report says which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.machine.memory import MemoryBudget, MemoryBudgetError, MemoryUsage
from minimax_tools.model.weight_names import layer_bytes
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test
from neuron.weight_trace.port_tensors import Snapshot, TensorPart
from neuron.weight_trace.trace_size import MAX_ELEMENTS, ExpertSample, TrialMemory, num_elements, smaller_spec

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"

MODEL = SyntheticModel(
    num_hidden_layers=1,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rotary_dim=16,
    num_local_experts=24,
    num_experts_per_tok=3,
    intermediate_size=256,
    vocab_size=512,
)
# What is planned for each element of an expert that is followed.
_EXPERT_BYTES = 3 * 128 * 256 * 64

_PORT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import port

class Port(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        state["moe.down_proj"][{{lost}}] = state["moe.down_proj"][{{kept}}]
        return state
"""

Inspect = Callable[..., dict[str, Any]]


def budget_of(num_experts: int) -> str:
    """A budget in which about so many experts of a port that converts are followed, as an option's value."""
    held = 2 * layer_bytes(MODEL.spec(), torch.bfloat16) + (64 << 20)
    return f"{MemoryUsage.current().anonymous_bytes + held + num_experts * _EXPERT_BYTES}B"


@pytest.fixture(scope="module")
def wide(make_model: Any) -> Path:
    made: Path = make_model(MODEL, torch.bfloat16)
    return made


@pytest.fixture
def inspect(command: Any, wide: Path) -> Inspect:
    """Inspect a target with memory for a few experts only."""

    def run(target: str) -> dict[str, Any]:
        limit = ("--full-size", "--memory-budget", budget_of(7))
        arguments = ("--model", wide, "--target", target, *limit)
        result = command(mm2_test, "weights", *arguments, "--json", "--quiet")
        assert result.exit_code in (0, 1), result.stderr
        record: dict[str, Any] = json.loads(result.stdout)
        assert 2 <= len(record["followed_experts"]) < 20
        assert {0, 23} <= set(record["followed_experts"])
        return record

    return run


@pytest.mark.parametrize("name", ["port", "minimal_port"])
def test_a_right_port_passes(inspect: Inspect, name: str) -> None:
    record = inspect(f"{EXAMPLES}/{name}.py:DecoderLayer")
    assert (record["verdict"], record["findings"]) == ("pass", []), record
    # The numbers of all experts are compared, followed or not.
    assert len(record["compared"]) == 13


# The last expert is followed; one that is not is seen once the layer is loaded.
@pytest.mark.parametrize(("lost", "kept", "mistake"), [(23, 5, "missing"), (7, 6, "swapped")])
def test_a_lost_expert_is_named(
    inspect: Inspect, write_port: Any, lost: int, kept: int, mistake: str
) -> None:
    record = inspect(write_port(_PORT.format(lost=lost, kept=kept)))
    assert record["verdict"] == "fail"
    wrong = [finding for finding in record["findings"] if finding["severity"] == "wrong"]
    assert ["w2"] in [finding["tensors"] for finding in wrong if finding["mistake"] == mistake]


def test_text_says_which_experts_were_followed(command: Any, wide: Path) -> None:
    arguments = ("--model", wide, "--target", f"{EXAMPLES}/port.py:DecoderLayer", "--quiet", "--no-load")
    limit = ("--full-size", "--memory-budget")
    result = command(mm2_test, "weights", *arguments, *limit, budget_of(7))
    assert "of 24 experts were traced (0, 1, " in result.stdout
    refused = command(mm2_test, "weights", *arguments, *limit, "1MB")
    assert refused.exit_code == 3
    assert "tracing a layer of the model's own size would break the memory budget" in refused.stderr


def test_a_layer_of_minimax_m2_is_followed_in_part_and_run_in_bf16() -> None:
    spec = SyntheticModel.m2().spec()
    now = MemoryUsage.current().anonymous_bytes
    sample = ExpertSample.fitting(
        spec, 0, torch.bfloat16, MemoryBudget(now + 24_000_000_000), num_layers_held=2
    )
    assert 4 <= len(sample.experts) <= 16
    assert {0, 1, 10, 255} <= set(sample.experts)
    memory = TrialMemory.fitting(
        spec, 0, torch.bfloat16, MemoryBudget(now + 20_000_000_000), num_layers_held=2
    )
    assert (memory.dtype, memory.keeps_tensors) == (torch.bfloat16, False)
    with pytest.raises(MemoryBudgetError):
        ExpertSample.fitting(spec, 0, torch.bfloat16, MemoryBudget(now + 12_000_000_000), num_layers_held=2)


def test_minimax_m2_is_traced_at_a_fraction_of_its_size() -> None:
    spec = SyntheticModel.m2().spec()
    found = smaller_spec(spec, 0)
    assert num_elements(found, 0) <= MAX_ELEMENTS
    assert found.num_attention_heads // found.num_key_value_heads == 6
    assert (found.head_dim, found.rotary_dim, found.num_hidden_layers) == (128, 64, 62)
    assert found.num_local_experts > 10
    assert spec.hidden_size // found.hidden_size == spec.intermediate_size // found.intermediate_size
    assert (
        smaller_spec(SyntheticModel(num_local_experts=8).spec(), 0)
        == SyntheticModel(num_local_experts=8).spec()
    )


def test_the_part_that_changed_is_the_smallest_that_holds_every_change() -> None:
    tensor = torch.ones(6, 3, 5)
    before = Snapshot.of(tensor)
    assert before.values.dim() == 0
    assert TensorPart.changed(before, tensor) is None
    tensor[[1, 4], :, 2] = 2
    part = TensorPart.changed(before, tensor)
    assert part is not None
    assert part.of(tensor).tolist() == torch.full((2, 3, 1), 2.0).tolist()
    assert part.of_snapshot(before).tolist() == torch.ones(2, 3, 1).tolist()
