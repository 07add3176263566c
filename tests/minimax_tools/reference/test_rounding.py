from __future__ import annotations

import pytest
import torch

from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, LM_HEAD
from minimax_tools.reference.rounding import Float32Head, Rounding, RoundingKind, rounded_rows

EXACT, NEAREST, RANDOM = RoundingKind


def numbers() -> torch.Tensor:
    return torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 4096)


def apply(values: torch.Tensor, *kinds: RoundingKind, seed: int = 1, draw: int = 0) -> torch.Tensor:
    return Rounding(seed=seed).apply(values.clone(), rounded_rows(torch.tensor(kinds)), draw=draw)


def test_each_row_rounds_in_its_own_way() -> None:
    values = numbers()
    rounded = apply(values, EXACT, NEAREST, RANDOM)
    assert torch.equal(rounded[0], values[0])
    assert torch.equal(rounded[1], values[1].bfloat16().float())
    assert not torch.equal(rounded[2], values[2])


def test_random_steps_cost_what_rounding_to_nearest_costs_and_reach_half_a_step() -> None:
    values = numbers()[:1].repeat(2, 1)
    relative = (apply(values, NEAREST, RANDOM) - values) / values
    nearest, random = relative.square().mean(dim=-1).sqrt().tolist()
    assert random == pytest.approx(nearest, rel=0.1)
    assert relative[1].mean().abs() < 3 * random / 64
    moved = (apply(numbers(), RANDOM, RANDOM, RANDOM) - numbers()).abs()
    assert bool((moved <= numbers().abs() * 2.0**-8).all())


def test_random_steps_hang_on_seed_and_draw_alone() -> None:
    values = numbers()
    first = apply(values, EXACT, EXACT, RANDOM)
    assert torch.equal(first, apply(values, EXACT, EXACT, RANDOM))
    assert not torch.equal(first, apply(values, EXACT, EXACT, RANDOM, seed=2))
    assert not torch.equal(first, apply(values, EXACT, EXACT, RANDOM, draw=1))
    # Zero stays zero.
    assert not apply(torch.zeros(1, 8), RANDOM).any()


def test_head_is_norm_and_projection_in_float32(
    reader: CheckpointReader, spec: ModelSpec, capture: Capture
) -> None:
    states = capture.read(3, Site.OUTPUT)
    norm, lm_head = (reader.read_weight(name, torch.bfloat16) for name in (FINAL_NORM, LM_HEAD))
    found = Float32Head(norm, lm_head, spec=spec).run(states)
    assert set(found) == {ModelSite.FINAL_NORM, ModelSite.LOGITS}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    exact = states.double()
    scale = (exact.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt()
    logits = exact / scale * reader.read(FINAL_NORM).double() @ reader.read(LM_HEAD).double().T
    error = (found[ModelSite.LOGITS].double() - logits).norm() / logits.norm()
    assert float(error) < 1e-6
