from __future__ import annotations

import math

import pytest

from minimax_tools.model.graph import ModelGraph
from reports.canvas import Canvas, Column, Row
from reports.wording import word_figure, word_fraction, word_order, word_sites, word_sites_by_layer


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.0, "1.00"),
        (14.23, "14.2"),
        (142.3, "142"),
        (1423.0, "1423"),
        (-0.03125, "-0.0312"),
        (3.4e38, "3.40e+38"),
        (1.234e-5, "1.23e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_figure_has_three_digits(value: float | None, words: str) -> None:
    assert word_figure(value) == words


def test_fraction_keeps_its_decimals_unless_it_is_none() -> None:
    assert word_fraction(0.99731, decimals=6) == "0.997310"
    assert word_fraction(0.5, decimals=4) == "0.5000"
    assert word_fraction(math.inf, decimals=4) == "inf"
    assert word_fraction(math.nan, decimals=4) == "nan"
    assert word_fraction(None, decimals=4) == "-"


def test_layers_with_the_same_sites_share_a_line_and_others_do_not() -> None:
    places = [(layer, site) for layer in range(4) for site in ("q_rope", "k_rope")]
    assert word_sites_by_layer(places) == ("layers 0-3: q_rope, k_rope",)
    assert word_sites_by_layer([*places, (2, "output")]) == (
        "layers 0-1, 3: q_rope, k_rope",
        "layer 2: q_rope, k_rope, output",
    )
    assert word_sites_by_layer([]) == ()


def test_a_long_run_of_sites_is_told_by_its_ends() -> None:
    assert word_sites(["q_rope", "k_rope", "attn_context"]) == ("q_rope", "k_rope", "attn_context")
    for graph in (ModelGraph(), ModelGraph(shared_width=1), ModelGraph(dense_layers=(0,))):
        assert word_sites([str(site) for site in graph.layer(0).sites][1:]) == ("input_norm to output",)
    without_norms = [str(site) for site in ModelGraph().sites if str(site) not in ("q_norm", "k_norm")]
    assert word_sites(without_norms) == tuple(without_norms)
    apart = ["q_proj", "k_proj", "v_proj", "attn_context", "attn_delta"]
    assert word_sites(apart) == tuple(apart)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0, 1, 2), "experts lie in order"),
        ((8, 10, 9), "experts 9 and 10 are exchanged"),
        ((2, 1, 0, 4, 3, 5), "experts 0 and 2, 3 and 4 are exchanged"),
        ((7, 6, 5, 4, 3, 2, 1, 0), "experts lie in reverse order"),
        ((4, 5, 6, 7, 0, 1, 2, 3), "experts lie with their halves exchanged"),
        ((2, 3, 4, 5, 0, 1), "experts lie rolled by 2: the first is 2"),
        (
            tuple(sorted(range(12), key=str)),
            "experts lie in the order of their numbers as text: 0, 1, 10, 11, …",
        ),
        ((0, 4, 1, 3, 5, 2), "experts lie in another order, from place 1 on: 4, 1, 3, 5, …"),
        # An expert that lies twice is exchanged with none.
        ((1, 2, 1), "experts lie in another order, from place 1 on: 2, 1"),
    ],
)
def test_shortest_description_of_an_order_is_chosen(numbers: tuple[int, ...], text: str) -> None:
    assert word_order(numbers, noun="experts") == text


def test_sentences_of_a_table_are_broken_on_a_terminal_and_whole_in_a_pipe() -> None:
    columns = (Column(title="name", is_text=True), Column(title="text", is_text=True, is_broken=True))
    row = Row(cells=("a_name", "A sentence that is longer than a narrow terminal."))
    narrow, piped = Canvas(width=30, is_terminal=True), Canvas(width=30, is_terminal=False)
    for canvas in (narrow, piped):
        canvas.table(columns, (row,))
    assert max(map(len, narrow.text.splitlines()[1:])) <= 30
    assert piped.text.splitlines()[1].split(maxsplit=1) == list(row.cells)
