"""An inspection of weights as text and as JSON."""

from __future__ import annotations

from typing import Any

from minimax_tools.capture.manifest import dtype_name
from minimax_tools.results.results import Verdict
from neuron.weight_trace.finding import Severity, WeightFinding
from neuron.weight_trace.inspection import WeightInspection
from neuron.weight_trace.layout import PlaceLayout
from neuron.weight_trace.sources import Sources, role
from neuron.weight_trace.trial import TrialOutcome
from reports.json_values import to_json

_MARKS = {Severity.WRONG: "[wrong]", Severity.SUSPECT: "[unclear]", Severity.NOTE: "[note]"}
_SHOWN_LIKE = 2


def render_inspection(inspection: WeightInspection) -> str:
    """The verdict, what is wrong, what the port holds, and what was done, as text."""
    lines = [
        f"{str(inspection.verdict).upper()}: the weights of layer {inspection.layer} in {inspection.target}",
        *(f"  {_MARKS[finding.weight]:10}{finding.text}" for finding in inspection.findings),
        "",
        f"What {_word_holder(inspection)} holds, traced on {_word_model(inspection)}:",
        *(f"  {line}" for line in _word_layouts(inspection.layouts)),
        *_word_sample(inspection),
        "",
        word_trial(inspection.trial),
    ]
    lines.append(_word_loaded(inspection))
    if not inspection.trial.is_right and inspection.verdict is not Verdict.FAIL:
        lines.append("Judge what the port computes: mm2-test sweep --golden GOLDEN --target …")
    return "\n".join(lines)


def inspection_record(inspection: WeightInspection) -> dict[str, Any]:
    """The same as JSON."""
    trial = inspection.trial
    return {
        "verdict": str(inspection.verdict),
        "target": inspection.target,
        "layer": inspection.layer,
        "num_ranks": inspection.num_ranks,
        "traced": {**inspection.traced.quantities(), "is_smaller": inspection.is_smaller},
        "followed_experts": list(inspection.sample.experts),
        "findings": [finding_record(finding) for finding in inspection.findings],
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
            "kept_error": to_json(trial.kept_error),
            "kept_as": trial.kept_as,
            "failure": trial.failure,
        },
        "is_loaded": inspection.is_loaded,
        "compared": list(inspection.compared),
    }


def finding_record(finding: WeightFinding) -> dict[str, Any]:
    """A finding as JSON."""
    return {
        "mistake": str(finding.mistake),
        "weight": str(finding.weight),
        "tensors": list(finding.tensors),
        "places": list(finding.places),
        "text": finding.text,
    }


def word_trial(trial: TrialOutcome) -> str:
    """What the trial showed, in a sentence."""
    if trial.error is None:
        return (
            f"The port could not be run on made weights here ({trial.failure}): "
            "what depends on its forward is unclear."
        )
    if trial.is_right:
        return f"Run on made weights, its output agrees with the reference layer's to {trial.error:.1e} of the delta."
    if trial.repairs:
        with_them = " and ".join(repair.text for repair in trial.repairs)
        return (
            f"Run on made weights, its output is off by {trial.error:.2g} of the delta; undoing that {with_them}, "
            f"by {trial.repaired_error:.1e}."
        )
    off = f"Run on made weights, its output is off by {trial.error:.2g} of the delta"
    if trial.is_quantised:
        return (
            f"{off}; on weights that quantising keeps ({trial.kept_as}) it agrees to {trial.kept_error:.1e}: "
            "that much is quantising."
        )
    return f"{off}, and no exchange of weights repairs it."


def _word_loaded(inspection: WeightInspection) -> str:
    """What loading the checkpoint's own layer showed, and of what it could not."""
    if not inspection.is_loaded:
        return "The checkpoint's own layer was not loaded."
    kinds = list(dict.fromkeys(source.kind for source in Sources.of(inspection.traced).all))
    left = [kind for kind in kinds if kind not in inspection.compared]
    text = f"Layer {inspection.layer} of the checkpoint was loaded as every run loads it: "
    if not left:
        return f"{text}all its numbers are compared with the checkpoint's."
    names = ", ".join(map(role, left))
    return f"{text}not compared are {names}, of which the port holds parts, copies or what it made of them."


def _word_holder(inspection: WeightInspection) -> str:
    return "the port" if inspection.num_ranks == 1 else f"rank 0 of {inspection.num_ranks}"


def _word_model(inspection: WeightInspection) -> str:
    if not inspection.is_smaller:
        return "a layer of the checkpoint's size"
    spec = inspection.traced
    return (
        f"a smaller layer of the same proportions (hidden {spec.hidden_size}, {spec.num_attention_heads} heads over "
        f"{spec.num_key_value_heads}, {spec.num_local_experts} experts of {spec.intermediate_size}; --full-size takes "
        "the real one)"
    )


def _word_sample(inspection: WeightInspection) -> list[str]:
    """Which experts were followed, where not all were."""
    sample = inspection.sample
    if sample.is_whole:
        return []
    return [
        f"Of the experts' tensors those of {sample} were followed ({', '.join(map(str, sample.experts))}): more do not "
        "fit in memory, see --memory-budget. All other tensors were."
    ]


def _word_layouts(layouts: tuple[PlaceLayout, ...]) -> list[str]:
    """A line for each place; of those that differ in the number of an expert alone, the first and how many more."""
    lines: list[str] = []
    groups: dict[str, list[PlaceLayout]] = {}
    for layout in layouts:
        key = "".join("#" if letter.isdigit() else letter for letter in layout.origin.name)
        groups.setdefault(key, []).append(layout)
    for group in groups.values():
        shown = group if len(group) <= _SHOWN_LIKE else group[:1]
        lines += [f"{layout.origin}: {layout.text}" for layout in shown]
        if len(group) > len(shown):
            lines.append(f"  … and {len(group) - 1} more like it, to {group[-1].origin.name}")
    return lines
