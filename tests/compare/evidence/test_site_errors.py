from __future__ import annotations

import math

import pytest
import torch

from compare.evidence.collection import measure_site
from compare.noise.rows import Rows
from reports.page.evidence import SiteErrors

T, F = 100, 256


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


def measure(error: torch.Tensor, *, has_twin: bool = True, head_dim: int | None = None) -> SiteErrors:
    return measure_site(
        rows(error, has_twin=has_twin), layer=3, site="q_rope", why="to blame", head_dim=head_dim
    )


def test_histogram_counts_every_element_of_both_sides() -> None:
    error = torch.full((T, F), 0.1)
    error[0, :5] = 0.0
    found = measure(error).histogram
    assert sum(found.port) + found.num_equal == T * F
    assert sum(found.golden) + found.num_equal_golden == T * F
    assert found.num_equal >= 5
    assert list(found.edges) == sorted(found.edges)
    # The port's errors lie right of the golden's.
    assert found.port.index(max(found.port)) > found.golden.index(max(found.golden))


def test_picture_shows_where_the_error_lies_in_units_of_the_noise() -> None:
    error = torch.full((T, F), 0.01)
    error[60:, 128:] = 1.0
    found = measure(error).picture
    assert found.unit == "the noise"
    assert found.token_starts[0] == 0
    assert found.token_starts[-1] == T
    right = next(place for place, start in enumerate(found.channel_starts) if start >= 128)
    assert found.blocks[0][0] == pytest.approx(1.0, rel=0.1)
    assert found.blocks[-1][right] == pytest.approx(100.0, rel=0.1)
    assert found.by_token[-1] > 50 > 2 > found.by_token[0]
    assert found.by_channel[-1] > 50 > 2 > found.by_channel[0]
    assert found.massive == (7,)
    assert found.token_names[0] == "row 0, token 0 to 2"
    assert found.token_names[-1].startswith("row 1, token ")


def test_worst_element_has_its_place_and_all_values() -> None:
    error = torch.zeros(T, F)
    error[75, 130] = -3.0
    found = measure(error, head_dim=64)
    worst = found.worst[0]
    assert (worst.row, worst.position, worst.place) == (1, 15, "130 (head 2, dim 2)")
    assert worst.error == pytest.approx(-3.0, abs=1e-5)
    assert worst.twin is not None
    assert worst.port == pytest.approx(worst.twin - 3.0, abs=1e-5)


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


def test_site_without_any_error_can_be_drawn() -> None:
    twin = torch.randn(3, 2)
    same = Rows(
        reference=twin,
        target=twin,
        massive=torch.zeros(2, dtype=torch.bool),
        places=torch.tensor([(0, 0), (0, 1), (0, 2)]),
        twin=twin,
    )
    found = measure_site(same, layer=0, site="input_norm", why="nearest")
    assert found.histogram.num_equal == 6
    assert sum(found.histogram.port) == 0
    assert found.picture.blocks == ((0.0, 0.0),) * 3
