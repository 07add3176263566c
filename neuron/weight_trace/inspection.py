"""Inspection: a port's weights are traced, tried and loaded, and a verdict is given.

1. The trace shows where every element of generated tensors lands in the port. What looks wrong is a *suspect*.
2. The trial runs the port on generated weights beside the reference layer. It clears the suspects, proves them
   wrong, or leaves them where it cannot tell.
3. The checkpoint's own layer is loaded, and compared with the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.results import Verdict
from neuron.ports.target import ConversionOrigin
from neuron.weight_trace.agreement import Severity, WeightFinding
from neuron.weight_trace.held_check import conclude
from neuron.weight_trace.layout_check import check_layouts, check_loaded, find_refills, number_as_loaded
from neuron.weight_trace.repairs import candidate_repairs
from neuron.weight_trace.scales import Scales
from neuron.weight_trace.source_lines import LineTable
from neuron.weight_trace.source_tensors import SourceTensors, TensorOrigin
from neuron.weight_trace.tensor_layout import TensorLayout, read_layout
from neuron.weight_trace.trace_size import ExpertSample, TrialMemory, word_memory
from neuron.weight_trace.traced_port import TracedPort
from neuron.weight_trace.trial import TrialOutcome, run_trial

logger = logging.getLogger(__name__)


# Share of the error that repairs may leave and still be sure, though not all is explained: unrelated ones leave at
# least 0.93 (see `trial`).
_SURE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInspection:
    """Results of an inspection of a port's weights."""

    target: str  # the port, as the user named it
    conversion: ConversionOrigin | None  # whose conversion was traced; None if the kind of target says it
    layer: int  # number of the traced layer
    spec: ModelSpec  # the traced model
    is_smaller: bool  # whether it is smaller than the checkpoint's model
    sample: ExpertSample  # experts that were traced
    num_ranks: int
    layouts: tuple[TensorLayout, ...]  # of the first rank's port tensors
    findings: tuple[WeightFinding, ...]  # faults, and suspects that the trial did not settle, with notes
    trial: TrialOutcome
    # Kinds of source tensors (such as `q_proj`) whose loaded values were all compared with the checkpoint's; None if
    # the checkpoint's own layer was not loaded.
    compared: tuple[str, ...] | None
    memory: tuple[str, ...] = ()  # sentences on memory that the run does not need

    @property
    def has_unseen(self) -> bool:
        """True if the port holds weights where torch shows no tensor, and its output is right."""
        return any(
            finding.mistake is WeightMistake.MISSING and finding.severity is Severity.NOTE
            for finding in self.findings
        )

    @property
    def explains_all(self) -> bool:
        """True if the port's output is right once what is wrong in the weights is undone."""
        return bool(self.trial.repairs) or self.trial.is_right_if_refilled

    @property
    def verdict(self) -> Verdict:
        """Fail if a weight is certainly wrong; warn if a suspect is left or the trial was not right; else pass."""
        severities = {finding.severity for finding in self.findings}
        if Severity.WRONG in severities:
            return Verdict.FAIL
        is_clear = self.trial.is_right and Severity.SUSPECT not in severities
        return Verdict.PASS if is_clear else Verdict.WARN


def inspect_weights(
    port: TracedPort, checkpoint_spec: ModelSpec, *, loads: bool, budget: MemoryBudget
) -> WeightInspection:
    """Trace a port's conversion, run the port on generated weights, and load the checkpoint's own layer if it `loads`.

    The memory `budget` sets how many experts are traced, and the trial's dtype.

    Raises:
        CheckpointError: The layer cannot be read.
        MemoryBudgetError: A port of that size does not fit.
        TargetError: The port cannot be built or loaded.
    """
    spec = port.spec
    # Some targets fill their parameters without a converted copy.
    num_layers_held = 1 if port.target.fills_storage else 2
    sample = ExpertSample.fitting(spec, port.dtype, budget, num_layers_held=num_layers_held)
    sources = sample.sources(spec)
    of_sample = "" if sample.is_whole else f", of {sample}"
    logger.info("Tracing where every element of layer %d lands%s.", port.layer, of_sample)
    origins = _trace(port, sample, is_smaller=spec != checkpoint_spec)
    by_rank = [[read_layout(origin, sources) for origin in of_rank] for of_rank in origins]
    scales = Scales.of((origin for of_rank in origins for origin in of_rank), sources, spec)
    findings = check_layouts(by_rank, sources, spec, scales)
    logger.info("Running the port on generated weights, beside the reference layer.")
    missing = {
        kind for finding in findings if finding.mistake is WeightMistake.MISSING for kind in finding.kinds
    }
    memory = TrialMemory.fitting(spec, port.dtype, budget, num_layers_held=num_layers_held)
    # Of several ranks each holds parts of the tensors: none is told what to overwrite.
    refills = find_refills(by_rank[0], SourceTensors.of(spec), missing) if len(by_rank) == 1 else {}
    trial = run_trial(
        port.run_trial,
        spec,
        port.layer,
        candidate_repairs(by_rank, SourceTensors.of(spec), spec, scales if sample.is_whole else None),
        computes_in_bf16=port.build_trial(memory.dtype),
        keeps_tensors=memory.keeps_tensors,
        refills=refills,
    )
    findings = _judge(findings, trial)
    compared = None
    if loads:
        logger.info("Loading layer %d of the checkpoint.", port.layer)
        held = conclude(port.load_checkpoint(dict(checkpoint_spec.raw)), LineTable(checkpoint_spec))
        found_by_trace = number_as_loaded(findings, held.faults) if spec != checkpoint_spec else findings
        own = LayerTensors.open(port.reader, checkpoint_spec, port.layer, port.dtype)
        findings = [*found_by_trace, *check_loaded(held, port.loaded, own, by_rank[0], findings)]
        compared = held.compared
    return WeightInspection(
        target=port.target.name,
        conversion=port.target.conversion,
        layer=port.layer,
        spec=spec,
        is_smaller=spec != checkpoint_spec,
        sample=sample,
        num_ranks=len(by_rank),
        layouts=tuple(by_rank[0]),
        findings=tuple(findings),
        trial=trial,
        compared=compared,
        memory=word_memory(
            by_rank[0],
            # The other ranks do not convert beside the lead, whom a conversion may wait for.
            peak_bytes=port.measure_conversion() if len(by_rank) == 1 else None,
            spec=spec,
            checkpoint_spec=checkpoint_spec,
            dtype=port.dtype,
        ),
    )


