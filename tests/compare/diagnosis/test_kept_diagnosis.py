"""A diagnosis that lies in the run's folder answers its own question alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare.diagnosis.finding import Diagnosis
from compare.diagnosis.kept_diagnosis import KeptDiagnosis, digest_question
from minimax_tools.capture.reader import Capture

DIAGNOSIS = Diagnosis(reference="golden", target="run", is_failed=True, layers=(), notes=("a note",))


class Foreign(Capture):
    """A capture of another tool."""

    @property
    def known_description(self) -> None:  # type: ignore[override]
        return None


def ask(golden: Capture, run: Capture, **parts: Any) -> str | None:
    return digest_question(golden, run, **{"model": "toy", "layers": None, "mistakes": (), **parts})


@pytest.fixture
def capture(golden: Path) -> Capture:
    return Capture.open(golden)


def test_same_question_is_answered(capture: Capture, tmp_path: Path) -> None:
    question = ask(capture, capture)
    assert question is not None
    assert KeptDiagnosis.find(tmp_path, question) is None
    KeptDiagnosis(question=question, diagnosis=DIAGNOSIS).keep(tmp_path)
    assert KeptDiagnosis.find(tmp_path, question) == DIAGNOSIS
    for other in ({"model": "other"}, {"layers": (1,)}, {"mistakes": ("norm_eps",)}):
        asked = ask(capture, capture, **other)
        assert asked is not None
        assert KeptDiagnosis.find(tmp_path, asked) is None


def test_captures_of_other_tools_ask_nothing(capture: Capture) -> None:
    foreign = Foreign(capture.directory, capture.manifest)
    assert ask(foreign, capture) is None
    assert ask(capture, foreign) is None


def test_folder_that_cannot_be_written_to_keeps_none(capture: Capture, tmp_path: Path) -> None:
    question = ask(capture, capture)
    assert question is not None
    KeptDiagnosis(question=question, diagnosis=DIAGNOSIS).keep(tmp_path / "missing")
    assert KeptDiagnosis.find(tmp_path / "missing", question) is None
    (tmp_path / "diagnosis.json").write_text("{}")
    assert KeptDiagnosis.find(tmp_path, question) is None
