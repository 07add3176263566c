"""PortDiagnosis: the known mistakes that explain a port's layer, as `mm2-diagnose` names them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from compare.diagnosis.diagnose import diagnose as diagnose_captures
from compare.diagnosis.finding import Diagnosis, MistakeFinding
from compare.diagnosis.report import diagnosis_record, render_diagnosis
from minimax_tools.errors import CheckpointError
from mm2.comparison import REPORT_WIDTH
from mm2.golden_layer import GoldenLayer
from mm2.recorded_capture import RecordedCapture
from mm2.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class PortDiagnosis:
    """The result of `diagnose`. `str()` gives mm2's text, as `mm2-diagnose` prints it."""

    result: Diagnosis = field(repr=False)

    @property
    def findings(self) -> tuple[MistakeFinding, ...]:
        """The named mistakes, best first; () where nothing known explains the layer, or nothing differs."""
        return self.result.findings

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Names of these mistakes, such as `gate_up_swapped`."""
        return tuple(finding.mistake for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as `mm2-diagnose --json` prints it, without the commands to run next."""
        return diagnosis_record(self.result)

    def __str__(self) -> str:
        return render_diagnosis(self.result, width=REPORT_WIDTH, is_terminal=False)

    def __repr__(self) -> str:
        return f"PortDiagnosis({', '.join(self.mistakes) or 'no known mistake named'})"


def diagnose(reference: GoldenLayer, target: Recording) -> PortDiagnosis:
    """Name the known mistakes that explain a port's layer; seconds for a toy, more for a layer of true size.

    Args:
        reference: The layer of the golden. Its checkpoint must be at hand.
        target: The port, run on the golden's input.

    Raises:
        CheckpointError: The checkpoint is not on this machine, or cannot be read.
        IncomparableError: The sides must not be compared.
    """
    golden = reference.golden
    if golden.checkpoint is None:
        raise CheckpointError(
            "a diagnosis changes the golden's layer, and its weights are not on this machine",
            next_step="Name the checkpoint: mm2.open_golden(DIR, model=DIR), or pytest --mm2-model DIR.",
        )
    port = RecordedCapture.of(target, golden=reference)
    return PortDiagnosis(
        result=diagnose_captures(
            golden.capture, port, model=golden.checkpoint.model, layers=(reference.number,)
        )
    )
