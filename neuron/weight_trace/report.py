"""Report: an inspection of weights as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from minimax_tools.capture.manifest import WeightMistake
from minimax_tools.errors import format_count
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Verdict
from minimax_tools.stored_dtype import dtype_name
from neuron.weight_trace.agreement import Severity, WeightFinding
from neuron.weight_trace.inspection import InspectionGroup, WeightInspection
from neuron.weight_trace.port_tensors import name_pattern
from neuron.weight_trace.source_tensors import SourceTensors, kinds_of, word_kinds
from neuron.weight_trace.tensor_layout import TensorLayout
from reports.data import to_json

_MARKS = {Severity.WRONG: "[wrong]", Severity.SUSPECT: "[unclear]", Severity.NOTE: "[note]"}
# In the first line, before what is wrong; and its end if that explains all.
ARE_WRONG = " are wrong: "
NOTHING_ELSE = "nothing else is wrong"
NOT_ALL_SEEN = "its weights were not all seen"
# Up to this many tensors whose names differ in numbers alone are shown; of more, only the first.
_MAX_SHOWN_ALIKE = 2


def render_inspections(groups: Sequence[InspectionGroup], *, is_brief: bool) -> str:
    """Return inspections as text: verdict, findings, layouts, trial and loading. What is wrong comes first.

    If it `is_brief`, right layers take a line.
    """
    return "\n\n".join(
        _render_right(group) if is_brief and group.first.verdict is Verdict.PASS else _render_group(group)
        for group in groups
    )


def inspections_record(groups: Sequence[InspectionGroup]) -> dict[str, Any]:
    """Return the inspections of several layers as JSON: for layers that are alike, that of the first."""
    return {
        "verdict": str(groups[0].first.verdict),
        "target": groups[0].first.target,
        "groups": [{"layers": list(group.layers), **inspection_record(group.first)} for group in groups],
    }


def _render_right(group: InspectionGroup) -> str:
    headline = f"{_verdict_word(group.first)}: {_headline(group.first, group.layers)}"
    return "\n".join([headline, *_word_memory(group.first)])


def _render_group(group: InspectionGroup) -> str:
    inspection = group.first
    holder = "the port" if inspection.num_ranks == 1 else f"rank 0 of {inspection.num_ranks}"
    lines = [
        f"{_verdict_word(inspection)}: {_headline(inspection, group.layers)}",
        *(f"  {_MARKS[finding.severity]:10}{_word_finding(finding)}" for finding in inspection.findings),
        *([] if inspection.conversion is None else ["", f"Converted by {inspection.conversion.words}."]),
        "",
        f"What {holder} holds, traced on {_word_model(inspection)}:",
        *(f"  {line}" for line in _word_layouts(inspection.layouts) or ["no tensor that torch shows"]),
        *_word_sample(inspection),
        "",
        _word_trial(inspection),
        _word_loaded(inspection),
        *_word_memory(inspection),
    ]
    return "\n".join(lines)


def inspection_record(inspection: WeightInspection) -> dict[str, Any]:
    """Return the inspection as JSON, under the keys of the first version, some of which have other names here."""
    trial = inspection.trial
    return {
        "verdict": str(inspection.verdict),
        "target": inspection.target,
        **({} if inspection.conversion is None else inspection.conversion.as_options()),
        "layer": inspection.layer,
        "num_ranks": inspection.num_ranks,
        "traced": {**inspection.spec.quantities(), "is_smaller": inspection.is_smaller},
        "followed_experts": list(inspection.sample.experts),
        "findings": [_finding_record(finding) for finding in inspection.findings],
        "places": [
            {
                "name": layout.origin.name,
                "shape": list(layout.origin.shape),
                "dtype": dtype_name(layout.origin.dtype),
                "holds": layout.text,
            }
            for layout in inspection.layouts
        ],
        "trial": {
            "is_right": trial.is_right,
            "error": to_json(trial.error),
            "limit": trial.limit,
            "repairs": [repair.text for repair in trial.repairs],
            "repaired_error": trial.repaired_error,
            "refilled_error": to_json(trial.refilled_error),
            "partial_repairs": [repair.text for repair in trial.partial_repairs],
            "partial_error": to_json(trial.partial_error),
            "kept_error": to_json(trial.exact_error),
            "kept_as": trial.exact_in,
            "failure": trial.failure,
        },
        "explains_all": inspection.explains_all,
        "memory": list(inspection.memory),
        "is_loaded": inspection.compared is not None,
        "compared": list(inspection.compared or ()),
    }


def _finding_record(finding: WeightFinding) -> dict[str, Any]:
    return {
        "mistake": str(finding.mistake),
        "severity": str(finding.severity),
        "tensors": list(finding.kinds),
        "places": list(finding.port_tensors),
        "text": _word_finding(finding),
    }


def _word_finding(finding: WeightFinding) -> str:
    return f"{finding.text}: {finding.details}" if finding.details else finding.text


def _verdict_word(inspection: WeightInspection) -> str:
    return str(inspection.verdict).upper()


def _headline(inspection: WeightInspection, layers: Sequence[int]) -> str:
    weights = f"the weights of {word_layers(layers)} in {inspection.target}"
    if inspection.verdict is Verdict.PASS and inspection.has_unseen:
        return f"{word_layers(layers)} of {inspection.target} gives the right output; {NOT_ALL_SEEN}"
    if inspection.verdict is Verdict.PASS:
        return f"{weights} are right"
    wrong = [finding for finding in inspection.findings if finding.severity is Severity.WRONG]
    if wrong:
        more = f" (and {format_count(len(wrong) - 1, 'more finding')})" if len(wrong) > 1 else ""
        alone = f"; {NOTHING_ELSE}" if inspection.explains_all else ""
        return f"{weights}{ARE_WRONG}{wrong[0].text}{more}{alone}"
    is_of_forward = not any(finding.severity is Severity.SUSPECT for finding in inspection.findings)
    if is_of_forward and inspection.trial.has_run and not inspection.trial.is_quantised:
        return f"no fault is seen in {weights}, and the output differs"
    return weights


def _word_trial(inspection: WeightInspection) -> str:
    trial = inspection.trial
    if trial.error is None:
        return (
            f"The port could not be run on generated weights here ({trial.failure}): "
            "what depends on its forward is unclear."
        )
    run = "Run on generated weights, its output"
    if trial.is_right:
        return f"{run} agrees with the reference layer's to {trial.error:.1e} of the delta."
    off = f"{run} is off by {trial.error:.2g} of the delta"
    if trial.refilled_error is not None:
        missing = _word_kinds(dict.fromkeys(_missing_kinds(inspection)), inspection)
        if trial.is_right_if_refilled:
            return f"{off}. With {missing} right it agrees to {trial.refilled_error:.1e}: {NOTHING_ELSE}."
        off += f", with {missing} right still by {trial.refilled_error:.2g}"
    if trial.repairs:
        with_them = " and ".join(repair.text for repair in trial.repairs)
        return f"{off}; once this is undone, by {trial.repaired_error:.1e}: {with_them}."
    if trial.is_quantised:
        return (
            f"{off}; on weights that quantisation keeps ({trial.exact_in}) it agrees to {trial.exact_error:.1e}: "
            "the error is that of quantisation."
        )
    if trial.partial_repairs:
        with_them = " and ".join(repair.text for repair in trial.partial_repairs)
        return (
            f"{off}; once this is undone, still by {trial.partial_error:.2g}: {with_them}. "
            "The forward is wrong too."
        )
    if trial.refilled_error is not None:
        return f"{off}: the forward is wrong too."
    if any(finding.severity is Severity.WRONG for finding in inspection.findings):
        return (
            f"{off}. What is wrong above is in it: mend that, and trace again to see what the forward does."
        )
    return f"{off}: the forward computes something else, or wants the weights in another order or layout."


def _missing_kinds(inspection: WeightInspection) -> Iterator[str]:
    for finding in inspection.findings:
        if finding.mistake is WeightMistake.MISSING:
            yield from finding.kinds


def _word_kinds(kinds: Iterable[str], inspection: WeightInspection) -> str:
    return word_kinds(kinds, inspection.spec.family.stored_names)


def _word_memory(inspection: WeightInspection) -> list[str]:
    return [f"Memory: {sentence}" for sentence in inspection.memory]


def _word_loaded(inspection: WeightInspection) -> str:
    if inspection.compared is None:
        return "The checkpoint's own layer was not loaded."
    kinds = kinds_of(SourceTensors.of(inspection.spec, inspection.layer).all)
    not_compared = [kind for kind in kinds if kind not in inspection.compared]
    text = f"Layer {inspection.layer} of the checkpoint was loaded as every run loads it"
    if not not_compared:
        return f"{text}: all its numbers are compared with the checkpoint's."
    words = _word_kinds(not_compared, inspection)
    return (
        f"{text}. Not compared are {words}: found wrong above, or held by the port in other "
        "numbers, in parts of rows and columns, or where torch shows no tensor."
    )


def _word_model(inspection: WeightInspection) -> str:
    if not inspection.is_smaller:
        return "a layer of the checkpoint's size"
    spec = inspection.spec
    mlp = (
        f"a dense MLP of {spec.graph.dense_width}"
        if spec.graph.layer(inspection.layer).is_dense
        else f"{spec.num_local_experts} experts of {spec.intermediate_size}"
    )
    return (
        f"a smaller layer of the same proportions (hidden {spec.hidden_size}, {spec.num_attention_heads} heads over "
        f"{spec.num_key_value_heads}, {mlp}; --full-size takes the real one)"
    )


def _word_sample(inspection: WeightInspection) -> list[str]:
    sample = inspection.sample
    if sample.is_whole:
        return []
    return [
        f"Elements of {sample} were traced ({', '.join(map(str, sample.experts))}), and all other tensors: "
        "more experts do not fit in memory, see --memory-budget."
    ]


def _word_layouts(layouts: tuple[TensorLayout, ...]) -> list[str]:
    """Return a line for each tensor; for many names that differ in numbers alone, only the first and a count."""
    lines: list[str] = []
    groups: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        groups.setdefault(name_pattern(layout.origin.name), []).append(layout)
    for group in groups.values():
        shown = group if len(group) <= _MAX_SHOWN_ALIKE else group[:1]
        lines += [f"{layout.origin}: {layout.text}" for layout in shown]
        if len(group) > len(shown):
            lines.append(f"  … and {len(group) - 1} more like it, to {group[-1].origin.name}")
    return lines
