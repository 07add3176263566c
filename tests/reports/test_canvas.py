from __future__ import annotations

from reports.canvas import Canvas, Column, Row

COLUMNS = (Column(title="name", is_text=True), Column(title="sentence", is_text=True, is_broken=True))
ROWS = (Row(cells=("a_name", "A sentence that is longer than a narrow terminal.")),)


def test_sentences_of_a_table_are_broken_on_a_terminal_and_whole_in_a_pipe() -> None:
    narrow, piped = Canvas(width=30, is_terminal=True), Canvas(width=30, is_terminal=False)
    for canvas in (narrow, piped):
        canvas.table(COLUMNS, ROWS)
    assert max(map(len, narrow.text.splitlines()[1:])) <= 30
    assert piped.text.splitlines()[1].split(maxsplit=1) == list(ROWS[0].cells)
