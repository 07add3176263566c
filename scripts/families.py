"""Table of what mm2 does for each family, docs/families.md: every command runs on the toys of all families.

python scripts/families.py                              # all families and commands: minutes
python scripts/families.py --family olmoe --only sweep  # prints one cell, and writes nothing

A cell is "yes" if the commands end as they must with right ports (transformers' own modules, mm2's two layers), and
with a port whose gate and up are swapped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch
from click.testing import CliRunner

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.cli import mm2_split
from minimax_tools.errors import Mm2Error
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import Family
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.split.factory import ModelFactory
from neuron.cli import main as mm2_test

_REPOSITORY = Path(__file__).parents[1]
PAGE = _REPOSITORY / "docs" / "families.md"
_EXAMPLES = Path(__file__).parent / "examples"
_RIGHT = f"{_EXAMPLES / 'transformers_port.py'}:Same"
_SWAPPED, _LATE, _MODEL = (
    f"{_EXAMPLES / 'family_ports.py'}:{name}" for name in ("SwappedLayer", "LateSwappedLayer", "Model")
)
_WITH_EXPERTS = 1  # a layer that has experts in all toys
_FIRST_LATE = 2  # first wrong layer of the port that is swapped late
_MISTAKE = "gate_up_swapped"
_LENGTHS = "48,33"
_FAILS = 1  # exit code of a port that differs
_LONGEST_REASON = 100
# A line of a page has 120 characters.
_COLUMNS_SIDE_BY_SIDE = 11
_END = re.compile(r"^([^,\n]+), (\w+): (?:yes|no: (.*))$", re.MULTILINE)
_ERROR = re.compile(r"^Error: (.+)", re.MULTILINE)


class FailedError(Exception):
    """A command that did not end as it must; the text says how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A family's toy, and what is made of it; everything lies in a folder."""

    family: Family
    folder: Path

    @property
    def model(self) -> Path:
        """Folder of the toy."""
        return self.folder / "toy"

    @property
    def golden(self) -> Path:
        """Golden of the toy: all layers, certified."""
        return self.folder / "golden"

    def run(self, main: click.Command, *words: object, code: int = 0) -> str:
        """Run a command, and return what it prints on stdout; FailedError if it ends with another exit code."""
        result = CliRunner().invoke(main, [*map(str, words), "--quiet"])
        if result.exit_code != code:
            raise FailedError(self._word_end(result.stdout, result.stderr, result.exit_code, code))
        return result.stdout

    def read(self, main: click.Command, *words: object, code: int = 0) -> dict[str, Any]:
        """Run a command with --json, and return what it prints."""
        record: dict[str, Any] = json.loads(self.run(main, *words, "--json", code=code))
        return record

    def port(self) -> tuple[object, ...]:
        """Return the options of a port's run on the CPU: model and golden."""
        return ("--model", self.model, "--golden", self.golden, "--backend", "cpu")

    def _word_end(self, printed: str, logged: str, code: int, expected: int) -> str:
        errors = _ERROR.findall(logged) or _ERROR.findall(printed)
        lines = [line for line in printed.splitlines() if line.startswith(("FAIL", "WARN", "PASS"))]
        said = errors[0] if errors else next(iter(lines), f"ends with {code} instead of {expected}")
        said = said.replace(f"{self.folder}/", "").replace(f"{_REPOSITORY}/", "")
        return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}…"


def make_golden(trial: Trial) -> None:
    """Capture all layers of the loaded model."""
    words = ("--model", trial.model, "--seq-len", _LENGTHS, "--stream", "off")
    trial.run(mm2_gpu, "extract-all", *words, "--output-dir", trial.golden, "--overwrite")


def stream_golden(trial: Trial) -> None:
    """Capture all layers, one in memory at a time: the same bytes."""
    words = ("--model", trial.model, "--seq-len", _LENGTHS, "--stream", "on")
    streamed = trial.folder / "streamed"
    trial.run(mm2_gpu, "extract-all", *words, "--output-dir", streamed, "--overwrite")
    _require_same_tensors(trial.golden, streamed)


