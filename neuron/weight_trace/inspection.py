"""Inspection: a port's weights are traced, tried and loaded, and a verdict is given.

1. The trace shows where every element of generated tensors lands in the port. What looks wrong is a *suspect*.
2. The trial runs the port on generated weights beside the reference layer. It clears the suspects, proves them
   wrong, or leaves them where it cannot tell.
3. The checkpoint's own layer is loaded, and compared with the checkpoint.

Several ranks may share the layer, each with a `TracedPort`. What rank 0, the lead, does with its own, the other ranks
do with theirs: they wait for that in `follow_trace`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes, float32_names, layer_bytes
from minimax_tools.results.results import Verdict
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.returned import find_output
from neuron.ports.target import ConversionOrigin, Target, port_errors
from neuron.ports.targets import find_target
from neuron.weight_trace.agreement import Scales, Severity, WeightFinding
from neuron.weight_trace.held_check import HeldPart, check_part, conclude
from neuron.weight_trace.layout_check import check_layouts, check_loaded, find_refills, number_as_loaded
from neuron.weight_trace.origin_tracer import OriginTracer
from neuron.weight_trace.port_tensors import find_port_tensors
from neuron.weight_trace.repairs import candidate_repairs
from neuron.weight_trace.source_lines import LineTable, NotedTensors, PortLines
from neuron.weight_trace.source_tensors import (
    GeneratedTensors,
    MakeTensor,
    SourceTensors,
    TensorOrigin,
    Tensors,
)
from neuron.weight_trace.tensor_layout import TensorLayout, read_layout
from neuron.weight_trace.trace_size import ExpertSample, TrialMemory, WideAllocations, word_memory
from neuron.weight_trace.trial import TrialOutcome, run_trial

logger = logging.getLogger(__name__)

# A conversion of a larger layer is not measured: all tensors of the layer are in memory at once.
_MOST_MEASURED_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class TracedPort:
    """A rank's part of a port's layer. All methods raise TargetError if the port cannot be built, loaded or run.

    Lists of what each rank returns are in rank order, and empty on other ranks than the lead.
    """

    target: Target  # the port
    spec: ModelSpec  # the traced model; it may be smaller than the checkpoint's
    layer: int
    dtype: torch.dtype  # dtype of the run, in which the port is traced and loaded
    reader: CheckpointReader
    runtime: Runtime
    pool: ReadingPool  # threads that fill parameters
    # The module that was built for the trial, and its dtype.
    _trial: tuple[nn.Module, torch.dtype] | None = field(init=False, default=None)
    # What `load_checkpoint` loaded, by name.
    loaded: Mapping[str, torch.Tensor] = field(init=False, default_factory=dict)

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Let the other ranks build their part of the port, and follow this one until the block ends."""
        follow = partial(
            follow_trace,
            folder=self.reader.folder,
            target=self.target.name,
            layer=self.layer,
            dtype=self.dtype,
            config=dict(self.spec.raw),
        )
        self.runtime.messages.send(follow)
        yield
        self.runtime.messages.send(None)

    def trace(self, sample: ExpertSample) -> list[list[TensorOrigin]]:
        """Return the origins of every rank's port tensors, but for those that hold only experts outside the sample."""
        self._share(partial(TracedPort.trace, sample=sample))
        module = self._build(self.spec, self.dtype)

        def load(make: MakeTensor) -> dict[str, torch.Tensor]:  # `make`: a tensor's values by its name
            self._load_generated(module, make, self.dtype)
            return find_port_tensors(module)

        sources, shapes = sample.sources(self.spec), expected_layer_shapes(self.spec, self.layer)
        origins = OriginTracer(sources, shapes, load, pool=self.pool).trace()
        return self.runtime.messages.gather(origins)

    def build_trial(self, dtype: torch.dtype) -> bool:
        """Build the port in `dtype`, for `run_trial`; decide whether it computes in BF16."""
        self._share(partial(TracedPort.build_trial, dtype=dtype))
        module = self._build(self.spec, dtype)
        self._trial = module, dtype
        return any(parameter.dtype.itemsize == 2 for parameter in module.parameters())

    def run_trial(
        self, tensors: Tensors, hidden_states: torch.Tensor, inputs: Inputs, refills: Mapping[str, str]
    ) -> torch.Tensor:
        """Load generated weights, and return the port's output [B,S,H] for hidden states [B,S,H].

        `refills` names port tensors to overwrite once the port is loaded, each with the weight to write there.
        """
        assert self._trial is not None, "a port is built before it runs"
        if self.runtime.ranks.are_several:
            # Functions that make tensors on access cannot be sent: the tensors are made now.
            tensors, refills = dict(tensors), dict(refills)
        self._share(
            partial(
                TracedPort.run_trial,
                tensors=tensors,
                hidden_states=hidden_states,
                inputs=inputs,
                refills=refills,
            )
        )
        module, dtype = self._trial
        port = f"port {self.target.name}, layer {self.layer}"
        self._load_generated(module, tensors.__getitem__, dtype)
        held = find_port_tensors(module)
        for name, source in refills.items():
            held[name].copy_(tensors[source])
        errors = port_errors(
            f"{port} failed while it ran",
            activity=f"running layer {self.layer} of port {self.target.name} on generated weights",
            next_step="See --debug for the traceback.",
        )
        # The port gets copies: it may change its input in place.
        with torch.no_grad(), errors:
            result = module(
                hidden_states.to(dtype, copy=True), inputs.attention_mask.clone(), inputs.position_ids.clone()
            )
        return find_output(result, tuple(hidden_states.shape), what=port)

    def measure_conversion(self) -> int | None:
        """Return the most bytes of float32 temporaries that the conversion holds at once; None for a large layer."""
        if layer_bytes(self.spec, self.dtype, self.layer) > _MOST_MEASURED_BYTES:
            return None
        module = self._build(self.spec, self.dtype)
        # Made beforehand, in the dtypes that a conversion gets: else their making would count.
        in_float32 = float32_names(self.spec.graph)
        given = {
            name: torch.rand(shape).to(torch.float32 if name in in_float32 else self.dtype)
            for name, shape in expected_layer_shapes(self.spec, self.layer).items()
        }
        with WideAllocations() as allocations:
            self._load_generated(module, given.__getitem__, self.dtype)
        peak_bytes: int = allocations.peak_bytes
        return peak_bytes

    def load_checkpoint(self, config: Mapping[str, Any]) -> list[HeldPart]:
        """Load the checkpoint's own layer, of a model of `config`, into `loaded`; return what each rank holds."""
        self._share(partial(TracedPort.load_checkpoint, config=config))
        spec = ModelSpec.from_config(config)
        module = self._build(spec, self.dtype)
        tensors = NotedTensors.noting(
            self.reader, spec, self.layer, self.dtype, table=LineTable(spec, self.layer)
        )
        self._load(module, tensors, spec)
        self.loaded = find_port_tensors(module)
        return self.runtime.messages.gather(check_part(module, tensors, sent=PortLines(spec), pool=self.pool))

    def _share(self, call: Callable[[TracedPort], object]) -> None:
        """Let the other ranks make the lead's call; a call that ends in `gather` does so on all ranks."""
        if self.runtime.ranks.is_lead:
            self.runtime.messages.send(call)

    def _build(self, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
        return self.target.build(spec, self.layer, dtype=dtype, ranks=self.runtime.ranks)

    def _load_generated(self, module: nn.Module, make: MakeTensor, dtype: torch.dtype) -> None:
        tensors = GeneratedTensors(self.spec, layer=self.layer, dtype=dtype, make=make, reader=self.reader)
        self._load(module, tensors, self.spec)

    def _load(self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec) -> None:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=self.pool)
        self.target.load(module, tensors, spec, loader=loader, ranks=self.runtime.ranks)


