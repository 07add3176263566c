"""The trial: a repair must make the output right, and a port that fails on changed weights ends nothing.

Generated weights that quantisation keeps are held against plain quantisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Float32Layer
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.ports.target import PortEndError
from neuron.weight_trace.repairs import Repair, candidate_repairs
from neuron.weight_trace.source_tensors import SourceTensors, Tensors
from neuron.weight_trace.trial import EXACT_VALUES, TrialOutcome, run_trial

SPEC = SyntheticModel(hidden_size=64, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32).spec()
CANDIDATES = candidate_repairs([[]], SourceTensors.of(SPEC, 0), SPEC)
(SWAP,) = [repair for repair in CANDIDATES if repair.text == "w1 (gate) and w3 (up) are swapped"]

Run = Callable[[Tensors, torch.Tensor, Inputs], torch.Tensor]


def swapped_output(tensors: Tensors, states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The output of a port that swaps w1 and w3."""
    layer = Float32Layer(SPEC, SWAP.apply(tensors))
    return layer.run(states, inputs, router_experts=None)[Site.OUTPUT]


def trial_of(run: Run, candidates: list[Repair]) -> TrialOutcome:
    def port(
        tensors: Tensors, states: torch.Tensor, inputs: Inputs, refills: Mapping[str, str]
    ) -> torch.Tensor:
        return run(tensors, states, inputs)

    return run_trial(port, SPEC, 0, candidates, computes_in_bf16=False, keeps_tensors=True)


def failing_after(num_runs: int, error: Exception) -> Run:
    """A port that swaps w1 and w3, and fails in every run after the first `num_runs`."""
    runs = iter(range(num_runs))

    def run(tensors: Tensors, states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if next(runs, None) is None:
            raise error
        return swapped_output(tensors, states, inputs)

    return run


def test_a_repair_that_is_a_candidate_twice_is_tried_twice() -> None:
    def run(tensors: Tensors, states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        # Off by a twentieth even when repaired: the search goes on after its first repair.
        delta = swapped_output(tensors, states, inputs) - states
        return states + 0.95 * delta

    outcome = trial_of(run, [SWAP, SWAP])
    assert not outcome.is_right
    assert outcome.repairs == ()


def test_an_output_of_nan_is_repaired_by_nothing() -> None:
    outcome = trial_of(lambda tensors, states, inputs: states * torch.nan, CANDIDATES)
    assert outcome.error == float("inf")
    assert outcome.repairs == ()


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_port_that_fails_on_changed_weights_is_wrong_and_not_the_end(num_runs: int) -> None:
    outcome = trial_of(failing_after(num_runs, TargetError("the port failed")), CANDIDATES[1:])
    assert outcome.error is not None
    assert not outcome.is_right
    assert not outcome.is_quantised
    assert outcome.repairs == ()


def test_a_port_that_exits_on_changed_weights_ends_the_trial() -> None:
    with pytest.raises(PortEndError):
        trial_of(failing_after(1, PortEndError("the port exited")), CANDIDATES)


ROWS, COLUMNS = 384, 256
BY_ROW, BY_BLOCK = "INT8 with a scale for each row", "INT8 with a scale for each block"


def matrix(seed: int = 0, size: float = 0.05) -> torch.Tensor:
    return size * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def quantise(weight: torch.Tensor, height: int, width: int, *, shift: int = 0) -> torch.Tensor:
    """Through INT8 with a scale for each part; `shift` takes the scale of a part before."""
    parts = weight.reshape(ROWS // height, height, COLUMNS // width, width)
    scales = parts.abs().amax((1, 3), keepdim=True) / 127
    codes = (parts / scales).round().clamp(-127, 127)
    return (codes * scales.roll(shift, 0)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [(BY_ROW, 1, COLUMNS), (BY_ROW, 1, 128), (BY_ROW, 1, 32), (BY_BLOCK, 128, 128), (BY_BLOCK, 1, 64)],
)
def test_int8_keeps_them_and_a_scale_of_another_place_does_not(name: str, height: int, width: int) -> None:
    kept = EXACT_VALUES[name](matrix())
    assert torch.equal(quantise(kept, height, width), kept)
    assert not torch.equal(quantise(kept, height, width, shift=1), kept)


def test_they_are_bf16_numbers_with_the_signs_of_the_others() -> None:
    for keep in EXACT_VALUES.values():
        kept = keep(matrix())
        assert torch.equal(kept.bfloat16().float(), kept)
        large = matrix().abs() > 0.05
        assert bool((kept.sign() == matrix().sign())[large].all())


def test_values_of_one_way_are_lost_in_another() -> None:
    by_row, by_block = EXACT_VALUES[BY_ROW](matrix()), EXACT_VALUES[BY_BLOCK](matrix())
    assert not torch.equal(quantise(by_row, 128, 128), by_row)
    assert not torch.equal(quantise(by_block, 1, COLUMNS), by_block)
    # FP8 has three bits behind the first.
    assert not torch.equal(by_row.to(torch.float8_e4m3fn).float(), by_row)


def test_matrices_of_one_width_may_be_quantised_side_by_side() -> None:
    first, second = (EXACT_VALUES[BY_BLOCK](matrix(seed, size)) for seed, size in ((0, 0.05), (1, 0.2)))
    halves = torch.cat((first[:64], second[:64])).repeat(3, 1)
    assert torch.equal(quantise(halves, 128, 128), halves)
