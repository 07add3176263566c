from __future__ import annotations

import math

import pytest
import torch

from minimax_tools.metrics.noise_floor import (
    MASSIVE_RATIO,
    ROUTER_MARGIN,
    ROUTER_NOISE,
    Structure,
    competing_places,
    error_name,
    floor_statistics,
    massive_channels,
    massive_error_name,
    measure_structure,
    ordinary_error_name,
    token_rows,
)
from minimax_tools.model.router import Router
from minimax_tools.model.sites import Site
from minimax_tools.synthetic.toy_model import SyntheticModel

BATCH, LENGTH, HEADS, DIM, EXPERTS = 2, 5, 2, 4, 16
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
REAL = MASK.bool()
BIAS = torch.linspace(8.0, 9.0, EXPERTS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def statistics(
    reference: dict[Site, torch.Tensor], twin: dict[Site, torch.Tensor], *, k: int = 4
) -> dict[str, torch.Tensor]:
    spec = SyntheticModel(num_local_experts=EXPERTS, num_experts_per_tok=k).spec()
    router = Router(spec=spec, bias=BIAS)
    return floor_statistics(reference, twin, attention_mask=MASK, router=router)


def biased(logits: torch.Tensor) -> torch.Tensor:
    return logits.sigmoid() + BIAS


class TestRows:
    def test_heads_are_laid_side_by_side(self) -> None:
        flat = random(BATCH, LENGTH, HEADS * DIM)
        heads = flat.unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        assert torch.equal(token_rows(heads, Site.Q_ROPE), flat)
        assert torch.equal(token_rows(flat, Site.Q_NORM), flat)

    @pytest.mark.parametrize(("tokens", "massive"), [(slice(None), [3]), (slice(7, 8), [])])
    def test_channel_far_above_the_median_on_most_tokens_is_massive(
        self, tokens: slice, massive: list[int]
    ) -> None:
        rows = torch.ones(100, 8)
        rows[tokens, 3] = 2 * MASSIVE_RATIO
        assert massive_channels(rows).nonzero().flatten().tolist() == massive


class TestErrors:
    def test_error_is_the_distance_of_bf16_from_float32_per_token(self) -> None:
        exact = random(BATCH, LENGTH, 8)
        found = statistics({Site.ATTN_DELTA: exact.bfloat16()}, {Site.ATTN_DELTA: exact})
        expected = (exact.bfloat16().float() - exact).norm(dim=-1)
        assert torch.allclose(found[error_name(Site.ATTN_DELTA)][REAL], expected[REAL])

    @pytest.mark.parametrize("is_massive", [True, False])
    def test_massive_and_ordinary_channels_make_up_the_whole(self, is_massive: bool) -> None:
        exact = random(BATCH, LENGTH, 8)
        exact[..., 2] += 100.0 * is_massive
        reference = exact.bfloat16()
        found = statistics({Site.OUTPUT: reference}, {Site.OUTPUT: exact})
        whole, ordinary, massive = (
            found[name(Site.OUTPUT)] for name in (error_name, ordinary_error_name, massive_error_name)
        )
        expected = is_massive * (reference[..., 2].float() - exact[..., 2]).abs()
        assert torch.allclose(massive[REAL], expected[REAL])
        assert torch.allclose(whole.square(), ordinary.square() + massive.square(), rtol=1e-5)
        assert bool((ordinary[REAL] < 0.1 * massive[REAL]).any()) == is_massive

    @pytest.mark.parametrize("garbage", [0.0, 1e6, math.nan, math.inf])
    def test_padding_leaves_no_trace(self, garbage: float) -> None:
        exact, logits = random(BATCH, LENGTH, 8), random(BATCH, LENGTH, EXPERTS)
        expected = statistics(
            {Site.OUTPUT: exact.bfloat16(), Site.ROUTER_LOGITS: logits.bfloat16()},
            {Site.OUTPUT: exact, Site.ROUTER_LOGITS: logits},
        )
        reference, noisy = exact.bfloat16(), logits.bfloat16()
        for tensor in (reference, exact, noisy, logits):
            tensor[~REAL] = garbage
        found = statistics(
            {Site.OUTPUT: reference, Site.ROUTER_LOGITS: noisy},
            {Site.OUTPUT: exact, Site.ROUTER_LOGITS: logits},
        )
        assert found.keys() == expected.keys()
        for name, statistic in found.items():
            assert torch.equal(statistic, expected[name]), name
            assert not statistic[~REAL].any(), name

    def test_expert_numbers_and_sites_that_a_side_lacks_have_no_error(self) -> None:
        exact, experts = random(BATCH, LENGTH, 8), torch.zeros(BATCH, LENGTH, 4, dtype=torch.int64)
        twin = {Site.OUTPUT: exact, Site.MOE_DELTA: exact, Site.ROUTER_EXPERTS: experts + 1}
        found = statistics({Site.OUTPUT: exact.bfloat16(), Site.ROUTER_EXPERTS: experts}, twin)
        assert {name.partition(".")[0] for name in found} == {"output"}


class TestRouting:
    def test_margin_is_between_the_last_chosen_and_the_first_left_out(self) -> None:
        logits = random(BATCH, LENGTH, EXPERTS)
        found = statistics({Site.ROUTER_LOGITS: logits}, {Site.ROUTER_LOGITS: logits}, k=4)
        scores = biased(logits).sort(dim=-1, descending=True).values
        assert torch.allclose(found[ROUTER_MARGIN][REAL], (scores[..., 3] - scores[..., 4])[REAL])
        assert bool((found[ROUTER_MARGIN][REAL] > 0).all())

    @pytest.mark.parametrize(("place", "is_noise"), [(4, True), (-1, False)], ids=["rival", "hopeless"])
    def test_noise_is_the_largest_error_among_the_competitors(self, place: int, is_noise: bool) -> None:
        logits = random(BATCH, LENGTH, EXPERTS)
        expert = biased(logits).argsort(dim=-1, descending=True)[..., place, None]
        noisy = logits.scatter_add(-1, expert, torch.full((BATCH, LENGTH, 1), 0.01))
        found = statistics({Site.ROUTER_LOGITS: noisy}, {Site.ROUTER_LOGITS: logits})
        expected = is_noise * (biased(noisy) - biased(logits)).abs().amax(dim=-1)
        assert torch.allclose(found[ROUTER_NOISE][REAL], expected[REAL])

    def test_correction_bias_takes_part_in_the_choice(self) -> None:
        logits = torch.zeros(BATCH, LENGTH, EXPERTS)
        found = statistics({Site.ROUTER_LOGITS: logits}, {Site.ROUTER_LOGITS: logits})
        assert torch.allclose(found[ROUTER_MARGIN][REAL], BIAS[-4] - BIAS[-5], atol=1e-5)

    def test_choice_of_all_experts_cannot_flip(self) -> None:
        logits = random(BATCH, LENGTH, EXPERTS)
        found = statistics({Site.ROUTER_LOGITS: logits}, {Site.ROUTER_LOGITS: logits}, k=EXPERTS)
        assert bool(found[ROUTER_MARGIN][REAL].isinf().all())
        assert not found[ROUTER_NOISE].any()


@pytest.mark.parametrize(
    ("k", "num_experts", "places"), [(8, 256, (4, 12)), (2, 16, (0, 6)), (6, 8, (2, 8)), (4, 4, (0, 0))]
)
def test_as_many_experts_compete_as_there_are_places_around_the_last(
    k: int, num_experts: int, places: tuple[int, int]
) -> None:
    found = competing_places(k, num_experts)
    assert (found.start, found.stop) == places


TOKENS, CHANNELS = 160, 256


@pytest.fixture
def twin() -> torch.Tensor:
    return torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))


