"""Outputs: the schema of every JSON output, by the name of its file in docs/schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from minimax_tools.printable import SCHEMA_VERSION
from schemas import captures, judging, splitting, summary, travel, weights
from schemas.parts import DRAFT, Schema, listed, merged, record, text, whole

_VERSION = record(
    {"schema_version": {"const": SCHEMA_VERSION, "description": "Version of all JSON outputs."}}
)
_NEXT = record(
    {
        "next": listed(
            text(), "Complete commands to run next, best first; empty if nothing remains to be done."
        )
    }
)
_FAILED: dict[str, Schema] = {
    "verdict": {"const": "incomparable"},
    "compared": {"const": 0},
    "of": {"const": 0},
    "blame": {"const": []},
}


def _error() -> Schema:
    error = {
        "error": text("What and where, expected and found, and the next step in words."),
        "exit_code": whole("2: wrong usage. 3: it could not run, or the captures must not be compared."),
    }
    could_not_run = record(_FAILED, "Present with exit code 3.")
    return merged("An error that ended a command.", record(error), optional=(could_not_run,))


def _golden() -> Schema:
    told = "A golden that was made or shown. Keys of an unsaved one are mostly null."
    return merged(told, captures.capture(), optional=(record({"generation": captures.generation()}),))


def _run() -> Schema:
    told = "A run of a port; with --golden its comparison too: then verdict, blame and sites are there."
    return merged(told, captures.capture(), captures.run_facts(), optional=(judging.comparison(),))


def _model() -> Schema:
    told = "A whole port's run, judged, and the suspect layer diagnosed."
    return merged(told, captures.capture(), judging.comparison(), judging.suspect())


_OUTPUTS: Mapping[str, Callable[[], Schema]] = MappingProxyType(
    {
        "bisection": judging.bisection,
        "cache": travel.cache,
        "capture": captures.capture,
        "catalogue": judging.catalogue,
        "certificate": captures.certificate,
        "check": captures.check,
        "comparison": judging.comparison,
        "comparison-summary": summary.comparison_summary,
        "diagnosis": judging.diagnosis,
        "dump": captures.dump,
        "error": _error,
        "export": captures.export,
        "extract": splitting.extract,
        "fetch": splitting.fetch,
        "golden": _golden,
        "golden-logits": judging.golden_logits,
        "memory": travel.memory,
        "model": _model,
        "plan": splitting.plan,
        "port": judging.port,
        "prompts": judging.prompts,
        "proof": judging.undone,
        "publication": travel.publication,
        "readiness": travel.readiness,
        "run": _run,
        "stream-search": judging.stream_search,
        "synthesize": splitting.synthesize,
        "trace": captures.trace,
        "verify": splitting.verify,
        "weights": weights.weights,
        "weights-of-layers": weights.weights_of_layers,
    }
)


def build_schemas() -> dict[str, Schema]:
    """Return the schema of every JSON output by name, each complete with its version and the next commands."""
    return {name: _complete(name, build()) for name, build in _OUTPUTS.items()}


def _complete(name: str, output: Schema) -> Schema:
    optional = tuple(key for key in output["properties"] if key not in output["required"])
    properties = {**_VERSION["properties"], **output["properties"], **_NEXT["properties"]}
    return {"$schema": DRAFT, "title": name, **record(properties, output["description"], optional=optional)}
