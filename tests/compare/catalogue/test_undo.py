"""Mistakes to undo, as a command takes them."""

from __future__ import annotations

import pytest

from compare.catalogue.undo import Undo, join_hypotheses, undo_finding
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import Site


@pytest.mark.parametrize(
    "text",
    [
        "gate_up_swapped",
        "k_norm_scaled,factor=0.353553",
        "q_heads_interleaved,order=by group",
        "router_top_k,k=3",
    ],
)
def test_text_is_read_and_written_alike(text: str) -> None:
    assert str(Undo.parse(text)) == text


def test_fitted_parameter_is_rounded_to_what_can_be_read() -> None:
    assert str(Undo("k_norm_scaled", (("factor", 8**-0.5),))) == "k_norm_scaled,factor=0.353553"


def test_mistake_of_some_experts_is_not_undone_in_the_weights() -> None:
    assert Undo.parse("gate_up_swapped").is_in_weights
    some = Undo.parse("gate_up_swapped,experts=0-2 5")
    assert (some.is_in_weights, some.lines, some.hypothesis.change.recipe.experts) == (
        False,
        (),
        {0, 1, 2, 5},
    )


def test_lines_begin_with_the_parameters() -> None:
    assert Undo.parse("k_norm_scaled,factor=0.5").lines[0] == "factor = 0.5"
    assert Undo.parse("router_softmax").lines == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("too_many_cooks", "no mistake is called 'too_many_cooks'"),
        ("gate_up_swap", "Did you mean gate_up_swapped?"),
        ("k_norm_scaled", "expected factor, found none"),
        ("router_softmax,factor=2", "expected none, found factor=2"),
        ("k_norm_scaled,factor", "cannot be read"),
    ],
)
def test_what_the_catalogue_lacks_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Undo.parse(text)
    assert message in str(error.value)


def test_two_mistakes_of_a_finding_are_told_apart() -> None:
    parameters = {"qk_norm_per_rank.tp_degree": 2, "moe_delta_scaled.factor": 2.0}
    first, second = undo_finding("qk_norm_per_rank + moe_delta_scaled", parameters)
    assert (str(first), str(second)) == ("qk_norm_per_rank,tp_degree=2", "moe_delta_scaled,factor=2.0")
    assert join_hypotheses((first, second)).sites == {Site.Q_NORM, Site.K_NORM, Site.MOE_DELTA}
