"""The catalogue in words has the mistakes that are built, and is read without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.catalogue.cache import CACHE_MISTAKES
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.decoding import DECODING_MISTAKES
from compare.catalogue.outside import MODEL_CATALOGUE
from compare.catalogue.words import Place, read_words, require_known
from minimax_tools.errors import UsageError

PAGE = Path(__file__).parents[3] / "docs" / "diagnosis.md"


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (Place.LAYER, list(CATALOGUE)),
        (Place.OUTSIDE, list(MODEL_CATALOGUE)),
        (Place.DECODING, [mistake.name for mistake in DECODING_MISTAKES]),
        # The last is seen by what a pass changed.
        (Place.CACHE, [*CACHE_MISTAKES, "cache_overwritten"]),
    ],
)
def test_each_mistake_has_words_and_each_words_a_mistake(place: Place, names: list[str]) -> None:
    assert list(read_words(place)) == names
    for words in read_words(place).values():
        assert words.what.endswith(".")
        assert words.look_at


def test_page_counts_the_mistakes() -> None:
    layer, outside = (len(read_words(place)) for place in (Place.LAYER, Place.OUTSIDE))
    told = f"{layer + outside} mistakes that real ports had: {layer} in a layer, {outside} outside the layers"
    assert told in PAGE.read_text(encoding="utf-8")


def test_unknown_name_is_refused_with_a_near_one() -> None:
    require_known(("norm_eps", "head_zero"))
    with pytest.raises(UsageError, match="gate_up_swaped.*gate_up_swapped"):
        require_known(("gate_up_swaped",))
    with pytest.raises(UsageError) as unlike:
        require_known(("too_many_cooks",))
    assert "Did you mean" not in str(unlike.value)
    with pytest.raises(UsageError):
        require_known(("head_zero",), places=(Place.LAYER,))
