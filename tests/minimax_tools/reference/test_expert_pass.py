"""Experts of many evaluations at once: each gives what its own matrices give, whatever the others do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.model.graph import ModelGraph
from minimax_tools.reference.expert_pass import Allocate, ExpertJob, Recipe, run_experts

NUM_TOKENS, HIDDEN, WIDTH = 5, 4, 3
EXPERTS = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0], [0, 1]])


class Weights:
    """Weights of three experts, by their names; notes how often each is converted."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.read: Counter[str] = Counter()
        self.values = {
            f"mlp.experts.{expert}.{matrix}.weight": torch.randn(
                (HIDDEN, WIDTH) if matrix == "w2" else (WIDTH, HIDDEN), generator=generator
            )
            for expert in range(3)
            for matrix in ("w1", "w2", "w3")
        }

    def value(self, name: str, *, allocate: Allocate) -> torch.Tensor:
        name = next(key for key in self.values if name.endswith(key.removeprefix("mlp.")))
        self.read[name] += 1
        return allocate(self.values[name].shape).copy_(self.values[name])

    def matrix(self, expert: int, matrix: str) -> torch.Tensor:
        return self.values[f"mlp.experts.{expert}.{matrix}.weight"]


def job(experts: torch.Tensor = EXPERTS, *, seed: int = 1, recipe: Recipe | None = None) -> ExpertJob:
    generator = torch.Generator().manual_seed(seed)
    return ExpertJob(
        graph=ModelGraph(),
        states=torch.randn(len(experts), HIDDEN, generator=generator),
        experts=experts,
        shares=torch.rand(experts.shape, generator=generator),
        recipe=recipe or Recipe(),
    )


def run(weights: Weights, *jobs: ExpertJob) -> list[torch.Tensor]:
    given: Any = weights
    return run_experts(given, jobs)


def expected(weights: Weights, one: ExpertJob, *, gate_scale: float = 1.0) -> torch.Tensor:
    """Compute each token's experts alone."""
    outputs = torch.zeros(*one.experts.shape, HIDDEN)
    for token, experts in enumerate(one.experts.tolist()):
        for slot, expert in enumerate(experts):
            if expert >= 0:
                gate = gate_scale * weights.matrix(expert, "w1") @ one.states[token]
                up = weights.matrix(expert, "w3") @ one.states[token]
                mixed = torch.nn.functional.silu(gate) * up
                outputs[token, slot] = weights.matrix(expert, "w2") @ mixed
    return outputs


def doubled(weights: Any, expert: int, matrix: str, allocate: Allocate) -> torch.Tensor:
    stored = weights.matrix(expert, matrix)
    return torch.mul(stored, 2.0, out=allocate(stored.shape))


def test_each_job_has_the_outputs_of_its_own_states_and_experts() -> None:
    weights = Weights()
    jobs = [job(), job(seed=2), job(EXPERTS.flip(0)[:3], seed=3)]
    for one, outputs in zip(jobs, run(weights, *jobs), strict=True):
        torch.testing.assert_close(outputs, expected(weights, one))
    # Each matrix is converted once for all.
    assert set(weights.read.values()) == {1}
    assert len(weights.read) == 9
    assert run(weights) == []


def test_negative_number_gives_zeros() -> None:
    weights = Weights()
    experts = EXPERTS.clone()
    experts[1, 0] = experts[4, 1] = -1
    (outputs,) = run(weights, one := job(experts))
    torch.testing.assert_close(outputs, expected(weights, one))
    assert not bool(outputs[1, 0].any())
    # Nobody asks for the experts 0 and 1.
    weights = Weights()
    run(weights, job(torch.full((2, 1), 2)))
    assert len(weights.read) == 3


def test_changed_matrix_is_read_by_its_own_recipe_alone() -> None:
    weights = Weights()
    doubling, halving = (
        Recipe(read=lambda *arguments, by=by: by * doubled(*arguments), changed=("w1",))  # type: ignore[misc]
        for by in (1.0, 0.25)
    )
    jobs = [job(), job(seed=2, recipe=doubling), job(seed=3, recipe=doubling), job(seed=3, recipe=halving)]
    scales = (1.0, 2.0, 2.0, 0.5)
    for one, outputs, scale in zip(jobs, run(weights, *jobs), scales, strict=True):
        torch.testing.assert_close(outputs, expected(weights, one, gate_scale=scale))
    # Without the name, the recipe's function is not asked.
    (unchanged,) = run(weights, job(recipe=Recipe(read=doubled)))
    torch.testing.assert_close(unchanged, expected(weights, job()))


def test_mix_gets_gate_up_and_the_shares_of_its_tokens() -> None:
    weights = Weights()
    shared = job(recipe=Recipe(mix=lambda gate, up, slots: (gate - up) * slots.shares[:, None]))
    plain = job(seed=2)
    outputs, others = run(weights, shared, plain)
    for token, experts in enumerate(EXPERTS.tolist()):
        for slot, expert in enumerate(experts):
            gate, up = (weights.matrix(expert, name) @ shared.states[token] for name in ("w1", "w3"))
            mixed = (gate - up) * shared.shares[token, slot]
            torch.testing.assert_close(outputs[token, slot], weights.matrix(expert, "w2") @ mixed)
    torch.testing.assert_close(others, expected(weights, plain))


def test_jobs_of_one_input_have_each_their_own_tokens_shares_and_mix() -> None:
    weights = Weights()
    first = job()
    # The same states: a mistake of the router, one of the mix, one of both, and one of a matrix.
    flipped = replace(first, experts=EXPERTS.flip(1)[:, :1])
    mixed = replace(first, recipe=Recipe(mix=lambda gate, up, slots: (gate - up) * slots.shares[:, None]))
    elsewhere = replace(first, experts=EXPERTS.roll(1, 0), recipe=Recipe(mix=lambda gate, up, _: gate * up))
    changed = replace(first, recipe=Recipe(read=doubled, changed=("w1", "w2")))
    jobs = (first, flipped, mixed, elsewhere, changed)
    for together, one in zip(run(weights, *jobs), jobs, strict=True):
        (alone,) = run(weights, replace(one, states=one.states.clone()))
        torch.testing.assert_close(together, alone)
    torch.testing.assert_close(run(weights, *jobs)[1], expected(weights, flipped))


def test_error_of_an_expert_is_raised() -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("no such matrix")

    with pytest.raises(ValueError, match="no such matrix"):
        run(Weights(), job(recipe=Recipe(read=fail, changed=("w3",))))
