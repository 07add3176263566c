"""The nearest of the choices that noise may have made, in a layer of nine small experts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.port_choice import find_nearest_choice
from compare.judging.routing import RouterNoise
from compare.noise.rows import Rows, Squares
from minimax_tools.metrics.noise_floor import choice_margin
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, EXPERT_MATRICES, expert_weight
from minimax_tools.reference.float32_stages import expert_shares
from minimax_tools.reference.upcast import upcast_experts

EXPERTS, CHOSEN, HIDDEN, INNER = 9, 2, 8, 4
GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = {
    expert_weight(expert, name): torch.randn(
        *((HIDDEN, INNER) if name == "w2" else (INNER, HIDDEN)), generator=GENERATOR
    )
    for expert in range(EXPERTS)
    for name in EXPERT_MATRICES
}
# Biased scores as far apart as these; the second and the third are near, and the fourth.
FAR = (0.30, 0.28, 0.26, 0.24, 0.22)
SCORES = torch.tensor([0.90, 0.60, 0.59, 0.57, *FAR])


class Layer:
    """A golden with its router and its experts, and what a port's experts would give."""

    def __init__(self, scores: torch.Tensor, *, bias: float = 0.0, lacking: tuple[str, ...] = ()) -> None:
        """`scores` [T,E] are biased; the experts' biases run from `-bias` to `bias`."""
        num_tokens = len(scores)
        self.lacking = lacking
        self._bias = torch.linspace(-bias, bias, EXPERTS)
        self.logits = (scores - self._bias).logit()
        self.states = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.stream = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
        self.experts = scores.topk(CHOSEN, dim=-1).indices
        self.margin = choice_margin(scores, CHOSEN)
        self.weights, self.reference = (None if "weights" in lacking else self), None

    def read_golden(self, layer: int, site: Site) -> torch.Tensor | None:
        return None if str(site) in self.lacking else self.experts.float()

    def read_exact(self, layer: int, site: Site) -> torch.Tensor | None:
        values = {Site.POST_NORM: self.states, Site.ROUTER_LOGITS: self.logits}[site]
        return None if str(site) in self.lacking else values

    def read_stream(self, layer: int, *, is_exact: bool) -> torch.Tensor | None:
        assert is_exact
        return None if "stream" in self.lacking else self.stream

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        yield SimpleNamespace(tensors={**WEIGHTS, CORRECTION_BIAS: self._bias})

    def added(self, experts: torch.Tensor) -> torch.Tensor:
        return upcast_experts(WEIGHTS, self.states, experts, expert_shares(self.logits.sigmoid(), experts))

    def find(
        self,
        port_experts: torch.Tensor,
        *,
        reach: float,
        site: Site = Site.MOE_DELTA,
        ratio: float | None = None,
    ) -> tuple[list[list[int]], list[bool]] | None:
        """Find the choice of a port with these experts, whose output is as exact as the golden's."""
        added, golden = self.added(port_experts), self.added(self.experts)
        if site is Site.OUTPUT:
            added, golden = added + self.stream, golden + self.stream
        num_tokens = len(self.experts)
        port = added + 1e-5
        # Of each token, its error over the ratio; else a floor that only the golden's experts reach.
        squares = (
            (port - golden).double().square().sum(dim=1) / (1.0 + ratio**2)
            if ratio
            else torch.full((num_tokens,), 1e-8)
        )
        floor = Squares(ordinary=squares.double(), massive=torch.zeros(num_tokens).double())
        rows = Rows(
            reference=golden,
            target=port,
            massive=torch.zeros(HIDDEN, dtype=torch.bool),
            places=torch.zeros(num_tokens, 2, dtype=torch.int64),
            floor=floor,
        )
        # The reach is four times the noise.
        noise = RouterNoise(margin=self.margin, noise=torch.full((num_tokens,), reach / 4.0))
        sides: Any = self
        found = find_nearest_choice(sides, 0, site=site, rows=rows, noise=noise)
        if found is None:
            return None
        return found.experts.sort(dim=-1).values.tolist(), found.is_sure.tolist()


