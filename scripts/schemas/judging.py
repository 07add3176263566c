"""Schemas of the commands that judge a port: mm2-compare, mm2-diagnose and most of mm2-test."""

from __future__ import annotations

from compare.diagnosis.finding import MistakeFinding, PassedOver
from compare.diagnosis.proof.proof import MistakeProof
from minimax_tools.results.prompt_results import PhaseShare, PromptResult
from minimax_tools.results.results import (
    Blame,
    BlameGroup,
    ChunkedRun,
    Comparison,
    Curve,
    GeneratedRow,
    LogitsResult,
    ModelFinding,
    PassLogits,
    RouterDtype,
    RoutingResult,
    SiteResult,
    Untested,
    Verdict,
    WeightsResult,
)
from schemas.parts import (
    Schema,
    anything,
    by_name,
    choice,
    flag,
    listed,
    maybe,
    merged,
    number,
    record,
    text,
    whole,
)
from schemas.values import field_comments, schema_of

VERDICT = choice(
    *(verdict.value for verdict in Verdict),
    description="Conclusion. pass: proved right at every compared site. warn: right, with something to look at. "
    "fail: the port differs. incomparable: no conclusion; it is never a pass.",
)
COUNTS = {
    "compared": whole("Sites that were judged, counted in each layer."),
    "of": whole("Sites that the run declares, counted in each layer, judged or not."),
}
_BLAME = listed(schema_of(Blame), "Sites to blame, earliest layer first; empty if none fails.")


def site_result() -> Schema:
    """Return the schema of one site's result."""
    unexplained = whole("Flips or disagreements that noise does not explain.")
    return schema_of(
        SiteResult,
        routing=maybe(schema_of(RoutingResult, num_unexplained=unexplained)),
        logits=maybe(schema_of(LogitsResult, num_unexplained=unexplained)),
    )


def conclusion() -> Schema:
    """Return the schema of a comparison without its sites."""
    told = field_comments(Comparison)
    return record(
        {
            "verdict": VERDICT,
            **COUNTS,
            "tokens": text(told["tokens"]),
            "blame": _BLAME,
            "blame_groups": listed(schema_of(BlameGroup), told["blame_groups"]),
            "curve": maybe(schema_of(Curve), told["curve"]),
            "criteria": text(told["criteria"]),
            "reference": text(told["reference"]),
            "target": text(told["target"]),
            "port": text(told["port"]),
            "notes": listed(text(), told["notes"]),
            "untested": listed(schema_of(Untested), told["untested"]),
            "router_dtypes": listed(schema_of(RouterDtype), told["router_dtypes"]),
            "weights": listed(schema_of(WeightsResult), told["weights"]),
            "generated": listed(schema_of(GeneratedRow), told["generated"]),
            "passes": listed(schema_of(PassLogits), told["pass_logits"]),
            "findings": listed(schema_of(ModelFinding), told["findings"]),
            "chunks": schema_of(ChunkedRun),
        },
        "A comparison of a port's run with a golden.",
        optional=("passes", "findings", "chunks"),
    )


def comparison() -> Schema:
    """Return the schema of a whole comparison."""
    sites = listed(
        site_result(), "Every site of every compared layer, layers ascending, then those outside them."
    )
    return merged("A comparison of a port's run with a golden.", conclusion(), record({"sites": sites}))


def mistake() -> Schema:
    """Return the schema of a named or near mistake, with its proof where one was asked for."""
    schema = schema_of(MistakeFinding, parameters=by_name(anything()))
    schema["properties"]["is_hint"] = flag("Whether it is only near, and explains nothing.")
    schema["required"].append("is_hint")
    schema["properties"]["proof"] = proof()
    schema["required"].remove("proof")
    return schema


def proof() -> Schema:
    """Return the schema of what came of undoing a mistake."""
    return schema_of(MistakeProof)


