"""The choice of experts, derived from a port's own logits, or the nearest of those that noise may have made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.port_choice import (
    DerivedChoice,
    derive_choice,
    find_contradictions,
    find_nearest_choice,
)
from compare.judging.routing import RouterNoise
from compare.noise.rows import Rows, Squares
from minimax_tools.metrics.noise_floor import choice_margin
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.router import weigh_experts
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, EXPERT_MATRICES, GATE, expert_weight
from minimax_tools.reference.upcast import upcast_experts

NO_BIAS = torch.zeros(4)


SPEC: Any = SimpleNamespace(num_experts_per_tok=2, graph=ModelGraph())


class Port:
    """The two sides of a layer of which the port shows some rows: four experts, two of them for each token."""

    def __init__(
        self,
        *,
        is_classic: bool = False,
        has_weights: bool = True,
        bias: torch.Tensor = NO_BIAS,
        **shown: torch.Tensor,
    ) -> None:
        self._bias = bias
        self._shown = {Site(name): rows for name, rows in shown.items()}
        self.weights, self.reference, self.is_classic = (self if has_weights else None), None, is_classic
        self.num_opened = 0

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        # The golden's rows say the opposite.
        return (-self._shown[site], self._shown[site]) if site in self._shown else None

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        self.num_opened += 1
        tensors = {CORRECTION_BIAS: self._bias, GATE: GATE_ROWS.bfloat16()}
        yield SimpleNamespace(tensors=tensors, spec=SPEC)


GATE_ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
LOGITS = torch.tensor([[2.0001, 1.0, -1.0, -1.5], [-1.0, 2.0, 1.0001, -2.0]])
STATES = torch.tensor([[3.0, 1.0], [-3.0, -1.0]])


def derive(**options: Any) -> list[list[int]] | None:
    sides: Any = Port(**options)
    found = derive_choice(sides, 0)
    return None if found is None else found.experts.sort(dim=1).values.tolist()


def test_choice_follows_from_logits_or_else_from_the_routers_input() -> None:
    assert derive(router_logits=LOGITS) == [[0, 1], [1, 2]]
    assert derive(post_norm=STATES) == [[0, 1], [2, 3]]
    assert derive(router_logits=LOGITS, post_norm=STATES) == [[0, 1], [1, 2]]


def test_what_is_no_number_or_not_known_gives_no_choice() -> None:
    broken = LOGITS.clone()
    broken[1, 1] = float("nan")
    assert derive() is None
    assert derive(router_logits=broken) is None
    assert derive(router_logits=broken, post_norm=STATES) == [[0, 1], [2, 3]]
    assert derive(router_logits=LOGITS, has_weights=False) is None
    assert derive(router_logits=LOGITS, is_classic=True) is None
    experts = torch.zeros(2, 2, dtype=torch.int64)
    for options in ({"router_logits": broken}, {"router_logits": LOGITS, "has_weights": False}):
        assert find_contradictions(Port(**options), 0, experts) is None  # type: ignore[arg-type]
    sides: Any = Port(post_norm=STATES)
    assert find_contradictions(sides, 0, experts) is None
    assert sides.num_opened == 0


def test_contradictions_are_told_token_by_token() -> None:
    sides: Any = Port(router_logits=LOGITS)
    experts = torch.tensor([[1, 0], [1, 3]])
    found = find_contradictions(sides, 0, experts)
    assert found is not None
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("shift", [0.0, 1e-4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("times", "is_sure"), [(0.99, False), (1.01, True)])
def test_a_choice_is_sure_beyond_twice_its_error(shift: float, times: float, is_sure: bool) -> None:
    """Token 0 is the one under test; token 1 has smaller logits, a smaller error, and so a smaller margin is sure."""
    step = 2e-5 if shift else 2.0**-8
    logits = torch.tensor([[8.0 + shift, 3.0, 2.0, -3.0], [0.0390625 + step, 0.0390625, 0.0390625, 0.0]])
    scores = logits[0].sigmoid()
    # The error is one of the logit in BF16, of the token's largest logit in float32.
    errors = 2.0**-8 * logits[0].abs() if shift == 0.0 else 1e-5 * logits[0].abs().max()
    reach = float((scores * (1.0 - scores) * errors).max())
    bias = torch.zeros(4)
    bias[2] = float(scores[1] - scores[2]) - 2.0 * times * reach
    sides: Any = Port(router_logits=logits, bias=bias)
    found = derive_choice(sides, 0)
    assert found is not None
    assert found.is_sure.tolist() == [is_sure, True]
    other = torch.stack((torch.tensor([0, 2]), found.experts[1]))
    contradictions = find_contradictions(sides, 0, other)
    assert contradictions is not None
    assert contradictions.tolist() == [is_sure, False]


def test_another_choice_completes_the_tokens_that_are_not_sure() -> None:
    one = DerivedChoice(
        experts=torch.tensor([[0, 1], [2, 3], [4, 5]]), is_sure=torch.tensor([True, False, False])
    )
    other = DerivedChoice(
        experts=torch.tensor([[6, 7], [8, 9], [1, 2]]), is_sure=torch.tensor([True, True, False])
    )
    assert one.completed(None) is one
    found = one.completed(other)
    assert found.experts.tolist() == [[0, 1], [8, 9], [1, 2]]
    assert found.is_sure.tolist() == [True, True, False]


# A layer of nine small experts.
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

    def routed_scale(self, site: Site) -> float:
        return 1.0

    def read_beside(self, layer: int, site: Site, *, is_exact: bool) -> torch.Tensor | None:
        assert is_exact
        if site is Site.MOE_DELTA:
            return torch.zeros_like(self.stream)
        return None if "stream" in self.lacking else self.stream

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        yield SimpleNamespace(tensors={**WEIGHTS, CORRECTION_BIAS: self._bias}, spec=SPEC)

    def added(self, experts: torch.Tensor) -> torch.Tensor:
        return upcast_experts(
            WEIGHTS, self.states, experts, weigh_experts(SPEC.graph, self.logits, experts), graph=SPEC.graph
        )

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
