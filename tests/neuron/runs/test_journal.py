"""The journal of a bisection: what was found is found again, and a damaged journal is begun anew."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.capture.manifest import Description
from minimax_tools.model.run import multi_layer_run
from minimax_tools.model.span import Span
from minimax_tools.provenance import ModelFingerprint, Provenance
from minimax_tools.results.probes import Chain, Probe
from neuron.runs.bisection import JOURNAL_NAME, open_journal

SPAN = Span(0, 2)
PROBE = Probe(
    span=SPAN,
    chains=(Chain(span=SPAN, is_right=False, excess=float("inf"), visible=0.1, reason="the output"),),
)


def describe(*, inputs: str = "1", target: str = "1") -> Description:
    return Description(
        side="neuron",
        run=multi_layer_run(SPAN, sites_level="layer"),
        provenance=Provenance(
            model=ModelFingerprint(spec_digest="0" * 64, tensors_digest="1" * 64, layers={}),
            model_source="/models/MiniMax-M2",
            backend="cpu",
            device="cpu",
            dtypes={"weights": "bfloat16"},
            target="port.py:Port",
            target_digest=target,
        ),
        inputs_digest=inputs,
        input_source="a test",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal with one probe."""
    with open_journal(tmp_path, describe(), is_anew=False) as journal:
        journal.probe(SPAN, lambda: PROBE, what="a probe")
    return tmp_path / JOURNAL_NAME


def find(path: Path, description: Description) -> Probe | None:
    """Return the probe on record; None if it would run again."""

    def run() -> Probe:
        raise LookupError("not on record")

    with open_journal(path.parent, description, is_anew=False) as journal, suppress(LookupError):
        return journal.probe(SPAN, run, what="a probe")
    return None


def test_probe_is_found_again_unless_the_bisection_is_of_other_inputs_or_of_an_edited_port(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find(path, describe()) == PROBE
    with caplog.at_level(logging.INFO):
        assert find(path, describe(inputs="2", target="2")) is None
    assert "Starting anew" in caplog.text
    assert "has other inputs_digest, target_digest" in caplog.text


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), 3),
        (("schema_version",), True),
        (("description",), [1]),
        (("probes", 0), None),
        (("probes", 0, "chains", 0, "excess"), "much"),
    ],
)
def test_damaged_journal_is_begun_anew_and_named(
    path: Path, place: tuple[Any, ...], value: object, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"": json.loads(path.read_text())}
    at: Any = record
    keys = ("", *place)
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(record[""]))
    with caplog.at_level(logging.WARNING):
        assert find(path, describe()) is None
    assert f"Starting anew: {path} cannot be read" in caplog.text


def test_journal_of_another_version_is_not_damaged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text('{"schema_version": 0}')
    with caplog.at_level(logging.INFO):
        assert find(path, describe()) is None
    assert "another version of mm2 wrote the journal there" in caplog.text