def diagnosis() -> Schema:
    """Return the schema of a diagnosis."""
    part = {
        "unexplained": number("ρ of the port against float32 without a mistake, at the worst judged site."),
        "is_explained": flag("Whether a mistake is named."),
        "is_right": flag("Whether there is nothing to explain."),
        "nearest": listed(
            mistake(), "The nearest mistakes where none is named. They are hints, never causes."
        ),
        "num_hypotheses": whole("Number of hypotheses that were tried."),
        "notes": listed(text(), "What was not tried or not judged, and where the error lies."),
    }
    blame = schema_of(Blame)
    blame["properties"]["formulas"] = by_name(
        text(), "What the original computes at these sites, if they are few."
    )
    blame["required"].append("formulas")
    layer = {"layer": whole("The layer."), "sites": listed(text(), "Sites that judged it."), **part}
    return record(
        {
            "verdict": VERDICT,
            "diagnosis": listed(
                mistake(), "Named mistakes in the model's order; empty if none explains the errors."
            ),
            "layers": listed(record(layer), "The layers that were diagnosed, ascending."),
            "sites": listed(record({"site": text("The site."), **part}), "The same outside the layers."),
            "passed_over": listed(
                schema_of(PassedOver), "Layers that are like others, which nothing explains."
            ),
            "weights": listed(schema_of(Blame), "Wrong weights, where no mistake is searched."),
            "unexplained_blame": listed(blame, "Blame that no named mistake explains."),
            "reference": text("Folder or address of the golden."),
            "target": text("Folder or address of the run."),
            "is_failed": flag("Whether the comparison of the chosen layers fails."),
            "notes": listed(text(), "What was not diagnosed, and what the proofs rest on."),
            "untested": listed(schema_of(Untested), "What the comparison has not looked at."),
        },
        "The known mistakes that explain a port's errors.",
    )


def catalogue() -> Schema:
    """Return the schema of the list of all known mistakes."""
    entry = {
        "mistake": text("Name of the mistake."),
        "what": text("What the port does."),
        "look_at": text("Place to look at in the port's code."),
        "sources": listed(text(), "Public threads that report it."),
    }
    return record({"mistakes": listed(record(entry))}, "The catalogue of known mistakes.")


def undone() -> Schema:
    """Return the schema of `mm2-test single-layer --undo`."""
    return record(
        {
            "layer": whole("The layer."),
            "undone": listed(text(), "The mistakes that were undone, as --undo takes them."),
            "proof": proof(),
        },
        "What became of one layer when mistakes were undone in it.",
    )


def bisection() -> Schema:
    """Return the schema of `mm2-test bisect`."""
    span = {"start_layer": whole("First layer."), "end_layer": whole("Last layer, included.")}
    state = choice("pass", "fail")
    chain = {
        **span,
        "verdict": state,
        "error_of_limit": number("Error at its end in units of its limit; above 1 it is wrong."),
        "smallest_visible": number("Least noise on every token that would be seen at its end, as a share."),
        "reason": text("Why it is wrong; empty if it is right."),
    }
    probe = {**span, "verdict": state, "chains": listed(record(chain))}
    visible = {name: maybe(number()) for name in ("in_chains", "alone", "in_a_sweep")}
    return record(
        {
            "verdict": VERDICT,
            "headline": text("The result in a sentence."),
            "compared": whole("Layers whose own output was judged."),
            "of": whole("Layers of the search."),
            "blame": listed(schema_of(Blame), "Layers that are wrong alone."),
            "drifts": listed(record({**span, "reason": text()}), "Layers that are wrong only in a chain."),
            "reference": text("Folder or address of the golden."),
            "target": text("The port."),
            "longest_chain": whole("Layers in the longest chain."),
            "runs": whole("Number of runs."),
            "runs_resumed": whole("Runs that an earlier bisection had made."),
            "probes": listed(record(probe), "The runs, in order."),
            "smallest_visible": record(visible, "Least noise that would be seen, as a share of the output."),
            "notes": listed(text(), "What the runs could not have seen."),
            "graphs": graphs(),
            "directory": text("Folder or address of the bisection."),
        },
        "The search for a port's wrong layers.",
    )


def stream_search() -> Schema:
    """Return the schema of a search by replacing the stream of a port compiled whole."""
    point = maybe(
        whole(),
        "Layer whose input is the golden's; the number of layers for the final norm's; null for none.",
    )
    run = {
        "point": point,
        "verdict": choice("pass", "fail"),
        "error_of_limit": number("Error of the logits in units of the limit; above 1 they are wrong."),
        "reason": text("Why they are wrong; empty if they are right."),
    }
    blame = {
        "layer": maybe(whole(), "The last wrong layer; null outside the layers."),
        "sites": listed(text()),
        "part": text("The part of the model in words."),
        "reason": text(),
    }
    return record(
        {
            "verdict": VERDICT,
            "headline": text("The result in a sentence."),
            "compared": whole("Parts of the model that were judged."),
            "of": whole("Parts of the model: its layers, and what lies before and behind them."),
            "blame": listed(record(blame), "The last wrong part; empty if none is."),
            "reference": text("Folder or address of the golden."),
            "target": text("The port; empty if it is run by hand."),
            "runs": listed(record(run), "The runs, in order."),
            "is_finished": flag("Whether no run is missing."),
            "waits_for": maybe(record({"point": point}), "The run that is needed next."),
            "notes": listed(text(), "What the runs could not have seen."),
            "directory": text("Folder of the search, or the address that its records go to."),
            "lines": listed(text(), "Lines to paste for the next run, of mm2-test replacement alone."),
        },
        "The search for the last wrong layer of a port compiled whole.",
        optional=("lines",),
    )


