from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from compare.evidence.collection import measure_site
from compare.noise.rows import Rows
from reports.page.evidence import ErrorHistogram, SiteErrors

T, F = 100, 256


def few(port: torch.Tensor, golden: torch.Tensor | None = None, *, has_twin: bool = True) -> Rows:
    """Rows of one sequence whose right values are 0."""
    return Rows(
        reference=torch.zeros_like(port) if golden is None else golden,
        target=port,
        massive=torch.ones(port.shape[1], dtype=torch.bool),
        places=torch.stack((torch.zeros(len(port)), torch.arange(len(port))), dim=1).long(),
        twin=torch.zeros_like(port) if has_twin else None,
    )


def measure_few(found: Rows, *, head_dim: int | None = None) -> SiteErrors:
    return measure_site(found, layer=0, site="q_proj", why="", head_dim=head_dim)


def rows(error: torch.Tensor, *, has_twin: bool = True) -> Rows:
    """Rows of two sequences with noise of 0.01 in the golden, and `error` in the port."""
    generator = torch.Generator().manual_seed(0)
    twin = torch.randn(T, F, generator=generator)
    return Rows(
        reference=twin + 0.01 * torch.randn(T, F, generator=generator),
        target=twin + error,
        massive=torch.arange(F) == 7,
        places=torch.tensor([(0, token) if token < 60 else (1, token - 60) for token in range(T)]),
        twin=twin if has_twin else None,
    )


def measure(error: torch.Tensor, *, has_twin: bool = True) -> SiteErrors:
    return measure_site(rows(error, has_twin=has_twin), layer=3, site="q_rope", why="to blame", head_dim=None)


def test_nan_is_the_worst_of_all_and_harms_no_other_figure() -> None:
    error = torch.full((T, F), 0.01)
    error[0, 0], error[99, 255] = math.nan, 5.0
    found = measure(error)
    assert math.isnan(found.worst[0].error)
    assert found.worst[1].error == pytest.approx(5.0, abs=1e-5)
    assert sum(found.histogram.port) + found.histogram.num_equal == T * F - 1
    assert math.isnan(found.picture.by_token[0])
    assert math.isfinite(found.picture.by_token[1])


def test_without_a_twin_errors_are_against_the_golden() -> None:
    found = measure(torch.full((T, F), 0.5), has_twin=False)
    assert not found.has_twin
    assert found.histogram.golden == ()
    assert found.worst[0].twin is None
    assert found.picture.unit == "the golden's values"
    assert found.picture.by_token[0] == pytest.approx(0.5, rel=0.1)


def histogram(port: list[float], golden: list[float] | None = None) -> ErrorHistogram:
    of_golden = None if golden is None else torch.tensor([golden])
    return measure_few(few(torch.tensor([port]), of_golden)).histogram


class TestHistogram:
    def test_forty_bins_hold_the_smallest_and_the_largest_size(self) -> None:
        found = histogram([1e-3, -1.0, 0.0], [0.1, 0.0, 0.0])
        assert (len(found.edges), len(found.port), len(found.golden)) == (41, 40, 40)
        assert (found.port[0], found.port[-1], sum(found.port)) == (1, 1, 2)
        assert (found.num_equal, found.num_equal_golden) == (1, 2)
        ratios = torch.tensor(found.edges).log10().diff()
        torch.testing.assert_close(ratios, torch.full((40,), 3.0001 / 40), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(
        ("port", "golden", "ends", "counts"),
        [
            pytest.param([1e-3, -1.0, 0.0], [0.1, 0.0, 0.0], (1e-3, 1.0), (1, 1), id="sizes"),
            pytest.param([0.1], [10.0], (0.1, 10.0), (1, 0), id="the golden tells the ends too"),
            pytest.param([1e-12, 1e-10, 1.0], None, (1e-8, 1.0), (2, 1), id="much smaller errors"),
            pytest.param([0.5] * 4, None, (0.5, 0.5 * 10**0.1), (4, 0), id="one size spans a tenth"),
            pytest.param([0.0] * 4, None, (0.1, 1.0), (0, 0), id="no error spans a decade below one"),
        ],
    )
    def test_ends(
        self,
        port: list[float],
        golden: list[float] | None,
        ends: tuple[float, float],
        counts: tuple[int, int],
    ) -> None:
        found = histogram(port, golden)
        assert (found.edges[0], found.edges[-1]) == pytest.approx(ends, rel=1e-3)
        assert (found.port[0], found.port[-1]) == counts

    def test_without_a_twin_the_golden_has_no_counts(self) -> None:
        found = measure_few(few(torch.ones(2, 2), has_twin=False)).histogram
        assert (found.golden, found.num_equal_golden) == ((), 0)


class TestPicture:
    def test_blocks_are_at_most_32_by_64_of_nearly_one_size(self) -> None:
        found = measure_few(few(torch.ones(100, 200))).picture
        assert (len(found.token_starts), len(found.channel_starts)) == (33, 65)
        assert found.token_starts[:4] == (0, 3, 6, 9)
        assert (found.token_starts[-1], found.channel_starts[-1]) == (100, 200)
        assert found.massive == tuple(range(32))

    def test_each_block_is_the_root_mean_square_over_the_noise(self) -> None:
        port = torch.arange(1.0, 66.0)[None].repeat(33, 1)
        golden = torch.full_like(port, 0.5)
        golden[0, 0] = torch.nan
        found = measure_few(few(port, golden)).picture
        # Of 33 tokens, the last block has two; of 65 channels, the last has 64 and 65.
        last = math.sqrt((64**2 + 65**2) / 2) / 0.5
        assert found.blocks[-1][-1] == pytest.approx(last)
        assert found.by_channel[-1] == pytest.approx(last)
        assert found.by_channel[0] == pytest.approx(1.0 / 0.5)
        whole = math.sqrt(sum(number**2 for number in range(1, 66)) / 65) / 0.5
        assert found.by_token == pytest.approx((whole,) * 32)

    def test_unit_without_noise_is_the_goldens_size(self) -> None:
        golden = torch.full((4, 4), 2.0)
        exact = replace(few(golden + 1.0, golden), twin=golden)
        found = measure_few(exact).picture
        assert (found.unit, found.blocks[0][0]) == ("the golden's values", pytest.approx(0.5))
        zeros = measure_few(few(torch.full((4, 4), 3.0))).picture
        assert zeros.blocks[0][0] == pytest.approx(3.0)

    def test_names_of_tokens(self) -> None:
        error = torch.ones(66, 1)
        places = torch.tensor([(0, token) if token < 34 else (1, token - 34) for token in range(66)])
        names = measure_few(replace(few(error), places=places)).picture.token_names
        assert (names[0], names[15], names[16]) == (
            "row 0, token 0 to 1",
            "row 0, token 30 to 32",
            "row 0, token 33 to row 1, token 0",
        )
        assert measure_few(few(error[:3])).picture.token_names[1] == "row 0, token 1"


def test_twelve_worst_elements_are_told_in_their_order() -> None:
    port = torch.arange(20.0).reshape(2, 10)
    port[0, 9] = -100.0
    found = measure_few(few(port), head_dim=4).worst
    assert [element.error for element in found] == [-100.0, *map(float, range(19, 9, -1)), 8.0]
    first = found[0]
    assert (first.row, first.position, first.place) == (0, 0, "9 (head 2, dim 1)")
    assert (first.golden, first.port, first.twin) == (0.0, -100.0, 0.0)
    assert found[1].position == 1
    assert len(measure_few(few(port[:, :2])).worst) == 4
