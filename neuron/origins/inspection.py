"""Inspection: a port's weights traced, tried and loaded, and what all of it says about them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from minimax_tools.results import Verdict
from minimax_tools.spec import ModelSpec
from neuron.origins.exchanges import find_exchanges
from neuron.origins.findings import Finding, Weight, find_findings
from neuron.origins.layout import Layout, find_layout
from neuron.origins.loaded import find_in_loaded
from neuron.origins.port import TracedPort
from neuron.origins.sources import Sources
from neuron.origins.trial import TrialOutcome, run_trial

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found out about a port's weights.

    Args:
        target: The port, as the user named it.
        layer: The layer.
        traced: The model whose layer was traced.
        is_smaller: Whether it is smaller than the checkpoint's.
        layouts: What each place holds.
        findings: What is wrong, may be, or was meant.
        trial: How the port's output compares with the reference layer's.
        is_loaded: Whether the checkpoint's own layer was loaded and looked at.
    """

    target: str
    layer: int
    traced: ModelSpec
    is_smaller: bool
    layouts: tuple[Layout, ...]
    findings: tuple[Finding, ...]
    trial: TrialOutcome
    is_loaded: bool

    @property
    def verdict(self) -> Verdict:
        """Fail where something is certainly wrong, warn where something could not be told, else pass."""
        if any(finding.weight is Weight.WRONG for finding in self.findings):
            return Verdict.FAIL
        if any(finding.weight is Weight.SUSPECT for finding in self.findings) or not self.trial.is_right:
            return Verdict.WARN
        return Verdict.PASS


def inspect_weights(port: TracedPort, spec: ModelSpec, *, traced: ModelSpec, loads: bool) -> Inspection:
    """Trace a port's conversion, run the port on made weights, and load the checkpoint's own layer.

    Args:
        port: The port.
        spec: The checkpoint's model.
        traced: The model that is traced; `spec`, or a smaller one.
        loads: Whether the checkpoint's own layer is loaded.

    Raises:
        CheckpointError: The layer cannot be read.
        TargetError: The port cannot be built or loaded.
    """
    sources = Sources.of(traced)
    logger.info("Tracing where every element of layer %d lands.", port.layer)
    layouts = [find_layout(origin, sources) for origin in port.trace(traced)]
    findings = find_findings(layouts, sources, num_ranks=port.ranks.degree)
    logger.info("Running the port on made weights, beside the reference layer.")
    exchanges = find_exchanges(layouts, sources, traced)
    trial = run_trial(port.prepare_trial(traced), traced, port.layer, exchanges)
    findings = _judge(findings, trial)
    if loads:
        logger.info("Loading layer %d of the checkpoint.", port.layer)
        loaded = port.load(spec)
        known = {kind for finding in findings if finding.weight is Weight.WRONG for kind in finding.tensors}
        findings += find_in_loaded(loaded.places, loaded.before, loaded.tensors, layouts, known=known)
    return Inspection(
        target=port.target.name,
        layer=port.layer,
        traced=traced,
        is_smaller=traced != spec,
        layouts=tuple(layouts),
        findings=tuple(findings),
        trial=trial,
        is_loaded=loads,
    )


def _judge(findings: list[Finding], trial: TrialOutcome) -> list[Finding]:
    """What the trial says about each suspect."""
    if trial.is_right:
        reason = "the port means it: its output is right"
        return [
            finding.cleared(reason) if finding.weight is Weight.SUSPECT else finding for finding in findings
        ]
    proved = [
        Finding(
            mistake=repair.mistake,
            weight=Weight.WRONG,
            tensors=repair.tensors,
            places=(),
            text=repair.text,
        )
        for repair in trial.repairs
    ]
    if proved:
        repaired = {kind for repair in trial.repairs for kind in repair.tensors}
        explained = [
            finding.cleared("proved above, or meant")
            if finding.weight is Weight.SUSPECT and set(finding.tensors) & repaired
            else finding.cleared("the port means it: its output is right without what is proved above")
            if finding.weight is Weight.SUSPECT
            else finding
            for finding in findings
        ]
        return [*proved, *explained]
    # A port that could not run is taken at its word, unless its own names contradict it.
    has_run = trial.error is not None
    return [
        finding.confirmed() if finding.weight is Weight.SUSPECT and (has_run or finding.is_named) else finding
        for finding in findings
    ]
