"""Schemas of outputs about captures: what they hold, their certificate, and the checks of a machine."""

from __future__ import annotations

from minimax_tools.capture.manifest import Certificate, Check, Description
from minimax_tools.capture.passes import Continuation
from minimax_tools.capture.source import CaptureInspection, ListedTensor
from minimax_tools.machine.finding import Level, MachineFinding
from minimax_tools.metrics.tensor_statistics import TensorStatistics
from minimax_tools.model.run import Component, Mode
from minimax_tools.provenance import CONFIGS, Provenance
from neuron.ports.traced import TracedProgram
from neuron.runs.run_profile import CaptureEffect
from schemas.judging import graphs
from schemas.parts import Schema, anything, by_name, choice, flag, listed, maybe, number, record, text, whole
from schemas.values import schema_of


def capture() -> Schema:
    """Return the schema of what a capture holds."""
    site = schema_of(TensorStatistics)["properties"]
    tensor = record({"site": text("Name of the site."), "shape": listed(whole()), "dtype": text(), **site})
    output = record({"name": text("Name."), "shape": listed(whole()), "dtype": text(), **site})
    layer = {
        "layer": whole("The layer."),
        "sites": listed(tensor, "Its sites in execution order, with statistics of the finite values."),
        "not_exposed": listed(text(), "Sites that the port does not show."),
        "further": listed(output, "Further outputs of the port, stored on request and never judged."),
    }
    return record(
        {
            "directory": maybe(text(), "Folder or address of the capture; null if it was not saved."),
            "complete": maybe(flag(), "Whether the run came to its end; null if the layout does not say."),
            "description": maybe(_description(), "The run; null if the layout does not say."),
            "observed_dtypes": by_name(text(), "Dtypes of the router's parts as the port loaded them."),
            "certificate": maybe(_certificate(), "Checks of a golden; null without any."),
            "inspection": maybe(
                schema_of(CaptureInspection), "What reading all files found; null if not read."
            ),
            "layers": listed(record(layer), "The layers, ascending."),
            "model": listed(tensor, "Sites outside the layers."),
        },
        "What a capture holds.",
    )


def generation() -> Schema:
    """Return the schema of generated tokens."""
    pair = {"type": "array", "prefixItems": [whole(), {"type": "number"}], "items": False, "minItems": 2}
    likeliest = listed(
        listed(pair),
        "For each generated token its candidates: the token, and its logit's distance to the best.",
    )
    row = schema_of(Continuation, likeliest=likeliest)
    row["required"].remove("likeliest")
    return record(
        {
            "sampling": by_name(anything(), "Options by which the next token was chosen."),
            "rows": listed(row, "The prompts and what was generated after them."),
        },
        "Generated tokens.",
    )


def run_facts() -> Schema:
    """Return the schema of the keys that a run of a port adds to its capture."""
    return record(
        {
            "graphs": maybe(graphs(), "Graphs that the run compiled; null for a saved run."),
            "capture_effects": listed(
                schema_of(CaptureEffect), "Effect of recording on each layer's output."
            ),
            "generation": generation(),
        },
        optional=("capture_effects", "generation"),
    )


def certificate() -> Schema:
    """Return the schema of `mm2-gpu certify`."""
    return record(
        {"directory": text("Folder or address of the golden."), "certificate": _certificate()},
        "The checks of a golden.",
    )


def dump() -> Schema:
    """Return the schema of another tool's dump."""
    tensor = schema_of(
        ListedTensor, without=("steps",), passes=listed(text(), "Labels of the passes that hold it.")
    )
    layer = {"layer": whole(), "sites": listed(text())}
    return record(
        {
            "directory": text("Folder of the dump."),
            "format": text("Name of its layout."),
            "passes": listed(text(), "Labels of its forward passes."),
            "passes_read": listed(
                listed(text()), "Passes that are read; those of one list follow each other."
            ),
            "ranks": whole("Ranks that the port was divided among."),
            "notes": listed(text()),
            "tensors": listed(tensor, "Its tensors, and the sites that they map to."),
            "sites": listed(record(layer), "Sites by layer."),
            "model_sites": listed(text(), "Sites outside the layers."),
        },
        "The tensors of another tool's dump.",
    )


def export() -> Schema:
    """Return the schema of `mm2-gpu export`."""
    return record(
        {
            "directory": text("Folder that was written."),
            "format": text("The tool whose files they are."),
            "prompts": listed(listed(text()), "The passes of each prompt."),
            "layers": listed(whole(), "Layers that were written."),
            "modules": listed(text(), "Modules that were written, in each pass."),
            "cached_layers": listed(whole(), "Layers whose keys and values were written."),
        },
        "Two goldens, written as the reference captures of another tool.",
    )


def check() -> Schema:
    """Return the schema of `mm2-test check`."""
    level = choice(*(level.value for level in Level), description="Importance.")
    finding = schema_of(MachineFinding, level=level)
    return record({"worst": level, "findings": listed(finding)}, "This machine, and whether a layer fits.")


def trace() -> Schema:
    """Return the schema of `mm2-test trace`."""
    traced = schema_of(TracedProgram)["properties"]
    return record(
        {
            "file": text("File that was written."),
            "size_bytes": whole("Size of the file in bytes."),
            "format": whole("Version of the file's format."),
            **traced,
            "effect_of_sites": maybe(
                number(), "Largest change of the output by returning sites; null if not asked."
            ),
        },
        "A layer of a port, compiled into a file.",
    )


def _certificate() -> Schema:
    schema = schema_of(Certificate, without=("content_digest",), checks=listed(_check()))
    passed = flag("Whether no check failed; some may not have been made.")
    properties = {"passed": passed, **schema["properties"], "content": text("Digest of what was checked.")}
    return record(properties, "The checks of a golden.")


def _check() -> Schema:
    schema = schema_of(Check, without=("worst",))
    figure = maybe(number(), "The worst value measured; null if the check measures nothing.")
    return record({**schema["properties"], "figure": figure}, "A check of a golden.")


def _description() -> Schema:
    run = record(
        {
            "name": text("Name of the run."),
            "start_layer": whole("First layer."),
            "stop_layer": whole("The layer after the last."),
            "mode": choice(*(mode.value for mode in Mode), description="Source of each layer's input."),
            "first_site": text(),
            "last_site": text(),
            "sites": listed(text(), "Sites of each layer that are kept."),
            "model_sites": listed(text(), "Sites outside the layers that are kept."),
            "component": maybe(
                choice(*(part.value for part in Component)), "The only part of a layer that ran."
            ),
            "decode_rows": whole("Tokens at each prompt's end that were decoded."),
            "decodes_by_row": flag("Whether each prompt decoded its own last tokens."),
        },
        "The plan of the run.",
        optional=("decodes_by_row",),
    )
    kept = by_name(anything())
    provenance = schema_of(Provenance, options=kept, model_config=kept, port_config=kept)
    provenance["required"] = [name for name in provenance["required"] if name not in CONFIGS]
    schema = schema_of(Description, run=run, provenance=provenance)
    for name in ("floor_variants", "is_quick", "expert_tokens", "last_tokens", "calls"):
        schema["required"].remove(name)
    return schema
