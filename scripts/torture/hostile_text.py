r"""Names and messages that others chose reach no terminal and no report as control characters.

ESC, BEL and the other characters of Unicode's category C stand in names of files, options, sites, requests and
models, and in a port's errors and warnings. Every command's streams, and the files of its report, must hold none but
line breaks and tabs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from neuron.cli import main as mm2_test
from torture.hostile_world import HostileWorld, run_command
from torture.tally import Tally

_PROMISE = "what mm2 prints and writes for readers holds no control characters"
# A colour, a window's title, a bell, a reversed reading direction, a cleared screen by one character, a lone return.
HOSTILE = ("\x1b[31m", "\x1b]0;owned\x07", "\x07", "\u202e", "\x9b2J", "a\rb", "\u200b", "\x7f")
# Numbers of the texts that ports warn of: each takes two processes.
_IN_PROCESSES = (1, 3)
_PORT = """
import logging
import warnings

import torch

TEXT = {text!r}


class Port(torch.nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        warnings.warn("built " + TEXT)
        logging.getLogger("a library").warning("built " + TEXT)
        logging.getLogger("neuron.a_port").warning("built " + TEXT)

    def forward(self, hidden_states, **inputs):
        warnings.warn("ran " + TEXT)
        {end}
"""


def run_hostile_text(scratch: Path, seed: int) -> Tally:
    """Run commands on hostile names, and count those whose text holds a control character."""
    tally = Tally(promise=_PROMISE)
    world = HostileWorld.make(scratch / "world")
    for number, text in enumerate(HOSTILE):
        folder = scratch / f"text_{number}"
        folder.mkdir()
        for command, words in _commands(world, folder, text):
            outcome = run_command(command, *words)
            line = f"{command.name} {words!a}"
            tally.check(not outcome.is_traceback, f"{line}: {outcome.one_line}")
            tally.check(not find_controls(outcome.text), f"{line} prints {find_controls(outcome.text)}")
        for name, words in _process_commands(world, folder, text) if number in _IN_PROCESSES else ():
            done = subprocess.run([sys.executable, "-m", "neuron", *words], capture_output=True, check=False)
            printed = find_controls((done.stdout + done.stderr).decode())
            tally.check(not printed, f"{name}: prints {printed}")
        for path in sorted((folder / "report").rglob("*")) if (folder / "report").exists() else ():
            if path.is_file():
                written = find_controls(path.read_text(encoding="utf-8"))
                tally.check(not written, f"{path.name} holds {written}")
    return tally


def find_controls(text: str) -> str:
    """Return the characters of category C in a text but for line breaks and tabs, each once, as escapes."""
    found = sorted(
        {char for char in text if unicodedata.category(char).startswith("C") and char not in "\n\t"}
    )
    return ascii("".join(found)) if found else ""


def _commands(
    world: HostileWorld, folder: Path, text: str
) -> Iterator[tuple[click.Command, tuple[object, ...]]]:
    """Yield commands whose arguments, or files, hold a text."""
    judged = ("--golden", world.golden, "--run", world.run)
    for command, words in (
        (mm2_test, ("show", folder / text)),
        (mm2_test, ("show", world.run, "--format", text)),
        (mm2_test, ("show", world.dump("nxdi"), "--map", folder / text)),
        (mm2_test, (text,)),
        (mm2_test, ("sweep", f"--{text}")),
        (mm2_test, ("sweep", "--model", text, "--golden", world.golden, "--quiet")),
        (mm2_test, ("sweep", "--model", world.model, "--target", f"{text}.py:{text}", "--quiet")),
        (mm2_test, ("sweep", "--model", world.model, "--layers", text, "--quiet")),
        (mm2_gpu, ("show", text)),
        (mm2_gpu, ("extract-all", "--model", world.model, "--seq-len", text)),
        (mm2_split, ("plan", "--model", text, "--node", "a:memory=1GB")),
        (mm2_split, ("plan", "--model", world.model, "--node", f"{text}:memory=1GB")),
        (mm2_split, ("extract", "--plan", world.plan, "--node", text)),
        (mm2_split, ("verify", "--plan", world.plan, "--node", text)),
        (mm2_compare, (*judged, "--criteria", text)),
        (mm2_compare, (*judged, "--layer", text)),
        (mm2_compare, (*judged, "--layer-pattern", text)),
        (mm2_compare, ("--golden", folder / text, "--run", world.run)),
        (mm2_diagnose, (*judged, "--mistake", text)),
    ):
        yield command, words
        yield command, (*words, "--json") if "show" not in words and text not in words[:1] else words
    yield from _on_dumps(world, folder, text)
    yield from _on_captures(world, folder, text)


def _on_dumps(
    world: HostileWorld, folder: Path, text: str
) -> Iterator[tuple[click.Command, tuple[object, ...]]]:
    """Yield commands on dumps with a text in the names of their modules."""
    for tool in ("nxdi", "vllm-neuron", "msprobe", "sglang"):
        dump = folder / tool
        shutil.copytree(world.dump(tool), dump)
        _rename_files(dump, text)
        yield mm2_test, ("show", dump)
        yield mm2_test, ("show", dump, "--json")
        yield mm2_test, ("show", dump, "--map-template")
        yield (
            mm2_compare,
            ("--golden", world.golden, "--run", dump, "--report-path", folder / "report" / tool),
        )
        next(iter(sorted(dump.rglob("*.pt")))).write_bytes(b"no tensor")
        yield mm2_test, ("show", dump)


def _rename_files(dump: Path, text: str) -> None:
    """Put a text behind a module's name in every file, and in the metadata."""
    for path in sorted(dump.rglob("*.pt")):
        if path.name.startswith("rank"):
            path = path.parent.rename(path.parent.with_name(path.parent.name + text)) / path.name
        else:
            path = path.rename(path.with_name(path.name.replace("input_layernorm", "input_layernorm" + text)))
        value = torch.load(path, weights_only=True)
        if isinstance(value, dict):
            value["meta"]["name"] += text
            torch.save(value, path)
    for path in dump.rglob("*.json"):
        renamed = path.read_text().replace('_layernorm"', f'_layernorm{json.dumps(text)[1:-1]}"')
        path.write_text(renamed.replace('"req_ids": ["0"', f'"req_ids": ["0{json.dumps(text)[1:-1]}"'))


def _on_captures(
    world: HostileWorld, folder: Path, text: str
) -> Iterator[tuple[click.Command, tuple[object, ...]]]:
    """Yield commands on captures with a text in their provenance, and in the generated text."""
    for source, name in ((world.golden, "golden"), (world.run, "run")):
        shutil.copytree(source, folder / name)
        path = folder / name / "manifest.json"
        record = json.loads(path.read_text())
        for key in ("model_source", "device", "target", "backend"):
            record["provenance"][key] += text
        record["provenance"]["versions"][text] = text
        record["input_source"] += text
        record["run"]["name"] += text
        path.write_text(json.dumps(record))
    yield mm2_gpu, ("show", folder / "golden")
    yield mm2_gpu, ("show", folder / "golden", "--json")
    judged = ("--golden", folder / "golden", "--run", folder / "run")
    yield mm2_compare, (*judged, "--report-path", folder / "report" / "captures", "--verbose")
    yield mm2_compare, (*judged, "--json")
    yield mm2_test, ("show", folder / "run")


def _process_commands(world: HostileWorld, folder: Path, text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield arguments of `mm2-test` in a process of its own, with ports that warn, log and fail."""
    for name, end in (("fails", "raise ValueError('fails ' + TEXT)"), ("runs", "return hidden_states")):
        port = folder / f"{name}.py"
        port.write_text(_PORT.format(text=text, end=end))
        words = ("sweep", "--model", world.model, "--golden", world.golden, "--target", f"{port}:Port")
        yield f"a port that {name}, and warns {text!a}", (
            *map(str, words), "--backend", "cpu", "--output-dir", str(folder / f"out_{name}")
        )  # fmt: skip
