from __future__ import annotations

import math

import pytest
import torch

from minimax_tools.metrics.pair_metrics import MEDIAN_RELATIVE_RESOLUTION, compare_tensors
from minimax_tools.metrics.tensor_statistics import measure_tensor

# More than one block of 2^17 elements, and a ragged last one.
SEVERAL_BLOCKS = (2, 211, 1009)


def random_pair(
    shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32, noise: float = 1e-2, mean: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    reference = mean + torch.randn(shape, generator=generator, dtype=torch.float64)
    target = reference + noise * torch.randn(shape, generator=generator, dtype=torch.float64)
    return reference.to(dtype), target.to(dtype)


def pearson(reference: torch.Tensor, target: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((reference.flatten(), target.flatten())).double())[0, 1])


class TestCompareTensors:
    @pytest.mark.parametrize("shape", [(4, 3, 5), SEVERAL_BLOCKS])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_figures_are_the_plain_formulas_in_float64(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        reference, target = random_pair(shape, dtype=dtype)
        metrics = compare_tensors(reference, target, rtol=1e-2, atol=1e-3)
        r, t = reference.double().flatten(), target.double().flatten()
        distance = (t - r).abs()
        assert metrics.num_elements == r.numel()
        assert metrics.max_abs_diff == float(distance.max())
        assert metrics.mean_abs_diff == pytest.approx(float(distance.mean()), rel=1e-12)
        assert metrics.close_fraction == float((distance <= 1e-3 + 1e-2 * r.abs()).double().mean())
        cosine = float(torch.dot(r, t) / (r.norm() * t.norm()))
        assert metrics.cosine_similarity == pytest.approx(cosine, abs=1e-12)
        assert metrics.pearson_correlation == pytest.approx(pearson(r, t), abs=1e-12)
        assert metrics.relative_l2 == pytest.approx(float((t - r).norm() / r.norm()), rel=1e-12)
        assert metrics.norm_ratio == pytest.approx(float(t.norm() / r.norm()), rel=1e-12)

    @pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 101, 100), SEVERAL_BLOCKS])
    def test_median_is_the_lower_middle_one_to_its_resolution(self, shape: tuple[int, ...]) -> None:
        reference, target = random_pair(shape)
        median = float((target.double() - reference.double()).abs().median())
        found = compare_tensors(reference, target, rtol=0.0, atol=0.0).median_abs_diff
        assert median * (1 - MEDIAN_RELATIVE_RESOLUTION) <= found <= median

    @pytest.mark.parametrize(("num_others", "median"), [(4, 0.0), (5, 1.0)])
    def test_median_of_mostly_equal_tensors_is_zero(self, num_others: int, median: float) -> None:
        target = torch.ones(9)
        target[:num_others] += 1.0
        assert compare_tensors(torch.ones(9), target, rtol=0.0, atol=0.0).median_abs_diff == median

    @pytest.mark.parametrize("place", [(0, 0, 0), (1, 17, 3), (1, 210, 1008)])
    def test_worst_index_is_in_the_shape_of_the_reference(self, place: tuple[int, ...]) -> None:
        reference = torch.zeros(SEVERAL_BLOCKS)
        target = torch.full(SEVERAL_BLOCKS, 0.25)
        target[place] = -3.0
        metrics = compare_tensors(reference, target, rtol=0.0, atol=0.0)
        assert (metrics.worst_index, metrics.max_abs_diff) == (place, 3.0)

    @pytest.mark.parametrize("others", [[(0, 0, 4)], [(0, 150, 0)], [(1, 210, 1008)]])
    def test_first_of_several_worst_ones_is_named(self, others: list[tuple[int, ...]]) -> None:
        reference, target = torch.zeros(SEVERAL_BLOCKS), torch.full(SEVERAL_BLOCKS, 0.25)
        target[0, 0, 2] = math.nan
        for place in [(0, 0, 3), *others]:
            target[place] = 3.0
        assert compare_tensors(reference, target, rtol=0.0, atol=0.0).worst_index == (0, 0, 3)

    def test_equal_tensors_are_alike_by_every_figure(self) -> None:
        reference, _ = random_pair((7, 11), dtype=torch.bfloat16)
        metrics = compare_tensors(reference, reference.clone(), rtol=0.0, atol=0.0)
        assert (metrics.max_abs_diff, metrics.mean_abs_diff, metrics.median_abs_diff) == (0.0, 0.0, 0.0)
        assert (metrics.relative_l2, metrics.norm_ratio, metrics.close_fraction) == (0.0, 1.0, 1.0)
        assert metrics.cosine_similarity == pytest.approx(1.0, abs=1e-15)
        assert metrics.pearson_correlation == pytest.approx(1.0, abs=1e-15)

    def test_pearson_survives_a_mean_far_above_the_spread(self) -> None:
        reference, target = random_pair(SEVERAL_BLOCKS, dtype=torch.float64, noise=0.5, mean=1e7)
        metrics = compare_tensors(reference, target, rtol=0.0, atol=0.0)
        assert metrics.pearson_correlation == pytest.approx(pearson(reference - 1e7, target - 1e7), abs=1e-9)

    @pytest.mark.parametrize("value", [0.1, -8.4375, 1e-3])
    def test_pearson_of_a_constant_is_unknown(self, value: float) -> None:
        constant, (other, _) = torch.full(SEVERAL_BLOCKS, value), random_pair(SEVERAL_BLOCKS)
        for reference, target in ((constant, other), (other, constant), (constant, constant)):
            metrics = compare_tensors(reference, target, rtol=0.0, atol=0.0)
            assert metrics.pearson_correlation is None
            assert metrics.cosine_similarity is not None

    def test_zeros_have_no_direction_and_equal_zeros_no_error(self) -> None:
        zeros, (other, _) = torch.zeros(3, 4), random_pair((3, 4))
        same = compare_tensors(zeros, zeros, rtol=0.0, atol=0.0)
        assert (same.cosine_similarity, same.relative_l2, same.norm_ratio) == (None, 0.0, 1.0)
        lost = compare_tensors(other, zeros, rtol=0.0, atol=0.0)
        assert (lost.cosine_similarity, lost.relative_l2, lost.norm_ratio) == (None, 1.0, 0.0)
        appeared = compare_tensors(zeros, other, rtol=0.0, atol=0.0)
        assert (appeared.relative_l2, appeared.norm_ratio) == (math.inf, math.inf)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_nonfinite_elements_are_counted_and_left_out_of_the_rest(self, bad: float) -> None:
        reference, target = random_pair(SEVERAL_BLOCKS, dtype=torch.bfloat16)
        kept = torch.ones(SEVERAL_BLOCKS, dtype=torch.bool)
        kept[0, 5], kept[1, 210, 1008], kept[1, 0, 0] = False, False, False
        expected = compare_tensors(reference[kept], target[kept], rtol=1e-2, atol=1e-3)
        target[0, 5], target[1, 210, 1008], reference[1, 0, 0] = bad, bad, bad
        metrics = compare_tensors(reference, target, rtol=1e-2, atol=1e-3)
        assert (metrics.num_nonfinite_target, metrics.num_nonfinite_reference) == (1010, 1)
        assert metrics.num_elements == reference.numel()
        exact = ("max_abs_diff", "median_abs_diff")
        summed = ("mean_abs_diff", "cosine_similarity", "pearson_correlation", "relative_l2", "norm_ratio")
        assert [getattr(metrics, name) for name in exact] == [getattr(expected, name) for name in exact]
        for name in summed:
            assert getattr(metrics, name) == pytest.approx(getattr(expected, name), rel=1e-12)

    def test_nonfinite_elements_are_not_close_even_to_themselves(self) -> None:
        reference = torch.tensor([1.0, math.inf, math.nan, 2.0])
        assert compare_tensors(reference, reference, rtol=1.0, atol=1.0).close_fraction == 0.5
        none = compare_tensors(torch.ones(3), torch.full((3,), math.nan), rtol=1e-2, atol=1e-3)
        assert (none.num_nonfinite_target, none.close_fraction) == (3, 0.0)
        assert (none.cosine_similarity, none.pearson_correlation) == (None, None)

    @pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((2, 3), (2, 3, 1)), ((0, 3), (0, 3))])
    def test_other_shapes_and_empty_tensors_are_refused(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        with pytest.raises(ValueError, match="cannot compare shapes"):
            compare_tensors(torch.ones(shapes[0]), torch.ones(shapes[1]), rtol=0.0, atol=0.0)


class TestMeasureTensor:
    @pytest.mark.parametrize("shape", [(4, 3, 5), SEVERAL_BLOCKS])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_statistics_are_the_plain_formulas_in_float64(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        tensor, _ = random_pair(shape, dtype=dtype, mean=3.0)
        exact, found = tensor.double(), measure_tensor(tensor)
        assert found.mean == pytest.approx(float(exact.mean()), rel=1e-12)
        assert found.std == pytest.approx(float(exact.std(correction=0)), rel=1e-12)
        assert found.l2 == pytest.approx(float(exact.norm()), rel=1e-12)
        assert (found.min, found.max) == (float(exact.min()), float(exact.max()))
        assert (found.num_nan, found.num_inf) == (0, 0)

    def test_small_spread_around_a_large_mean_is_measured(self) -> None:
        tensor, _ = random_pair((1000, 1001), dtype=torch.float64)
        assert measure_tensor(1e9 + 1e-3 * tensor).std == pytest.approx(1e-3 * float(tensor.std()), rel=1e-4)

    @pytest.mark.parametrize("value", [0.1, 8.5, 1e-30])
    def test_constant_has_no_spread(self, value: float) -> None:
        found = measure_tensor(torch.full(SEVERAL_BLOCKS, value))
        assert found.std == 0.0
        assert found.mean == pytest.approx(value, rel=1e-6)

    def test_nonfinite_elements_are_counted_and_left_out(self) -> None:
        found = measure_tensor(torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, math.nan]))
        assert (found.num_nan, found.num_inf) == (2, 2)
        assert (found.mean, found.std, found.min, found.max) == (2.0, 1.0, 1.0, 3.0)

    @pytest.mark.parametrize("tensor", [torch.full((3,), math.nan), torch.empty(0, 4)])
    def test_nothing_finite_has_no_statistics(self, tensor: torch.Tensor) -> None:
        found = measure_tensor(tensor)
        assert (found.mean, found.std, found.min, found.max, found.l2) == (None,) * 5
        assert found.num_nan == tensor.numel()

    def test_whole_numbers_and_views_are_measured(self) -> None:
        numbers = torch.arange(12).reshape(3, 4)
        assert measure_tensor(numbers.T).mean == 5.5
        assert measure_tensor(numbers[:, ::2]).max == 10.0
