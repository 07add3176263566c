"""WeightInspection: a port's weights traced, tried and loaded, and what all of it says about them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Verdict
from neuron.weight_trace.exchanges import find_exchanges
from neuron.weight_trace.finding import Severity, WeightFinding, WeightMistake
from neuron.weight_trace.findings import find_findings
from neuron.weight_trace.layout import PlaceLayout, find_layout
from neuron.weight_trace.loaded import find_in_loaded
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.sample import Sample, TrialRoom
from neuron.weight_trace.shared_port import SharedPort
from neuron.weight_trace.sources import Sources
from neuron.weight_trace.trial import TrialOutcome, run_trial

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInspection:
    """What was found out about a port's weights.

    Args:
        target: The port, as the user named it.
        layer: The layer.
        traced: The model whose layer was traced.
        is_smaller: Whether it is smaller than the checkpoint's.
        sample: The experts that were followed.
        num_ranks: How many ranks share it.
        layouts: What each place of the first rank holds.
        findings: What is wrong, may be, or was meant.
        trial: How the port's output compares with the reference layer's.
        is_loaded: Whether the checkpoint's own layer was loaded and looked at.
        compared: The kinds of tensors whose numbers, as loaded, were held against the checkpoint's.
    """

    target: str
    layer: int
    traced: ModelSpec
    is_smaller: bool
    sample: Sample
    num_ranks: int
    layouts: tuple[PlaceLayout, ...]
    findings: tuple[WeightFinding, ...]
    trial: TrialOutcome
    is_loaded: bool
    compared: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Fail where something is certainly wrong, warn where something could not be told, else pass."""
        if any(finding.weight is Severity.WRONG for finding in self.findings):
            return Verdict.FAIL
        if any(finding.weight is Severity.SUSPECT for finding in self.findings) or not self.trial.is_right:
            return Verdict.WARN
        return Verdict.PASS


def inspect_weights(
    shared: SharedPort, spec: ModelSpec, *, loads: bool, budget: MemoryBudget
) -> WeightInspection:
    """Trace a port's conversion, run the port on made weights, and load the checkpoint's own layer.

    Args:
        shared: The port.
        spec: The checkpoint's model.
        loads: Whether the checkpoint's own layer is loaded.
        budget: What the process may hold: it says how many experts are followed, and in which dtype the port is run.

    Raises:
        CheckpointError: The layer cannot be read.
        MemoryBudgetError: A port of that size does not fit.
        TargetError: The port cannot be built or loaded.
    """
    port, traced = shared.port, shared.traced
    num_layers_held = 1 if port.target.fills_storage else 2
    sample = Sample.that_fits(traced, port.dtype, budget, num_layers_held=num_layers_held)
    sources = sample.sources(traced)
    followed = "" if sample.is_whole else f", of {sample}"
    logger.info("Tracing where every element of layer %d lands%s.", port.layer, followed)
    traces = _trace(shared, spec, sample)
    by_rank = [[find_layout(origin, sources) for origin in origins] for origins in traces]
    findings = find_findings(by_rank, sources)
    logger.info("Running the port on made weights, beside the reference layer.")
    exchanges = find_exchanges(by_rank[0], Sources.of(traced), traced)
    room = TrialRoom.that_fits(traced, port.dtype, budget, num_layers_held=num_layers_held)
    trial = run_trial(
        shared.prepare_trial(room.dtype), traced, port.layer, exchanges, keeps_tensors=room.keeps_tensors
    )
    findings = _judge(findings, trial)
    compared: tuple[str, ...] = ()
    if loads:
        logger.info("Loading layer %d of the checkpoint.", port.layer)
        loaded = shared.load(spec)
        known = {kind for finding in findings if finding.weight is Severity.WRONG for kind in finding.tensors}
        check = find_in_loaded(loaded.places, loaded.before, loaded.tensors, by_rank[0], known=known)
        findings += check.findings
        compared = check.compared
    return WeightInspection(
        target=port.target.name,
        layer=port.layer,
        traced=traced,
        is_smaller=traced != spec,
        sample=sample,
        num_ranks=len(by_rank),
        layouts=tuple(by_rank[0]),
        findings=tuple(findings),
        trial=trial,
        is_loaded=loads,
        compared=compared,
    )


def _trace(shared: SharedPort, spec: ModelSpec, sample: Sample) -> list[list[Origin]]:
    try:
        return shared.trace(sample)
    except TargetError as error:
        if shared.traced == spec:
            raise
        raise TargetError(
            f"{error.what} (traced at a smaller size)",
            expected=error.expected,
            found=error.found,
            next_step="A port that takes the model's own size alone is traced with --full-size.",
        ) from error


def _judge(findings: list[WeightFinding], trial: TrialOutcome) -> list[WeightFinding]:
    """What the trial says about each suspect."""
    if trial.is_right:
        reason = "the port means it: its output is right"
        return [
            finding.cleared(reason) if finding.weight is Severity.SUSPECT else finding for finding in findings
        ]
    proved = [
        WeightFinding(
            mistake=repair.mistake,
            weight=Severity.WRONG,
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
            if finding.weight is Severity.SUSPECT and set(finding.tensors) & repaired
            else finding.cleared("the port means it: its output is right without what is proved above")
            if finding.weight is Severity.SUSPECT
            else finding
            for finding in findings
        ]
        return [*proved, *explained]
    if trial.is_quantised:
        return [_judge_quantised(finding) for finding in findings]
    # A port that could not run is taken at its word, unless its own names contradict it.
    has_run = trial.error is not None
    return [
        finding.confirmed()
        if finding.weight is Severity.SUSPECT and (has_run or finding.is_named)
        else finding
        for finding in findings
    ]


def _judge_quantised(finding: WeightFinding) -> WeightFinding:
    """What a port means that is right but for quantising; what it computed may cost too much, which no trial tells."""
    if finding.weight is not Severity.SUSPECT:
        return finding
    if finding.mistake is WeightMistake.COMPUTED:
        return finding.quantised()
    return finding.cleared("the port means it: its output is right on weights that quantising keeps")