def follow_trace(
    runtime: Runtime, *, folder: Path, target: str, layer: int, dtype: torch.dtype, config: Mapping[str, Any]
) -> None:
    """Make the lead's calls on another rank, until no more comes; an error here ends the inspection on all.

    `config` is config.json of the traced model.
    """
    with (
        CheckpointReader(folder, layers=range(layer, layer + 1)) as reader,
        ReadingPool(torch.get_num_threads()) as pool,
    ):
        port = TracedPort(
            target=find_target(target),
            spec=ModelSpec.from_config(config),
            layer=layer,
            dtype=dtype,
            reader=reader,
            runtime=runtime,
            pool=pool,
        )
        call: Callable[[TracedPort], object] | None
        while (call := runtime.messages.receive()) is not None:
            call(port)


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
    sample = ExpertSample.fitting(spec, port.layer, port.dtype, budget, num_layers_held=num_layers_held)
    sources, all_sources = sample.sources(spec), SourceTensors.of(spec, port.layer)
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
    memory = TrialMemory.fitting(spec, port.layer, port.dtype, budget, num_layers_held=num_layers_held)
    # Of several ranks each holds parts of the tensors: none is told what to overwrite.
    refills = find_refills(by_rank[0], all_sources, missing) if len(by_rank) == 1 else {}
    trial = run_trial(
        port.run_trial,
        spec,
        port.layer,
        candidate_repairs(by_rank, all_sources, spec, scales if sample.is_whole else None),
        computes_in_bf16=port.build_trial(memory.dtype),
        keeps_tensors=memory.keeps_tensors,
        refills=refills,
    )
    findings = _judge(findings, trial)
    compared = None
    if loads:
        logger.info("Loading layer %d of the checkpoint.", port.layer)
        held = conclude(
            port.load_checkpoint(dict(checkpoint_spec.raw)), LineTable(checkpoint_spec, port.layer)
        )
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
            layer=port.layer,
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


def group_inspections(inspections: Iterable[WeightInspection], *, joins: bool) -> tuple[InspectionGroup, ...]:
    """Group layers that are alike, if it `joins` any; the worst verdict comes first, then the first layer.

    Figures are not compared: the generated weights differ from layer to layer. Of each group one inspection is kept,
    since its layouts hold a number for each element.
    """
    layers: dict[object, list[int]] = {}
    firsts: dict[object, WeightInspection] = {}
    for inspection in inspections:
        findings = (inspection.verdict, inspection.findings, None if joins else inspection.layer)
        layers.setdefault(findings, []).append(inspection.layer)
        firsts.setdefault(findings, inspection)
    groups = [
        InspectionGroup(layers=tuple(layers[findings]), first=first) for findings, first in firsts.items()
    ]
    return tuple(sorted(groups, key=lambda group: _WORST_FIRST.index(group.first.verdict)))
