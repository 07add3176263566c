from __future__ import annotations

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.span import Span, word_layers


def test_half_open_notation_leaves_the_stop_out() -> None:
    assert list(Span.parse("2:5")) == [2, 3, 4]
    assert list(Span.parse(" 0:1 ")) == [0]


def test_inclusive_notation_takes_the_end_in() -> None:
    assert Span.inclusive(2, 4) == Span(2, 5) == Span.parse("2:5")


def test_single_holds_one_layer() -> None:
    span = Span.single(7)
    assert (list(span), len(span), span.last) == ([7], 1, 7)


@pytest.mark.parametrize("text", ["", "3", "a:b", "1:2:3", "-1:2", ":4", "4:", "1-3"])
def test_unreadable_notation_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--layers '.*' is no span: expected A:B, half-open"):
        Span.parse(text)


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (5, 2), (-1, 2)])
def test_empty_or_negative_span_is_refused(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=f"layers {start}:{stop} are no span: expected 0 <= start < stop"):
        Span(start, stop)


def test_span_past_the_last_layer_is_refused() -> None:
    assert Span(0, 62).within(62) == Span(0, 62)
    with pytest.raises(
        UsageError, match=r"layer 62 is out of range: expected layers 0 to 61, found layers 60 to 62"
    ):
        Span(60, 63).within(62)


def test_membership_knows_layers_only() -> None:
    span = Span(2, 4)
    assert [layer for layer in range(6) if layer in span] == [2, 3]
    assert "2" not in span


def test_words() -> None:
    assert (str(Span.single(3)), str(Span(3, 6))) == ("layer 3", "layers 3 to 5")


def test_layers_become_ranges() -> None:
    assert word_layers([0, 1, 2, 5, 7, 8]) == "layers 0-2, 5, 7-8"
    assert word_layers([3]) == "layer 3"
    assert word_layers([1, 0, None]) == "layers 0-1 and model"
    assert word_layers([None]) == "model"
