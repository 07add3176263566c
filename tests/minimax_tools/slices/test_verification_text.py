from __future__ import annotations

from collections.abc import Sequence

import pytest

from minimax_tools.slices.verification_text import _format_layers


@pytest.mark.parametrize(
    ("layers", "text"),
    [(range(10), "0-9"), ([0, 1, 2, 3, 7], "0-3, 7"), ([5], "5"), ([1, 3, 4], "1, 3-4"), ([], "none")],
)
def test_layers_are_rendered_as_runs(layers: Sequence[int], text: str) -> None:
    assert _format_layers(layers) == text
