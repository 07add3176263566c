"""The answer where a diagnosis named nothing to prove: each place and each note once."""

from __future__ import annotations

from typing import Any

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis
from compare.diagnosis.report import render_nothing_to_prove
from minimax_tools.results.results import Blame


def layer(number: int, *blame: Blame, **parts: Any) -> LayerDiagnosis:
    return LayerDiagnosis(layer=number, sites=(), unexplained=9.0, blame=blame, **parts)


def test_places_and_notes_are_told_once() -> None:
    blame = [
        Blame(layer=number, sites=("k_norm",), reason="error", right=("k_proj",)) for number in (1, 2, 3)
    ]
    without = Blame(layer=4, sites=("q_norm",), reason="error")
    shapes = layer(3, blame[2], is_of_shape=True, notes=("k_norm is [1,2]", "k_norm is [1,2]"))
    diagnosis = Diagnosis(
        reference="golden",
        target="run",
        is_failed=True,
        layers=(layer(1, blame[0], notes=("of layer 1",)), layer(2, blame[1]), shapes, layer(4, without)),
        unexplained_blame=(*blame, without),
        notes=("a note on the whole",),
    )
    text = render_nothing_to_prove(diagnosis)
    assert "FAIL" in text.splitlines()[0]
    for words in ("k_norm is [1,2]", "a note on the whole"):
        assert text.count(words) == 1, text
    assert "k_proj" in text
    assert "of layer 1" not in text
    of_shape = render_nothing_to_prove(
        Diagnosis(
            reference="golden", target="run", is_failed=True, layers=(shapes,), unexplained_blame=(blame[2],)
        )
    )
    assert "k_proj" not in of_shape