def rounded(exact: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a right implementation's values: noise of BF16's size."""
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))
    return exact * (1.0 + 4e-3 * noise)


def measure(twin: torch.Tensor, target: torch.Tensor) -> Structure:
    structure = measure_structure(
        twin, rounded(twin, 1), target, massive=torch.zeros(CHANNELS, dtype=torch.bool)
    )
    assert structure is not None
    return structure


def rho(twin: torch.Tensor, target: torch.Tensor) -> float:
    return float((target - twin).norm() / (rounded(twin, 1) - twin).norm())


def test_noise_as_large_as_the_goldens_is_near_one(twin: torch.Tensor) -> None:
    found = measure(twin, rounded(twin, 2))
    assert found.token_gain == pytest.approx(1.0, abs=0.2)
    assert found.channel_gain == pytest.approx(1.0, abs=0.2)
    assert found.channel_offset == pytest.approx(1.0, abs=0.2)
    assert found.channel_worst < 1.6


def test_scale_far_below_the_noise_is_seen(twin: torch.Tensor) -> None:
    target = rounded(1.002 * twin, 2)
    assert rho(twin, target) < 1.2
    found = measure(twin, target)
    assert found.token_gain > 3.0
    assert found.channel_gain > 3.0


def test_offset_far_below_the_noise_is_seen(twin: torch.Tensor) -> None:
    offset = 2e-3 * torch.randn(CHANNELS, generator=torch.Generator().manual_seed(3))
    target = rounded(twin, 2) + offset
    assert rho(twin, target) < 1.2
    assert measure(twin, target).channel_offset > 3.0


def test_one_bad_channel_is_seen_and_named(twin: torch.Tensor) -> None:
    target = rounded(twin, 2)
    target[:, 77] *= 1.03
    assert rho(twin, target) < 1.2
    found = measure(twin, target)
    assert (found.worst_channel, found.channel_worst > 5.0) == (77, True)


def test_massive_channels_do_not_hide_the_others_scale(twin: torch.Tensor) -> None:
    massive = torch.zeros(CHANNELS, dtype=torch.bool)
    massive[5] = True
    exact = twin.clone()
    exact[:, 5] = 1000.0
    target = rounded(1.005 * exact, 2)
    target[:, 5] = rounded(exact, 1)[:, 5]
    found = measure_structure(exact, rounded(exact, 1), target, massive=massive)
    assert found is not None
    assert found.token_gain > 3.0


def test_golden_without_an_error_gives_no_structure(twin: torch.Tensor) -> None:
    massive = torch.zeros(CHANNELS, dtype=torch.bool)
    assert measure_structure(twin, twin, rounded(twin, 2), massive=massive) is None
