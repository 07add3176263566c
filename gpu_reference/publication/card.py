"""Card: README.md of a published golden, in the form of a dataset's card."""

from __future__ import annotations

import shlex

import yaml

from minimax_tools.capture.reader import Capture
from minimax_tools.machine.size import format_size
from minimax_tools.model.inputs import Inputs

CARD_NAME = "README.md"


def write_card(golden: Capture, *, address: str, size_bytes: int) -> str:
    """Return the card: what made the golden, what it holds, how far it was checked, and the commands that use it."""
    description = golden.description
    made, run = description.provenance, description.run
    header = yaml.safe_dump(
        {"pretty_name": f"mm2 golden of {made.model_source}", "tags": ["mm2", "minimax-m2", "golden"]},
        sort_keys=False,
        allow_unicode=True,
    )
    rows = [
        ("model", made.model_source),
        ("config", f"sha256 {made.model.spec_digest}"),
        ("run", f"{run.name}, {run}"),
        ("sites", ", ".join(map(str, (*run.sites, *run.model_sites)))),
        ("tokens", _word_tokens(golden.read_inputs(), description.inputs_digest)),
        ("dtypes", ", ".join(f"{name} {dtype}" for name, dtype in made.dtypes.items())),
        ("noise floor", _word_floor(description.noise_floor, description.floor_variants)),
        ("device", f"{made.backend}: {made.device}"),
        ("options", ", ".join(f"{name} {value}" for name, value in made.options.items() if name != "proved")),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("environment", ", ".join(f"{name}={value}" for name, value in made.environment.items()) or "none"),
        ("size", format_size(size_bytes)),
    ]
    target = "my_port.py:DecoderLayer"
    sweep = shlex.join(
        ("mm2-test", "sweep", "--model", made.model_source, "--golden", address, "--target", target)
    )
    return "\n".join(
        [
            f"---\n{header}---",
            f"# Golden of {made.model_source}",
            "",
            "Activations of every layer, computed by transformers' own model, with the noise of BF16 measured beside",
            "them. mm2 finds with it where a port of the model goes wrong.",
            "",
            "```bash",
            f"mm2-gpu show {shlex.quote(address)}",
            sweep,
            "```",
            "",
            "## Made by",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_escape(value)} |" for name, value in rows),
            "",
            "## Certificate",
            "",
            *_word_certificate(golden),
            "",
        ]
    )


def _word_certificate(golden: Capture) -> list[str]:
    certificate = golden.certificate
    if certificate is None:
        return ["None: this golden was published without a check. Do not rely on it."]
    return [
        f"{certificate}.",
        "",
        "| check | result | found |",
        "|---|---|---|",
        *(f"| {check.name} | {check.outcome} | {_escape(check.found)} |" for check in certificate.checks),
    ]


def _word_tokens(inputs: Inputs, digest: str) -> str:
    lengths = ", ".join(map(str, inputs.attention_mask.sum(dim=1).tolist()))
    return f"{inputs.source}: {inputs.batch_size} rows of {lengths} tokens, sha256 {digest}"


def _word_floor(floor: str, variants: tuple[str, ...]) -> str:
    return f"{floor}, {len(variants)} variants ({', '.join(variants)})" if variants else floor


def _escape(text: str) -> str:
    """Return a text that stays in its cell of a table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
