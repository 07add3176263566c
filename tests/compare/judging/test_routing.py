from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from compare.judging.routing import (
    RouterNoise,
    align_by_expert,
    align_by_size,
    compare_routing,
    count_unflipped,
    flip_chance,
    flipped_tokens,
)
from compare.limits.limits import LimitContext, NoiseLimits
from compare.limits.limits_file import calibrated_limits
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Flip, RoutingResult

EXPERTS = torch.tensor([[3, 1, 7], [0, 2, 4], [5, 6, 7], [1, 2, 3]])


def router_noise(
    *margins: float, noise: float = 1e-3, widening: tuple[float, ...] | None = None
) -> RouterNoise:
    return RouterNoise(
        margin=torch.tensor(margins),
        noise=torch.full((len(margins),), noise),
        widening=None if widening is None else torch.tensor(widening),
    )


def compare(reference: torch.Tensor, target: torch.Tensor, noise: RouterNoise | None) -> RoutingResult:
    places = torch.tensor([[0, 3], [0, 4], [1, 0], [1, 1]])
    return compare_routing(reference, target, noise, places=places)


def with_expert(token: int, place: int, expert: int) -> torch.Tensor:
    changed = EXPERTS.clone()
    changed[token, place] = expert
    return changed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_other_expert_flips_its_token_alone_and_the_order_is_free(dtype: torch.dtype) -> None:
    assert not flipped_tokens(EXPERTS, EXPERTS[:, [2, 0, 1]].to(dtype)).any()
    assert flipped_tokens(EXPERTS, with_expert(2, 0, 9)).tolist() == [False, False, True, False]


class TestExplanation:
    def test_flip_within_the_noise_is_explained(self) -> None:
        routing = compare(EXPERTS, with_expert(2, 0, 9), router_noise(0.5, 0.5, 1e-3, 0.5))
        assert (routing.num_tokens, routing.num_flipped, routing.num_explained) == (4, 1, 1)
        assert (routing.num_unexplained, routing.widest_unexplained_margin) == (0, None)
        # A fragile token that does not flip counts for nothing.
        routing = compare(EXPERTS, EXPERTS, router_noise(0.0, 0.0, 0.0, 0.0))
        assert (routing.num_flipped, routing.num_explained) == (0, 0)

    def test_flips_beyond_the_noise_are_named_the_widest_first(self) -> None:
        target = with_expert(2, 0, 9)
        target[3, 1] = 8
        routing = compare(EXPERTS, target, router_noise(0.5, 0.5, 0.125, 0.25))
        assert routing.worst_flips == (
            Flip(row=1, position=1, dropped=(2,), chosen=(8,), margin=0.25),
            Flip(row=1, position=0, dropped=(5,), chosen=(9,), margin=0.125),
        )
        assert (routing.num_flipped, routing.num_unexplained) == (2, 2)
        assert routing.widest_unexplained_margin == 0.25

    def test_expert_from_far_behind_is_not_explained_by_a_near_tie(self) -> None:
        scores = torch.linspace(1.0, 0.1, 10).expand(4, 10)
        near = router_noise(0.5, 0.5, 1e-3, 0.5)
        first, last = torch.tensor([0, 1, 2]).repeat(4, 1), torch.tensor([0, 1, 2]).repeat(4, 1)
        last[2, 2] = 9
        assert compare(first, last, near).num_explained == 1
        routing = compare(first, last, replace(near, scores=scores))
        assert (routing.num_explained, routing.widest_unexplained_margin) == (0, pytest.approx(0.7))
        next_to = first.clone()
        next_to[2, 2] = 3
        tie = scores.clone()
        tie[:, 3] = tie[:, 2] - 1e-3
        assert compare(first, next_to, replace(near, scores=tie)).num_explained == 1

    def test_without_a_floor_no_flip_is_explained(self) -> None:
        routing = compare(EXPERTS, with_expert(2, 0, 9), None)
        assert (routing.num_flipped, routing.num_explained) == (1, 0)
        assert routing.widest_unexplained_margin is None

    def test_error_handed_on_widens_the_noise_token_by_token(self) -> None:
        margins = (0.02, 0.02)
        assert router_noise(*margins).is_fragile().tolist() == [False, False]
        assert router_noise(*margins, widening=(1.0, 100.0)).is_fragile().tolist() == [False, True]
        # A margin that cannot flip is never fragile.
        assert not router_noise(math.inf, math.inf, noise=0.0).is_fragile().any()


class TestWeights:
    def test_weights_follow_their_experts_and_those_of_unnamed_ones_are_in_any_order(self) -> None:
        weights = torch.rand(4, 3)
        order = torch.tensor([2, 0, 1])
        aligned = align_by_expert(weights, EXPERTS)
        assert torch.equal(aligned, align_by_expert(weights[:, order], EXPERTS[:, order]))
        assert torch.equal(aligned[0], weights[0, [1, 0, 2]])

        assert torch.equal(align_by_size(weights), align_by_size(weights[:, order]))
        assert not torch.equal(align_by_size(weights), align_by_size(2 * weights))


