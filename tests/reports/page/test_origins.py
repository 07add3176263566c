from __future__ import annotations

from pathlib import Path

from minimax_tools.capture.reader import Capture
from reports.page.origins import OriginRow, origin_rows


def by_name(golden: Path, port: Path) -> dict[str, OriginRow]:
    return {row.name: row for row in origin_rows(Capture.open(golden), Capture.open(port))}


def test_same_capture_differs_in_nothing(golden: Path) -> None:
    rows = by_name(golden, golden)
    assert not any(row.differs for row in rows.values())
    assert {"folder", "certified", "backend", "versions.torch", "dtypes.weights", "run.mode"} <= set(rows)


def test_values_that_differ_are_marked(golden: Path, tmp_path: Path) -> None:
    text = (golden / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"backend": "cpu"', '"backend": "neuron-xla"', 1))
    rows = by_name(golden, tmp_path)
    assert (rows["backend"].golden, rows["backend"].port) == ("cpu", "neuron-xla")
    assert rows["certified"].port == "void: changed since"
    assert {name for name, row in rows.items() if row.differs} == {"backend", "folder", "certified"}


def test_all_sites_are_told_in_a_word(golden: Path, tmp_path: Path) -> None:
    assert by_name(golden, golden)["run.sites"].golden == "all"
    text = (golden / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"input_norm", ', "", 1))
    assert by_name(golden, tmp_path)["run.sites"].port.startswith("input, q_proj")


def test_digests_are_short_and_those_of_layers_left_out(golden: Path) -> None:
    rows = by_name(golden, golden)
    assert rows["inputs_digest"].golden.endswith("…")
    assert len(rows["inputs_digest"].golden) == 17
    assert not any(name.startswith("model.layer") for name in rows)
