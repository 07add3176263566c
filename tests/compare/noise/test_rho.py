"""Ratios of noise: errors of a port over the golden's, their interval, and the squares that they are made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import t as student

from compare.noise.rho import foreseen_error, foreseen_error_at, noise_ratio, rho_interval, token_ratios
from compare.noise.rows import InputError, Rows, Squares, measure_input_error, square_difference, square_rows
from minimax_tools.metrics.noise_floor import massive_channels, measure_structure
from minimax_tools.results.results import NoiseRatio

TOKENS, CHANNELS, MASSIVE = 40, 512, 7


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def places(tokens: int = TOKENS) -> torch.Tensor:
    """Two rows of the batch, one after the other."""
    return torch.stack((torch.arange(tokens) * 2 // tokens, torch.arange(tokens) % (tokens // 2)), dim=-1)


def rows_with(
    target: torch.Tensor,
    *,
    reference: torch.Tensor,
    twin: torch.Tensor,
    stats: bool = False,
    error: float = 0.0,
) -> Rows:
    """Rows with the floor kept whole, or as statistics; `error` is that of an input handed on."""
    massive = massive_channels(reference)
    return Rows(
        reference=reference,
        target=target,
        massive=massive,
        places=places(reference.shape[0]),
        twin=None if stats else twin,
        floor=square_difference(twin, reference, massive=massive) if stats else None,
        input_error=InputError(overall=error, tokens=torch.full((reference.shape[0],), error))
        if error
        else None,
    )


def rho(target: torch.Tensor, *, error: float = 0.0) -> NoiseRatio:
    return noise_ratio(rows_with(target, reference=REFERENCE, twin=TWIN, error=error))


EXACT = random(TOKENS, CHANNELS, seed=0)
TWIN = EXACT.clone()
TWIN[:, MASSIVE] = 90.0 + random(TOKENS, seed=1)
REFERENCE = TWIN.bfloat16()


class TestWhole:
    def test_port_as_noisy_as_the_golden_has_one(self) -> None:
        noise = rho(REFERENCE.clone())
        assert (noise.whole, noise.ordinary, noise.massive) == (1.0, 1.0, 1.0)
        assert (noise.token_median, noise.is_estimated, noise.incoming) == (1.0, False, 0.0)

    @pytest.mark.parametrize("factor", [0.5, 3.0, 20.0])
    def test_ratio_is_that_of_the_norms(self, factor: float) -> None:
        target = TWIN.double() + factor * (REFERENCE.double() - TWIN.double())
        noise = rho(target)
        assert noise.whole == pytest.approx(factor)
        assert noise.token_worst <= factor * (1 + 1e-9)

    def test_floor_of_zero_asks_for_bit_equality(self) -> None:
        exact = EXACT.bfloat16()
        assert noise_ratio(rows_with(exact.clone(), reference=exact, twin=exact.float())).whole == 0.0
        target = exact.clone()
        target[3, 5] = torch.nextafter(target[3, 5], target.new_tensor(math.inf))
        noise = noise_ratio(rows_with(target, reference=exact, twin=exact.float()))
        assert (noise.whole, noise.token_worst, noise.token_median) == (math.inf, math.inf, 0.0)

    def test_rows_without_a_floor_have_no_ratio(self) -> None:
        rows = replace(rows_with(REFERENCE, reference=REFERENCE, twin=TWIN), twin=None)
        assert not rows.has_floor
        with pytest.raises(ValueError, match="no noise floor"):
            noise_ratio(rows)


class TestChannels:
    def test_errors_on_massive_channels_and_on_ordinary_ones_hide_each_other_not(self) -> None:
        target = REFERENCE.float()
        target[:, :MASSIVE] *= 1.02
        noise = rho(target)
        assert noise.massive == 1.0
        assert noise.ordinary > 1.1 * noise.whole
        target = REFERENCE.float()
        target[:, MASSIVE] *= 1.01
        noise = rho(target)
        assert noise.ordinary == 1.0
        assert noise.massive is not None
        assert noise.massive > noise.whole > 2.0

    def test_without_massive_channels_there_is_no_massive_ratio(self) -> None:
        noise = noise_ratio(rows_with(EXACT.bfloat16(), reference=EXACT.bfloat16(), twin=EXACT))
        assert noise.massive is None
        assert noise.whole == noise.ordinary

    def test_channels_stay_massive_when_tokens_are_set_aside(self) -> None:
        exact = EXACT.clone()
        exact[: TOKENS // 2, MASSIVE] *= 60.0
        rows = rows_with(exact.bfloat16(), reference=exact.bfloat16(), twin=exact)
        later = rows.select(torch.arange(TOKENS) >= TOKENS // 2)
        assert later.num_tokens == TOKENS // 2
        assert not massive_channels(later.reference).any()
        assert noise_ratio(later).massive == 1.0


class TestTokens:
    def test_worst_token_is_named_by_row_and_position(self) -> None:
        target = REFERENCE.float()
        target[33] += 0.1 * random(CHANNELS, seed=2)
        noise = rho(target)
        assert noise.worst_token == (1, 13)
        assert noise.token_worst > 5.0
        assert noise.token_median == 1.0
        assert noise.token_median < noise.whole < noise.token_p99 < noise.token_worst

    def test_median_token_tells_what_a_few_large_floors_outweigh(self) -> None:
        reference = REFERENCE.float()
        reference[0] += 50.0 * random(CHANNELS, seed=3)
        target = TWIN + 5.0 * (reference - TWIN)
        target[0] = reference[0]
        noise = noise_ratio(rows_with(target, reference=reference, twin=TWIN))
        assert noise.whole < 1.1
        assert noise.token_median > 3.0


class TestEstimate:
    @pytest.mark.parametrize("factor", [1.0, 2.0, 6.0])
    def test_statistics_give_nearly_what_the_twin_gives(self, factor: float) -> None:
        reference = EXACT + 0.01 * random(TOKENS, CHANNELS, seed=1)
        target = EXACT + factor * 0.01 * random(TOKENS, CHANNELS, seed=2)
        full = noise_ratio(rows_with(target, reference=reference, twin=EXACT))
        estimate = noise_ratio(rows_with(target, reference=reference, twin=EXACT, stats=True))
        assert (full.is_estimated, estimate.is_estimated) == (False, True)
        assert estimate.whole == pytest.approx(full.whole, rel=0.05)
        assert estimate.token_median == pytest.approx(full.token_median, rel=0.1)

    def test_estimate_of_the_golden_itself_is_zero(self) -> None:
        noise = noise_ratio(rows_with(REFERENCE.clone(), reference=REFERENCE, twin=TWIN, stats=True))
        assert (noise.whole, noise.massive, noise.token_worst) == (0.0, 0.0, 0.0)

    def test_estimate_sees_a_fault_behind_the_rounding_that_both_sides_share(self) -> None:
        target = REFERENCE.float() + 0.02 * random(TOKENS, CHANNELS, seed=2)
        full = noise_ratio(rows_with(target, reference=REFERENCE, twin=TWIN))
        estimate = noise_ratio(rows_with(target, reference=REFERENCE, twin=TWIN, stats=True))
        assert full.ordinary > 5.0
        assert math.sqrt(full.ordinary**2 - 2.1) < estimate.ordinary <= full.ordinary


class TestChained:
    def test_token_that_was_upset_before_is_forgiven_alone(self) -> None:
        reference, target = EXACT.bfloat16(), EXACT.bfloat16().float()
        handed = reference.float()
        handed[4] += 0.5 * random(CHANNELS, seed=2)
        input_error = measure_input_error(reference, handed)
        for token, is_forgiven in ((4, True), (5, False)):
            upset = target.clone()
            upset[token] += 0.5 * random(CHANNELS, seed=3)
            rows = rows_with(upset, reference=reference, twin=EXACT)
            noise = noise_ratio(replace(rows, input_error=input_error))
            assert (noise.token_worst < 2.0) == is_forgiven


class TestIncoming:
    def test_error_is_relative_to_what_the_golden_was_fed(self) -> None:
        input_error = measure_input_error(EXACT, 1.01 * EXACT)
        assert input_error.overall == pytest.approx(0.01, rel=1e-4)
        assert input_error.tokens.tolist() == pytest.approx([0.01] * TOKENS, rel=1e-4)
        assert input_error.is_finite

    def test_massive_channels_do_not_hide_the_error_of_the_rest(self) -> None:
        handed = TWIN.clone()
        handed[:, :MASSIVE] *= 1.1
        whole = float((handed - TWIN).norm() / TWIN.norm())
        assert measure_input_error(TWIN, handed).overall > 2 * whole

    def test_each_token_has_its_own_error_and_suffers_from_the_others(self) -> None:
        handed = EXACT.clone()
        handed[4] *= 1.5
        input_error = measure_input_error(EXACT, handed)
        assert float(input_error.tokens[4]) == pytest.approx(0.5, rel=1e-4)
        assert float(input_error.tokens[5]) == 0.0
        assert float(input_error.inherited[5]) == input_error.overall > 0.0
        fourth = input_error.select(torch.arange(TOKENS) == 4)
        assert fourth.inherited.tolist() == pytest.approx([0.5], rel=1e-4)

    def test_nan_and_infinity_are_told(self) -> None:
        for bad in (math.nan, math.inf):
            handed = EXACT.clone()
            handed[0, 0] = bad
            assert not measure_input_error(EXACT, handed).is_finite


class TestStructure:
    @pytest.fixture
    def rows(self) -> Rows:
        golden, port = (EXACT + 0.01 * random(TOKENS, CHANNELS, seed=seed) for seed in (1, 2))
        return rows_with(port, reference=golden, twin=EXACT)

    @staticmethod
    def figures(rows: Rows) -> tuple[float | None, ...]:
        noise = noise_ratio(rows)
        return noise.token_gain, noise.channel_gain, noise.channel_offset, noise.channel_worst

    def test_averages_are_those_of_the_three_sides(self, rows: Rows) -> None:
        assert rows.twin is not None
        expected = measure_structure(rows.twin, rows.reference, rows.target, massive=rows.massive)
        assert expected is not None
        noise = noise_ratio(rows)
        assert self.figures(rows) == expected.figures
        assert (noise.worst_channel, noise.is_widened) == (expected.worst_channel, False)

    def test_averages_of_variants_divide_them(self, rows: Rows) -> None:
        before = self.figures(rows)
        floor = square_difference(rows.twin, rows.reference, massive=rows.massive)  # type: ignore[arg-type]
        wide = replace(rows, widened_floor=floor.times(9.0))
        assert noise_ratio(wide).is_widened
        # Averages that were not measured count as larger by as much as the errors are.
        assert self.figures(wide) == pytest.approx([figure / 3.0 for figure in before if figure is not None])
        measured = self.figures(replace(wide, variant_averages=(2.0, 4.0, 5.0, 8.0)))
        divided = [figure / by for figure, by in zip(before, (2.0, 4.0, 5.0, 8.0), strict=True) if figure]
        assert measured == pytest.approx(divided)

    def test_an_error_that_is_not_bfloat16_noise_alone_has_none(self, rows: Rows) -> None:
        none = (None, None, None, None)
        handed_on = InputError(overall=0.1, tokens=torch.full((TOKENS,), 0.1))
        assert self.figures(replace(rows, input_error=handed_on)) == none
        assert self.figures(replace(rows, target=rows.target.bfloat16().float())) == none
        floor = square_difference(rows.twin, rows.reference, massive=rows.massive)  # type: ignore[arg-type]
        assert self.figures(replace(rows, twin=None, floor=floor)) == none
        assert noise_ratio(replace(rows, twin=None, floor=floor)).worst_channel is None
        assert None not in self.figures(rows)

    def test_sixteen_channels_have_averages_of_their_own(self) -> None:
        for channels, is_told in ((15, False), (16, True)):
            exact = EXACT[:, :channels]
            golden, port = (exact + 0.01 * random(TOKENS, channels, seed=seed) for seed in (1, 2))
            noise = noise_ratio(rows_with(port, reference=golden, twin=exact))
            assert (noise.channel_gain is not None, noise.channel_offset is not None) == (is_told, is_told)
            assert None not in (noise.token_gain, noise.channel_worst)


class TestForeseen:
    """Squares of [3] tokens of two channels, the second of them massive."""

    REFERENCE = torch.tensor([[3.0, 100.0], [4.0, 100.0], [5.0, 100.0]])
    FLOOR = Squares(ordinary=torch.tensor([1.0, 4.0, 2.0]).double(), massive=torch.full((3,), 9.0).double())
    ROUNDING = 1.7e-3**2

    def rows(self, **changes: object) -> Rows:
        rows = Rows(
            reference=self.REFERENCE,
            target=self.REFERENCE + 0.001,
            massive=torch.tensor([False, True]),
            places=places(4)[:3],
            floor=self.FLOOR,
        )
        return replace(rows, **changes)  # type: ignore[arg-type]

    def test_it_is_the_floor_and_the_roundings_of_a_float32_value(self) -> None:
        assert parts_of(foreseen_error(self.rows())) == [[1.0, 4.0, 2.0], [9.0, 9.0, 9.0]]
        rounded = self.rows(target=self.REFERENCE)
        squares = square_rows(self.REFERENCE, massive=rounded.massive)
        for number in (1, 2):
            found = foreseen_error(rounded if number == 1 else replace(rounded, num_roundings=number))
            expected = self.FLOOR.plus(squares, factor=number * self.ROUNDING)
            assert parts_of(found) == [pytest.approx(part) for part in parts_of(expected)]
        in_bfloat16 = replace(rounded, stored_dtype=torch.bfloat16)
        assert parts_of(foreseen_error(in_bfloat16)) == parts_of(self.FLOOR)

    def test_variants_and_inherited_errors_widen_it(self) -> None:
        wider = Squares(ordinary=torch.tensor([2.0, 1.0, 1.0]), massive=torch.tensor([0.0, 10.0, 0.0]))
        widened = self.rows(widened_floor=wider)
        assert parts_of(foreseen_error(widened)) == [[2.0, 4.0, 2.0], [9.0, 10.0, 9.0]]
        handed_on = InputError(overall=0.1, tokens=torch.tensor([0.0, 0.2, 1.0]).double())
        found = parts_of(foreseen_error(self.rows(input_error=handed_on)))
        assert found[0] == pytest.approx([1.0 + 0.01 * 9.0, 4.0 + 0.04 * 16.0, 2.0 + 25.0])
        assert found[1] == pytest.approx([9.0 + 100.0, 9.0 + 400.0, 9.0 + 10_000.0])

    def test_ratio_of_a_token_is_held_against_the_median_floor(self) -> None:
        floor = Squares(ordinary=torch.tensor([1.0, 4.0, 9.0]).double(), massive=torch.zeros(3).double())
        error = torch.tensor([[4.0, 0.0], [4.0, 0.0], [6.0, 0.0]])
        rows = self.rows(twin=self.REFERENCE, target=self.REFERENCE + error + 0.0, floor=floor)
        rows = replace(rows, stored_dtype=torch.bfloat16)
        assert token_ratios(rows).tolist() == pytest.approx([2.0, 2.0, 2.0])

    def test_floor_is_told_relative_to_the_values(self) -> None:
        noise = noise_ratio(self.rows())
        assert noise.floor == pytest.approx(math.sqrt((7.0 + 27.0) / (50.0 + 30_000.0)))
        nothing = torch.zeros(3, 2)
        assert noise_ratio(self.rows(reference=nothing, target=nothing + 0.001)).floor is None

    @pytest.mark.parametrize(
        ("factor", "expected"),
        [
            # The floor over the values is 1/9, 1/4 and 2/25, the median 1/9.
            (3.0, [9.0, 16.0, 25.0]),
            # The token's own floor is larger: 4 for the second token, in proportion to the values.
            (1.2, [1.44, 4.0, 4.0]),
            (1.0, [1.0, 4.0, 25.0 / 9.0]),
            (0.5, [0.25, 1.0, 25.0 / 36.0]),
        ],
    )
    def test_at_other_values_it_is_scaled(self, factor: float, expected: list[float]) -> None:
        found = foreseen_error_at(self.rows(), factor * self.REFERENCE)
        assert found.ordinary.tolist() == pytest.approx(expected)
        assert found.massive.tolist() == pytest.approx([9.0 * factor**2] * 3)

    def test_at_other_values_it_is_at_least_one_rounding_to_bfloat16(self) -> None:
        squares = square_rows(self.REFERENCE, massive=torch.tensor([False, True]))
        for dtype, share in ((torch.float32, 1e-9), (torch.bfloat16, self.ROUNDING)):
            rows = self.rows(floor=squares.times(1e-9), stored_dtype=dtype)
            found = foreseen_error_at(rows, 2.0 * self.REFERENCE)
            assert found.ordinary.tolist() == pytest.approx([36.0 * share, 64.0 * share, 100.0 * share])


class TestRows:
    def test_selected_tokens_keep_all_that_is_known(self) -> None:
        values = random(3, 4, seed=0)
        squares = square_rows(values, massive=torch.zeros(4, dtype=torch.bool))
        rows = Rows(
            reference=values,
            target=values + 1.0,
            massive=torch.zeros(4, dtype=torch.bool),
            places=places(4)[:3],
            twin=values + 2.0,
            floor=squares,
            widened_floor=squares.times(2.0),
            input_error=InputError(overall=0.5, tokens=torch.tensor([0.1, 0.2, 0.3])),
        )
        chosen = torch.tensor([True, False, True])
        found = rows.select(chosen)
        for name in ("reference", "target", "places", "twin"):
            assert torch.equal(getattr(found, name), getattr(rows, name)[chosen]), name
        for name, factor in (("floor", 1.0), ("widened_floor", 2.0)):
            assert torch.equal(getattr(found, name).whole, factor * squares.whole[chosen]), name
        assert found.input_error is not None
        assert found.input_error.tokens.tolist() == pytest.approx([0.1, 0.3])
        bare = replace(rows, twin=None, floor=None, widened_floor=None, input_error=None).select(chosen)
        assert (bare.twin, bare.floor, bare.widened_floor, bare.input_error) == (None, None, None, None)

    def test_dtype_is_that_of_the_stored_golden(self) -> None:
        values = random(3, 4, seed=0)
        rows = Rows(reference=values, target=values, massive=values[0] > 9.0, places=places(4)[:3])
        assert rows.dtype is torch.float32
        assert replace(rows, stored_dtype=torch.bfloat16).dtype is torch.bfloat16


# More tokens than are summed at once.
ROWS = torch.randn(150, 6, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(150, 6, generator=torch.Generator().manual_seed(1))
ONE = Squares(ordinary=torch.tensor([1.0, 4.0]), massive=torch.tensor([9.0, 2.0]))
TWO = Squares(ordinary=torch.tensor([3.0, 2.0]), massive=torch.tensor([1.0, 5.0]))


@pytest.mark.parametrize("channel", [None, 2])
def test_sums_are_those_of_all_tokens_channel_by_channel(channel: int | None) -> None:
    massive = torch.arange(6) == (-1 if channel is None else channel)
    for found, values in (
        (square_rows(ROWS, massive=massive), ROWS),
        (square_difference(ROWS, OTHER, massive=massive), OTHER - ROWS),
    ):
        squares = values.double().square()
        assert found.ordinary.tolist() == pytest.approx(squares[:, ~massive].sum(1).tolist(), rel=1e-5)
        assert found.massive.tolist() == pytest.approx(squares[:, massive].sum(1).tolist(), rel=1e-5)
        assert found.whole.tolist() == pytest.approx(squares.sum(1).tolist(), rel=1e-5)


def test_sums_are_in_float64() -> None:
    large = torch.full((1, 2), 1e30)
    assert square_rows(large, massive=torch.zeros(2, dtype=torch.bool)).whole.tolist() == pytest.approx(
        [2e60]
    )


def parts_of(squares: Squares) -> list[list[float]]:
    return [squares.ordinary.tolist(), squares.massive.tolist()]


def test_arithmetic_is_token_by_token() -> None:
    assert parts_of(ONE.plus(TWO, factor=2.0)) == [[7.0, 8.0], [11.0, 12.0]]
    assert parts_of(ONE.plus(TWO, factor=torch.tensor([1.0, 0.0]))) == [[4.0, 4.0], [10.0, 2.0]]
    assert parts_of(ONE.plus(TWO, factor=-1.0)) == [[0.0, 2.0], [8.0, 0.0]]
    assert parts_of(ONE.times(3.0)) == [[3.0, 12.0], [27.0, 6.0]]
    assert parts_of(ONE.times(torch.tensor([2.0, 0.5]))) == [[2.0, 2.0], [18.0, 1.0]]
    assert parts_of(ONE.maximum(TWO)) == [[3.0, 4.0], [9.0, 5.0]]
    assert parts_of(ONE.select(torch.tensor([False, True]))) == [[4.0], [2.0]]
    assert parts_of(Squares.of(ordinary=torch.tensor([-3.0]), massive=torch.tensor([2.0]))) == [[9.0], [4.0]]


def test_values_are_put_in_a_copy() -> None:
    one = Squares(ordinary=torch.tensor([7.0]), massive=torch.tensor([8.0]))
    assert parts_of(ONE.put(torch.tensor([False, True]), one)) == [[1.0, 7.0], [9.0, 8.0]]
    assert parts_of(ONE) == [[1.0, 4.0], [9.0, 2.0]]


ERROR = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 1.0
FLOOR = torch.rand(60, generator=torch.Generator().manual_seed(1)) + 1.0


def jackknife(error: torch.Tensor, floor: torch.Tensor, groups: torch.Tensor) -> tuple[float, float]:
    """Compute the interval as the textbook does, one group after the other."""
    number = len(groups.unique())
    logarithms = torch.stack(
        [
            (error[groups != group].sum() / floor[groups != group].sum()).sqrt().log()
            for group in groups.unique()
        ]
    )
    variance = (number - 1) / number * float((logarithms - logarithms.mean()).square().sum())
    reach = float(student.ppf(0.975, number - 1)) * math.sqrt(variance)
    rho = float((error.sum() / floor.sum()).sqrt())
    return rho * math.exp(-reach), rho * math.exp(reach)


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ([0] * 15 + [4] * 5 + [7] * 30 + [9] * 10, [0] * 15 + [4] * 5 + [7] * 30 + [9] * 10),
        # Ten blocks of one prompt, and as many as there are tokens if these are fewer.
        ([3] * 60, [block for block in range(10) for _ in range(6)]),
        ([0] * 7, list(range(7))),
        ([0, 0, 1], [0, 1, 2]),
        # Three prompts are enough.
        ([0] * 30 + [1] * 20 + [2] * 10, [0] * 30 + [1] * 20 + [2] * 10),
    ],
)
def test_interval_is_that_of_the_textbook(prompts: list[int], groups: list[int]) -> None:
    error, floor = ERROR[: len(prompts)].double(), FLOOR[: len(prompts)].double()
    places = torch.stack((torch.tensor(prompts), torch.arange(len(prompts))), dim=1)
    found = rho_interval(error, floor, places)
    assert found == pytest.approx(jackknife(error, floor, torch.tensor(groups)), rel=1e-9)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_two_tokens_or_fewer_have_no_interval(num_tokens: int) -> None:
    places = torch.zeros(num_tokens, 2, dtype=torch.int64)
    assert rho_interval(ERROR[:num_tokens], FLOOR[:num_tokens], places) is None


@pytest.mark.parametrize("side", ["error", "floor"])
def test_a_sum_that_one_group_has_alone_gives_none(side: str) -> None:
    alone = torch.zeros(4).index_fill_(0, torch.tensor(1), 2.0)
    error, floor = (alone, torch.ones(4)) if side == "error" else (torch.ones(4), alone)
    assert rho_interval(error, floor, torch.stack((torch.arange(4), torch.zeros(4)), dim=1)) is None