def port() -> Schema:
    """Return the schema of a port judged in stages."""
    stage = {
        "stage": choice("golden", "weights", "sweep", "diagnosis", "chain"),
        "command": text("Its command, complete."),
        "exit_code": whole("Exit code of the command."),
        "output": maybe(anything(), "What the command printed, by its own schema; null if that is no JSON."),
    }
    return record(
        {
            "verdict": choice("pass", "fail", "incomparable"),
            "directory": text("Folder of the golden, the runs and the log of finished stages."),
            "untested": listed(schema_of(Untested), "What no stage has looked at."),
            "wrong_weights": maybe(text(), "What is wrong with the weights, if it explains all; else null."),
            "stages": listed(
                record(stage), "The stages, in order; the last may be one that could not be carried out."
            ),
        },
        "A port judged in stages: golden, weights, sweep, then its mistake named, or all layers in a chain.",
    )


def graphs() -> Schema:
    """Return the schema of the graphs that a run compiled."""
    graph_break = {"reason": text("Reason."), "place": maybe(text(), "File and line; null if not known.")}
    return record(
        {
            "first_layer": whole("Graphs compiled for the first layer that ran."),
            "later_layers": whole("Graphs compiled after it; 0 if all layers share their graphs."),
            "fallbacks": listed(text(), "Operations that ran on the CPU instead of the device."),
            "compiler": maybe(text(), "Backend of torch.compile; null without one."),
            "graph_breaks": listed(record(graph_break), "Places whose code runs outside of any graph."),
            "recompiles": listed(text(), "Conditions for which a graph was made anew."),
        },
        "Graphs that the run compiled.",
    )


def prompts() -> Schema:
    """Return the schema of `mm2-test prompts` with a port."""
    prompt = schema_of(
        PromptResult,
        is_beyond=flag("Whether the prompt differs beyond noise."),
        excess=number("The largest error in units of noise."),
        begins=text("Pass and token at which it begins to differ; empty if it does not."),
        first_token=maybe(whole(), "First token that differs beyond noise by itself."),
        first_step=maybe(whole(), "The pass that computes it: 0 is the prefill."),
    )
    followed = {
        "commands": listed(text(), "The commands that lead from the worst prompt to the layer."),
        "exit_code": maybe(whole(), "Exit code of the last; null if none ran."),
        "report": maybe(by_name(anything()), "What it printed: model.schema.json."),
    }
    return record(
        {
            "verdict": VERDICT,
            "compared": whole("Next-token distributions that were compared."),
            "of": whole("As compared."),
            "blame": _BLAME,
            "target": text("The port."),
            "golden_logits": text("Folder of the golden logits."),
            "num_known": whole("Rows whose golden logits were kept from earlier runs."),
            "num_prompts": whole(),
            "num_differing": whole("Prompts that differ beyond noise."),
            "together": listed(
                schema_of(PhaseShare, is_beyond=flag("Whether noise does not explain the share.")),
                "Each phase over all prompts.",
            ),
            "worst_is_right_alone": flag("Whether the worst prompt is right in a batch of its own."),
            "notes": listed(text(), "What a reader must know beside the verdict."),
            "untested": listed(schema_of(Untested), "What was not looked at, whatever the verdict."),
            "prompts": listed(prompt, "All prompts, worst first."),
            "followed": maybe(record(followed), "What came of following the worst prompt."),
        },
        "Prompts ranked by how far a port's next tokens are from the golden's.",
    )


def golden_logits() -> Schema:
    """Return the schema of `mm2-test prompts` without a port."""
    return record(
        {
            "golden_logits": text("Folder of the golden logits."),
            "num_prompts": whole(),
            "num_known": whole("Rows whose golden logits were kept from earlier runs."),
        },
        "Golden logits that were made, or were there.",
    )


def suspect() -> Schema:
    """Return the schema of the keys that a whole port's run adds to capture and comparison."""
    return record(
        {
            "isolated": maybe(
                comparison(), "The suspect layer alone, on the golden's input; null if none ran."
            ),
            "diagnosis": listed(mistake(), "The named mistakes; empty if none explains the errors."),
            "diagnosed": maybe(
                diagnosis(), "The whole diagnosis of the suspect layer; null if there is none."
            ),
        }
    )