def test_reach_is_four_times_the_noise_of_nearly_all_tokens() -> None:
    noise = RouterNoise(margin=torch.tensor([396.0, 396.5]).repeat(51)[:101], noise=torch.arange(101.0))
    assert noise.reach.tolist() == [4.0 * 99.0] * 101
    assert noise.is_fragile().tolist() == ([True, False] * 51)[:101]


class TestFlipMargin:
    """Margin of a token: the largest distance between an expert dropped and a new one."""

    SCORES = torch.tensor([[0.9, 0.8, 0.7, 0.2, 0.1]] * 4)

    def margins(self, golden: list[list[int]], port: list[list[int]], own: tuple[float, ...]) -> list[float]:
        noise = replace(router_noise(*own), scores=self.SCORES)
        return noise.flip_margin(torch.tensor(golden), torch.tensor(port)).tolist()

    def test_it_is_that_of_dropped_and_new_experts(self) -> None:
        golden = [[0, 1], [0, 1], [1, 2], [0, 1]]
        port = [[1, 2], [3, 4], [2, 0], [1, 0]]
        found = self.margins(golden, port, (0.01, 0.02, 0.03, 0.04))
        # The third token's new expert has the higher score; the fourth did not flip.
        assert found == pytest.approx([0.9 - 0.7, 0.9 - 0.1, 0.03, 0.04])

    def test_numbers_that_are_no_expert_s_drop_and_add_none(self) -> None:
        found = self.margins([[0, 1]] * 4, [[1, -1], [1, 5], [1, 4], [0, 4]], (0.01,) * 4)
        assert found == pytest.approx([0.01, 0.01, 0.9 - 0.1, 0.8 - 0.1])


class TestImpossible:
    @pytest.mark.parametrize("repeated", [[1, 1, 2, 3], [1, 2, 2, 3], [1, 2, 3, 3]])
    def test_an_expert_named_twice_is_found_wherever_it_stands(self, repeated: list[int]) -> None:
        golden, port = torch.tensor([[1, 2, 3, 4]] * 4), torch.tensor([[1, 2, 3, 5]] * 4)
        port[2] = torch.tensor(repeated)
        # The other three tokens flip too, within noise.
        routing = compare(golden, port, router_noise(0.0, 0.0, 0.0, 0.0))
        assert (routing.num_flipped, routing.num_explained) == (4, 3)
        assert [(flip.row, flip.position) for flip in routing.worst_flips] == [(1, 0)]

    @pytest.mark.parametrize("expert", [-1, 10])
    def test_the_last_expert_is_one_and_the_next_number_is_none(self, expert: int) -> None:
        golden = torch.tensor([[1, 2, 3]] * 4)
        port = torch.tensor([[1, 2, 9], [1, 2, 0], [1, 2, 7], [1, 2, 8]])
        noise = replace(router_noise(0.0, 0.0, 0.0, 0.0), scores=torch.zeros(4, 10))
        assert compare(golden, port, noise).num_explained == 4
        port[3, 0] = expert
        assert compare(golden, port, noise).num_explained == 3

    def test_without_scores_no_number_is_too_large(self) -> None:
        golden, port = torch.tensor([[1, 2, 3]] * 4), torch.tensor([[1, 2, 4_000]] * 4)
        assert compare(golden, port, router_noise(0.0, 0.0, 0.0, 0.0)).num_explained == 4


def test_five_flips_are_named() -> None:
    golden, port = torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1, dtype=torch.int64)
    places = torch.stack((torch.zeros(9), torch.arange(9)), dim=1).long()
    routing = compare_routing(golden, port, None, places=places)
    assert [flip.position for flip in routing.worst_flips] == [0, 1, 2, 3, 4]
    assert routing.worst_flips[0] == Flip(row=0, position=0, dropped=(0,), chosen=(1,), margin=None)


class TestChance:
    LIMITS = calibrated_limits()
    CONTEXT = LimitContext(backend="cpu", is_float32=False, share=1e-6)

    def usual(self, site: Site, figure: str) -> float:
        return self.LIMITS.floorless(site, figure).usual

    def test_a_quarter_of_many_tokens_counts_though_all_may_have_flipped(self) -> None:
        for num_tokens, fewest in ((15, 0), (16, 4), (17, 4), (100, 25)):
            found = count_unflipped(num_tokens, self.LIMITS, input_error=100.0, context=self.CONTEXT)
            assert found == fewest

    def test_it_grows_with_the_error_of_the_routers_logits(self) -> None:
        share = self.usual(Site.ROUTER_EXPERTS, "flipped_share")
        error = self.usual(Site.ROUTER_LOGITS, "relative_l2")

        def chance(
            input_error: float, *, limits: NoiseLimits = self.LIMITS, is_float32: bool = False
        ) -> float:
            return flip_chance(input_error, limits, context=replace(self.CONTEXT, is_float32=is_float32))

        assert chance(0.0) == pytest.approx(share)
        assert chance(error) == pytest.approx(math.sqrt(2.0) * share)
        assert chance(1e6) == 1.0
        own = replace(self.LIMITS, float32=3.0 * error)
        assert chance(4.0 * error, limits=own, is_float32=True) == pytest.approx(5.0 * share)
        assert chance(4.0 * error, limits=own) == pytest.approx(math.sqrt(17.0) * share)