@pytest.mark.parametrize("site", [Site.MOE_DELTA, Site.OUTPUT])
@pytest.mark.parametrize("bias", [0.0, 0.1])
@pytest.mark.parametrize("port", [(0, 1), (0, 2), (0, 3)])
def test_each_choice_within_reach_is_found(site: Site, bias: float, port: tuple[int, int]) -> None:
    layer = Layer(SCORES[None].repeat(3, 1), bias=bias)
    experts = layer.experts.clone()
    experts[1] = torch.tensor(port)
    assert layer.find(experts, reach=0.035, site=site) == ([[0, 1], [*port], [0, 1]], [True] * 3)


def test_a_choice_out_of_reach_is_taken_for_the_nearest_within() -> None:
    layer = Layer(SCORES[None].repeat(3, 1))
    experts = layer.experts.clone()
    experts[1] = torch.tensor([0, 3])
    found = layer.find(experts, reach=0.015)
    assert found is not None
    assert found[0][1] in ([0, 1], [0, 2])
    assert found[1] == [True] * 3


def test_two_experts_may_be_exchanged_at_once() -> None:
    scores = torch.tensor([0.60, 0.59, 0.58, 0.57, *FAR])
    layer = Layer(scores[None].repeat(2, 1))
    for port in itertools.combinations(range(4), 2):
        experts = torch.tensor([[*port], [0, 1]])
        assert layer.find(experts, reach=0.035) == ([[*port], [0, 1]], [True, True]), port
    # Of a pair the highest dropped one decides: 0 and 3 are 0.03 apart, 1 and 3 are 0.02.
    found = layer.find(torch.tensor([[2, 3], [0, 1]]), reach=0.025)
    assert found is not None
    assert found[0][0] != [2, 3]


def test_any_number_of_tokens_that_noise_does_not_reach_keep_the_goldens_experts() -> None:
    layer = Layer(SCORES[None].repeat(300, 1))
    found = layer.find(torch.tensor([[4, 5]]).repeat(300, 1), reach=0.005)
    assert found == ([[0, 1]] * 300, [True] * 300)


@pytest.mark.parametrize(("num_near", "is_open"), [(7, False), (8, True)])
def test_a_token_with_too_many_choices_stays_open(num_near: int, is_open: bool) -> None:
    # Any two of the near experts may be chosen: 21 choices of 7, 28 of 8.
    near = torch.linspace(0.60, 0.59, num_near)
    wide = torch.cat((near, torch.tensor(FAR)))[:EXPERTS]
    layer = Layer(torch.stack((SCORES, wide)))
    experts = torch.tensor([[0, 2], [5, 6]])
    expected = ([[0, 2], [0, 1]], [True, False]) if is_open else ([[0, 2], [5, 6]], [True, True])
    assert layer.find(experts, reach=0.035) == expected
    # Nothing is computed where all tokens stay open.
    if is_open:
        assert Layer(wide[None]).find(experts[1:], reach=0.035) == ([[0, 1]], [False])


@pytest.mark.parametrize("lacking", ["weights", "router_experts", "post_norm", "router_logits", "stream"])
def test_what_is_not_known_gives_no_choice(lacking: str) -> None:
    layer = Layer(SCORES[None].repeat(2, 1), lacking=(lacking,))
    experts = torch.tensor([[0, 2], [0, 1]])
    assert layer.find(experts, reach=0.035, site=Site.OUTPUT) is None
    # The stream is needed for the output alone.
    assert (layer.find(experts, reach=0.035) is None) == (lacking != "stream")


def test_tokens_beyond_a_number_of_them_stay_open() -> None:
    layer = Layer(SCORES[None].repeat(300, 1))
    experts = torch.tensor([[0, 2]]).repeat(300, 1)
    found = layer.find(experts, reach=0.035)
    assert found is not None
    assert sum(found[1]) == 256
    assert (found[1][0], found[1][-1]) == (True, True)
    assert all(chosen == ([0, 2] if is_sure else [0, 1]) for chosen, is_sure in zip(*found, strict=True))


@pytest.mark.parametrize(("ratio", "is_open"), [(1.1, False), (1.3, True)])
def test_a_token_is_plainly_alike_up_to_a_fifth_beyond_the_floor(ratio: float, is_open: bool) -> None:
    layer = Layer(SCORES[None])
    expected = [[0, 2]] if is_open else [[0, 1]]
    assert layer.find(torch.tensor([[0, 2]]), reach=0.035, ratio=ratio) == (expected, [True])