def run_pipeline(trial: Trial) -> None:
    """Capture all layers by two ranks, each with a slice, and read no other tensor: the same bytes."""
    _make_plan(trial)
    made = trial.folder / "by_ranks"
    words = ("--plan", trial.folder / "plan.json", "--model", trial.model, "--seq-len", _LENGTHS)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = ("-m", "gpu_reference", "extract-all", *words, "--output-dir", made, "--quiet")
    done = subprocess.run(
        [*launcher, *map(str, command)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise FailedError(trial._word_end(done.stdout, done.stderr, done.returncode, 0))
    _require_same_tensors(trial.golden, made)
    trial.run(mm2_split, "verify", "--plan", trial.folder / "plan.json", "--records", made)


def generate(trial: Trial) -> None:
    """Capture all layers, and generate."""
    words = ("--model", trial.model, "--seq-len", "12", "--max-new-tokens", 4)
    trial.run(mm2_gpu, "full", *words, "--output-dir", trial.folder / "full", "--overwrite")


def certify(trial: Trial) -> None:
    """Certify the golden: no check fails."""
    trial.run(mm2_gpu, "certify", "--model", trial.model, "--golden", trial.golden)


def export(trial: Trial) -> None:
    """Write the golden and one in float32 as captures of vLLM Neuron."""
    exact = trial.folder / "float32"
    words = ("--model", trial.model, "--seq-len", _LENGTHS, "--dtype", "float32", "--certify", "--overwrite")
    trial.run(mm2_gpu, "extract-all", *words, "--output-dir", exact)
    goldens = ("--golden", trial.golden, "--float32-golden", exact)
    output = Path(tempfile.mkdtemp(dir=trial.folder)) / "export"
    trial.run(mm2_gpu, "export", "--format", "vllm-neuron", *goldens, "--output-dir", output)


def check(trial: Trial) -> None:
    """Check this machine for the toy and for the true size."""
    for main in (mm2_gpu, mm2_test):
        for words in (("--model", trial.model), ("--preset", trial.family.preset)):
            record = trial.read(main, "check", *words)
            subjects = {finding["subject"] for finding in record["findings"]}
            if "router" in subjects:
                raise FailedError("check warns of the toy's router")


def measure_memory(trial: Trial) -> None:
    """Print what the checkpoint takes."""
    trial.run(mm2_split, "memory", "--model", trial.model)


def slice_model(trial: Trial) -> None:
    """Plan two nodes, cut their slices, and prove them."""
    _make_plan(trial)
    plan, slices = trial.folder / "plan.json", Path(tempfile.mkdtemp(dir=trial.folder)) / "slices"
    trial.run(mm2_split, "extract", "--plan", plan, "--all-nodes", "--output", slices)
    trial.run(mm2_split, "verify", "--plan", plan, "--slices", slices)


def split_model(trial: Trial) -> None:
    """Run the model in three parts: logits are the golden's on each real token."""
    parts = ModelFactory.create_split_models(trial.family.model_type, str(trial.model), 1, 3)
    capture = Capture.open(trial.golden)
    inputs = capture.read_inputs()
    states = inputs.input_ids
    with torch.no_grad():
        for part in parts:
            states = part(states, inputs.attention_mask)
    real = inputs.attention_mask.bool()
    if not torch.equal(states[real], capture.read(None, ModelSite.LOGITS)[real]):
        raise FailedError("the parts' logits are not the golden's")


def _sweep(trial: Trial, target: str) -> None:
    directory = trial.folder / f"sweep_{target.rpartition(':')[2]}"
    words = ("--target", target, "--output-dir", directory, "--overwrite")
    code = _FAILS if target == _SWAPPED else 0
    record = trial.read(mm2_test, "sweep", *trial.port(), *words, code=code)
    if target == _SWAPPED:
        _require_blame(trial, record)


def sweep(trial: Trial) -> None:
    """Run each layer of transformers' as a port, right and swapped."""
    _sweep(trial, _RIGHT)
    _sweep(trial, _SWAPPED)


def sweep_reference(trial: Trial) -> None:
    """Run each layer of mm2's reference."""
    _sweep(trial, "reference")


def sweep_builtin(trial: Trial) -> None:
    """Run each layer of mm2's own for devices."""
    _sweep(trial, "builtin")


def compare(trial: Trial) -> None:
    """Judge the sweeps of the right and the swapped port."""
    for name, code in (("Same", 0), ("SwappedLayer", _FAILS)):
        sides = ("--golden", trial.golden, "--run", trial.folder / f"sweep_{name}", "--model", trial.model)
        record = trial.read(mm2_compare, *sides, code=code)
        if code:
            _require_blame(trial, record)


def diagnose(trial: Trial) -> None:
    """Name the swapped port's mistake, and prove it."""
    sides = ("--golden", trial.golden, "--run", trial.folder / "sweep_SwappedLayer", "--model", trial.model)
    record = trial.read(mm2_diagnose, *sides, "--target", _SWAPPED, "--prove", code=_FAILS)
    proofs = {finding["mistake"]: (finding["proof"] or {}).get("outcome") for finding in record["diagnosis"]}
    named = proofs.keys()
    if _MISTAKE not in named:
        raise FailedError(f"names {', '.join(sorted(map(str, named))) or 'nothing'} instead of {_MISTAKE}")
    if proofs[_MISTAKE] != "proved":
        raise FailedError(f"{_MISTAKE} is {proofs[_MISTAKE]}")


def judge_port(trial: Trial) -> None:
    """Judge the right and the swapped port in stages."""
    for target, code in ((_RIGHT, 0), (_SWAPPED, _FAILS)):
        output = trial.folder / f"port_{target.rpartition(':')[2]}"
        words = ("--target", target, "--output-dir", output)
        trial.run(mm2_test, "port", *trial.port(), *words, code=code)


def judge_chain(trial: Trial) -> None:
    """Run the right port from the tokens to the logits."""
    words = ("--target", _RIGHT, "--output-dir", trial.folder / "chain", "--overwrite")
    trial.run(mm2_test, "full", *trial.port(), *words)


def run_components(trial: Trial) -> None:
    """Run each component of a layer of mm2's reference."""
    for component in ("attention", "router", "experts", "moe", "input_norm", "post_norm"):
        words = ("--layer", 1, "--component", component, "--target", "reference", "--overwrite")
        trial.run(mm2_test, "component", *trial.port(), *words, "--output-dir", trial.folder / component)


def judge_model(trial: Trial) -> None:
    """Judge transformers' whole model as a port: prefill, decoding, chunks, generation."""
    words = ("--target", _MODEL, "--output-dir", trial.folder / "model", "--overwrite")
    trial.run(mm2_test, "model", *trial.port(), *words, "--decode", 4)


def judge_prompts(trial: Trial) -> None:
    """Rank the prompts of transformers' whole model."""
    words = ("--target", _MODEL, "--output-dir", trial.folder / "prompts", "--decode", 4)
    logits = ("--golden-logits", trial.folder / "golden_logits")
    trial.run(mm2_test, "prompts", *trial.port(), *words, *logits)


def trace_weights(trial: Trial) -> None:
    """Trace the weights of the right and the swapped port."""
    for target, code in ((_RIGHT, 0), (_SWAPPED, _FAILS)):
        words = ("--model", trial.model, "--target", target, "--layer", _WITH_EXPERTS)
        trial.run(mm2_test, "weights", *words, code=code)


def bisect(trial: Trial) -> None:
    """Find the first wrong layer of a port that is swapped from layer 2 on."""
    words = ("--target", _LATE, "--output-dir", trial.folder / "bisect")
    record = trial.read(mm2_test, "bisect", *trial.port(), *words, code=_FAILS)
    blamed = [entry["layer"] for entry in record["blame"]]
    if blamed != [_FIRST_LATE]:
        raise FailedError(f"blames layers {blamed} instead of {_FIRST_LATE}")


# Commands by the column's title. Later ones use the golden and the sweeps that earlier ones left.
COLUMNS: Mapping[str, Callable[[Trial], None]] = MappingProxyType(
    {
        "golden": make_golden,
        "streamed": stream_golden,
        "ranks": run_pipeline,
        "generate": generate,
        "certify": certify,
        "export": export,
        "check": check,
        "memory": measure_memory,
        "slices": slice_model,
        "split": split_model,
        "reference": sweep_reference,
        "builtin": sweep_builtin,
        "sweep": sweep,
        "component": run_components,
        "full": judge_chain,
        "compare": compare,
        "diagnose": diagnose,
        "weights": trace_weights,
        "bisect": bisect,
        "port": judge_port,
        "model": judge_model,
        "prompts": judge_prompts,
    }
)


def _make_plan(trial: Trial) -> None:
    nodes = ("--node", "a:memory=1GB,layers=0:2", "--node", "b:memory=1GB,layers=2:4")
    words = ("--model", trial.model, "--planner", "manual", *nodes)
    trial.run(mm2_split, "plan", *words, "--output", trial.folder / "plan.json")


def _require_same_tensors(first: Path, second: Path) -> None:
    names = sorted({path.name for folder in (first, second) for path in folder.glob("*.safetensors")})
    for name in names:
        one, other = first / name, second / name
        if not (one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()):
            raise FailedError(f"{name} has other bytes")


def _require_blame(trial: Trial, record: Mapping[str, Any]) -> None:
    expected = str(ModelSpec.from_folder(trial.model).graph.layer(_WITH_EXPERTS).routed_sum)
    for entry in record["blame"]:
        if entry["sites"] != [expected]:
            raise FailedError(
                f"blames {', '.join(entry['sites'])} of layer {entry['layer']} instead of {expected}"
            )


@dataclass(slots=True, kw_only=True)
class Table:
    """End of each column for each family."""

    columns: Sequence[str]
    # None for a yes, else the reason, by the family's title and the column.
    reasons: dict[tuple[str, str], str | None] = field(default_factory=dict)

    def read(self, printed: str) -> None:
        """Add the ends that an earlier run printed."""
        for title, column, reason in _END.findall(printed):
            self.reasons[title, column] = reason or None

    def print(self, title: str, column: str) -> None:
        """Print how a column ended for a family."""
        reason = self.reasons[title, column]
        click.echo(f"{title}, {column}: {'yes' if reason is None else f'no: {reason}'}")

    def _cell(self, title: str, column: str, notes: Sequence[str]) -> str:
        if (title, column) not in self.reasons:
            return "not run"
        reason = self.reasons[title, column]
        return "yes" if reason is None else f"no ({notes.index(reason) + 1})"

    def as_page(self) -> str:
        """Return the page in Markdown."""
        titles = list(dict.fromkeys(title for title, _ in self.reasons))
        notes = list(dict.fromkeys(reason for reason in self.reasons.values() if reason is not None))
        rows: list[str] = []
        for start in range(0, len(self.columns), _COLUMNS_SIDE_BY_SIDE):
            columns = self.columns[start : start + _COLUMNS_SIDE_BY_SIDE]
            rows += ["", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
            for title in titles:
                cells = (self._cell(title, column, notes) for column in columns)
                rows.append(f"| {title} | " + " | ".join(cells) + " |")
        reasons = [f"{number}. {_as_text(note)}" for number, note in enumerate(notes, start=1)]
        meanings = [f"| {name} | {(COLUMNS[name].__doc__ or '').strip()} |" for name in self.columns]
        graphs = [
            f"| {family.title} | {family.originals} | `{family.toy_preset}`, `{family.preset}` |"
            for family in FAMILIES.values()
            if family.title in titles
        ]
        return "\n".join(
            (
                "# Families of models",
                "",
                "mm2 knows these families, and copies of their models. `mm2-split synthesize` makes toys.",
                "[How to add](../CONTRIBUTING.md#how-to-add) says how to add one.",
                "",
                "| family | originals | presets: toy, true size |",
                "|---|---|---|",
                *graphs,
                "",
                "## What works",
                "",
                "`python scripts/families.py` runs each command on a toy of each family, and writes this page.",
                *rows,
                *(("", "Reasons:", "", *reasons) if reasons else ()),
                "",
                "## What the columns mean",
                "",
                "Ports are transformers' own modules, with gate and up in order or swapped.",
                "",
                "| column | what must work |",
                "|---|---|",
                *meanings,
                "",
            )
        )


def _as_text(note: str) -> str:
    """Return a note that Markdown shows as it is."""
    return "`" + note.replace("`", "'") + "`"


def try_columns(trial: Trial, columns: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Make a toy, and yield each column and how it ended: None, or why it does not work."""
    trial.run(mm2_split, "synthesize", "--preset", trial.family.toy_preset, "--output", trial.model, *_TOY)
    for column in columns:
        try:
            COLUMNS[column](trial)
        except (FailedError, Mm2Error) as error:
            yield column, str(error)
        else:
            yield column, None


# BF16: not all families have FP8 originals.
_TOY = ("--dtype", "bfloat16")
# What other columns need.
_NEEDED = MappingProxyType({"compare": ("sweep",), "diagnose": ("sweep",), "export": ("certify",)})


def with_needed(columns: Sequence[str]) -> tuple[str, ...]:
    """Return columns with those that they need, in order."""
    wanted = {"golden", *columns, *(needed for column in columns for needed in _NEEDED.get(column, ()))}
    return tuple(column for column in COLUMNS if column in wanted)


@click.command()
@click.option("--family", "names", type=click.Choice(list(FAMILIES)), multiple=True, help="Default: all.")
@click.option("--only", type=click.Choice(list(COLUMNS)), multiple=True, help="Column. Default: all.")
@click.option(
    "--earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="What an earlier run printed: the page has its ends too.",
)
@click.option("--output", type=click.Path(path_type=Path), default=PAGE, show_default=True, help="Page.")
def main(names: tuple[str, ...], only: tuple[str, ...], earlier: tuple[Path, ...], output: Path) -> None:
    """Run every command on each family's toy, and write the page: of all, or of these and of earlier runs."""
    columns = with_needed(only or tuple(COLUMNS))
    table = Table(columns=tuple(COLUMNS))
    for path in earlier:
        table.read(path.read_text(encoding="utf-8"))
    for name in names or FAMILIES:
        family = FAMILIES[name]
        with tempfile.TemporaryDirectory() as folder:
            for column, reason in try_columns(Trial(family=family, folder=Path(folder)), columns):
                table.reasons[family.title, column] = reason
                table.print(family.title, column)
    if earlier or not (names or only):
        output.write_text(table.as_page(), encoding="utf-8")
        click.echo(f"written: {output}")


if __name__ == "__main__":
    main()
