"""Schemas of `mm2-test weights`."""

from __future__ import annotations

from minimax_tools.capture.manifest import WeightMistake
from neuron.weight_trace.agreement import Severity
from schemas.judging import VERDICT
from schemas.parts import Schema, anything, by_name, choice, flag, listed, maybe, number, record, text, whole


def weights() -> Schema:
    """Return the schema of `mm2-test weights`."""
    finding = {
        "mistake": choice(*(mistake.value for mistake in WeightMistake), description="Kind of the mistake."),
        "severity": choice(
            *(severity.value for severity in Severity), description="Severity of the finding."
        ),
        "tensors": listed(text(), "Kinds of the checkpoint's tensors, such as q_proj."),
        "places": listed(text(), "Tensors of the port."),
        "text": text("The finding in a sentence."),
    }
    place = {
        "name": text("Name of the port's tensor."),
        "shape": listed(whole()),
        "dtype": text(),
        "holds": text("What its rows and columns hold of the checkpoint."),
    }
    trial = {
        "is_right": flag("Whether the port's output agrees with the reference layer's on generated weights."),
        "error": maybe(
            number(), "Error of that output, as a share of what the layer adds; null if it did not run."
        ),
        "limit": number("The largest error of a right port."),
        "repairs": listed(text(), "Repairs of the weights that make the output right."),
        "repaired_error": maybe(number(), "Error of the output with the repairs."),
        "refilled_error": maybe(
            number(), "Error once the tensors that never got their weights hold them; null if not tried."
        ),
        "partial_repairs": listed(text(), "Repairs that take away a part of the error."),
        "partial_error": maybe(number(), "Error with these."),
        "kept_error": maybe(number(), "Error on weights that quantisation keeps."),
        "kept_as": maybe(text(), "Form of these weights; null if none were tried."),
        "failure": maybe(text(), "Why the port could not be run; null if it was."),
    }
    return record(
        {
            "verdict": VERDICT,
            "target": text("The port, as --target names it."),
            "conversion": text("Who converted the weights."),
            "layer": whole("The traced layer."),
            "num_ranks": whole("Number of ranks that share the layer."),
            "traced": by_name(anything(), "Sizes of the traced model; is_smaller: than the checkpoint's."),
            "followed_experts": listed(whole(), "Experts that were traced element by element."),
            "findings": listed(record(finding), "What is wrong or unclear; empty if all is right."),
            "places": listed(record(place), "Every tensor that the port holds."),
            "trial": record(trial, "The port's forward on generated weights, beside the reference layer."),
            "explains_all": flag("Whether the output is right once the wrong weights are mended."),
            "memory": listed(text(), "Memory that the run does not need: float32 weights and temporaries."),
            "is_loaded": flag("Whether the checkpoint's own layer was loaded too."),
            "compared": listed(text(), "Kinds of tensors whose loaded values were all compared."),
        },
        "Where every element of a layer's weights lands in a port.",
        optional=("conversion",),
    )


def weights_of_layers() -> Schema:
    """Return the schema of `mm2-test weights --all-layers`."""
    one = weights()
    group = {"layers": listed(whole(), "Layers with these findings, ascending."), **one["properties"]}
    return record(
        {
            "verdict": VERDICT,
            "target": text("The port, as --target names it."),
            "groups": listed(
                record(group, "The first of the layers.", optional=("conversion",)),
                "Layers with the same findings, the worst first.",
            ),
        },
        "Where every element of each layer's weights lands in a port.",
    )