def _trace(port: TracedPort, sample: ExpertSample, *, is_smaller: bool) -> list[list[TensorOrigin]]:
    """Trace the port on all ranks; an error at a smaller size names --full-size."""
    try:
        return port.trace(sample)
    except TargetError as error:
        if not is_smaller:
            raise
        raise TargetError(
            f"{error.what} (traced at a smaller size)",
            expected=error.expected,
            found=error.found,
            next_step="If the port takes only the model's own size, trace it with --full-size.",
        ) from error


def _judge(findings: list[WeightFinding], trial: TrialOutcome) -> list[WeightFinding]:
    """Return the mistakes that the trial proved, then the findings, with each suspect settled by the trial."""
    details = {finding.text: finding.details for finding in findings}
    proved = [
        WeightFinding(
            mistake=repair.mistake,
            severity=Severity.WRONG,
            kinds=repair.kinds,
            text=repair.text,
            details=details.get(repair.text, ""),
        )
        for repair in trial.repairs
    ]
    # Two mistakes leave more of the error than repairs of the weights take away.
    is_sure = (trial.partial_error or 0.0) <= _SURE_SHARE * (trial.refilled_error or trial.error or 0.0)
    likely = [
        WeightFinding(
            mistake=repair.mistake,
            severity=Severity.WRONG if is_sure else Severity.SUSPECT,
            kinds=repair.kinds,
            text=f"{repair.text}; the output is off for another reason too",
        )
        for repair in trial.partial_repairs
    ]
    told = {finding.text for finding in proved}
    settled = [
        _settle(finding, trial) if finding.severity is Severity.SUSPECT else finding
        for finding in findings
        if finding.text not in told
    ]
    return [*proved, *likely, *settled]


def _settle(suspect: WeightFinding, trial: TrialOutcome) -> WeightFinding:
    """Return the suspect as a note, as wrong, or unchanged if the trial cannot tell."""
    if suspect.mistake is WeightMistake.MISSING:
        # A port may hold weights where torch shows no tensor, as in another library's memory.
        if trial.is_right:
            reason = "they were not seen: the port's output was compared instead, and is right"
            return suspect.cleared(reason)
        return replace(suspect, severity=Severity.WRONG)
    if trial.is_right:
        return suspect.cleared("on purpose: the port's output is right")
    if trial.is_right_if_refilled:
        if suspect.contradicts_names:
            return replace(suspect, severity=Severity.WRONG)
        return suspect.cleared("explained by what is missing, or on purpose")
    if trial.repairs:
        if any(set(suspect.kinds) & set(repair.kinds) for repair in trial.repairs):
            return suspect.cleared("explained by what is proved above, or on purpose")
        return suspect.cleared("on purpose: the port's output is right once what is proved above is undone")
    if trial.is_quantised:
        if suspect.mistake is WeightMistake.COMPUTED:
            # Only a comparison with the golden shows whether the loss by quantisation is acceptable.
            text = f"{suspect.text}: quantised, and right on weights that quantisation keeps"
            return replace(suspect, text=text)
        return suspect.cleared("on purpose: the port's output is right on weights that quantisation keeps")
    # The port ran, and nothing else explains its error. If it could not run, the names alone prove a mistake.
    is_wrong = trial.has_run or suspect.contradicts_names
    return replace(suspect, severity=Severity.WRONG) if is_wrong else suspect


_WORST_FIRST = (Verdict.FAIL, Verdict.WARN, Verdict.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionGroup:
    """Layers whose inspections have one verdict and the same findings."""

    layers: tuple[int, ...]  # the layers, ascending
    first: WeightInspection  # the inspection of the first of them


def group_inspections(inspections: Iterable[WeightInspection]) -> tuple[InspectionGroup, ...]:
    """Group layers that are alike; the worst verdict comes first, then the first layer.

    Figures are not compared: the generated weights differ from layer to layer. Of each group one inspection is kept,
    since its layouts hold a number for each element.
    """
    layers: dict[object, list[int]] = {}
    firsts: dict[object, WeightInspection] = {}
    for inspection in inspections:
        findings = (inspection.verdict, inspection.findings)
        layers.setdefault(findings, []).append(inspection.layer)
        firsts.setdefault(findings, inspection)
    groups = [
        InspectionGroup(layers=tuple(layers[findings]), first=first) for findings, first in firsts.items()
    ]
    return tuple(sorted(groups, key=lambda group: _WORST_FIRST.index(group.first.verdict)))
